"""200 mixed requests on a served pair, through kvferry's router and PyPI's ``vllm-router``: ``make load-routers``.

Two real ``vllm serve`` processes (a tiny Qwen3 in float32, Mooncake over TCP) and each router in front of them in turn.
What is asked, compared and audited: :mod:`kvferry.testing.mixed_load`. ``vllm-router`` never tells a producer that
nobody comes for a prompt, so what its clients leave behind is freed by ``publish_timeout``, short here.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from kvferry.testing.mixed_load import Ends, forget_caches, plan_load, run_load, take_references
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.serve import SERVED_NAME, ServedPair, ServePair, serve_pair, serve_router, serve_vllm_router

ROUTER = Path(__file__).parents[1] / ".venv-router" / "bin" / "vllm-router"
PUBLISH_TIMEOUT_S = 30.0
"""Longer than any prompt here waits for its decode engine."""


def pair_of(folder: Path, report: Path) -> ServePair:
    """Few enough blocks that sixteen long prompts do not fit at once."""
    return ServePair(
        build_model(QWEN3, folder),
        folder,
        arguments=(
            "--max-model-len",
            "2304",
            "--block-size",
            "32",
            "--max-num-seqs",
            "16",
            "--num-gpu-blocks-override",
            "600",
        ),
        options={
            "mooncake_protocol": "tcp",
            "transfer_report": str(report),
            "debug_socket_dir": str(folder / "debug"),
            "publish_timeout": PUBLISH_TIMEOUT_S,
        },
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )


def routers(served: ServedPair, folder: Path, wanted: list[str]) -> Iterator[tuple[str, AbstractContextManager[str]]]:
    for name in wanted:
        log = folder / f"{name}.log"
        yield name, (serve_router(served, log=log) if name == "kvferry" else serve_vllm_router(served, ROUTER, log=log))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router", action="append", choices=("kvferry", "vllm-router"), default=[])
    parser.add_argument("--folder", type=Path, help="where logs and reports stay; a temporary one by default")
    chosen = parser.parse_args()
    wanted = chosen.router or ["kvferry", "vllm-router"]
    if "vllm-router" in wanted and not ROUTER.exists():
        print(f"{ROUTER} is missing: `make load-routers` installs it")
        return 2
    bad = 0
    with ExitStack() as stack:
        folder = chosen.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = folder / "transfers.jsonl"
        served = stack.enter_context(serve_pair(pair_of(folder, report)))
        ends = Ends(served.prefill.url, served.decode.url, report, folder / "debug", SERVED_NAME)
        asks = plan_load(chosen.requests, seed=chosen.seed)
        print(f"seed {chosen.seed}: {len(asks)} requests, {len({ask.prompt for ask in asks})} prompts", flush=True)
        references = asyncio.run(
            take_references(
                ends.prefill, asks, model=ends.model, concurrency=chosen.concurrency,
                forget=lambda: forget_caches(ends.engines),
            )
        )  # fmt: skip
        stable = sum(one.stable_for(len(one.alone.text)) for one in references.values())
        print(f"the single engine agrees with itself on {stable} of {len(references)} prompts", flush=True)
        for name, router in routers(served, folder, wanted):
            with router as url:
                audit = run_load(url, ends, asks, references, concurrency=chosen.concurrency)
            print(f"{name}: {audit}", *audit.faults, sep="\n  ", flush=True)
            bad += bool(audit.faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
