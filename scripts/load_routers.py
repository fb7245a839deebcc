"""200 mixed requests on served pairs, through kvferry's router and PyPI's ``vllm-router``: ``make load-routers``.

Real ``vllm serve`` processes (a tiny Qwen3 in float32, Mooncake over TCP): a prefill and a decode engine with kvferry,
and the same with vLLM's own connector. Each way from a prefill to a decode engine of which one at least is kvferry's
has each router in front of it in turn. What is asked, compared and audited: :mod:`kvferry.testing.mixed_load`.
``vllm-router`` never tells a producer that nobody comes for a prompt, and neither router can tell vLLM's own connector;
so what clients leave behind is freed when it expires, soon here.

``--router example-proxy --proxy FILE`` puts the proxy there that vLLM gives as an example
(:mod:`kvferry.testing.example_proxy` says where it is).
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from kvferry.testing.example_proxy import serve_example_proxy
from kvferry.testing.mixed_load import Ends, forget_caches, plan_load, run_load, take_references
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.serve import (
    SERVED_NAME,
    Connector,
    Role,
    Served,
    ServedPair,
    ServeSpec,
    reporting,
    serve_engines,
    serve_router,
    serve_vllm_router,
)

ROUTER = Path(__file__).parents[1] / ".venv-router" / "bin" / "vllm-router"
UNFETCHED_S = 30
"""How long a prompt waits for its decode engine: longer than any here does."""

PATIENT = ("--connect-timeout", "30")
"""Of a router: what listens may be slow to accept on a machine that four servers share."""

WAYS: dict[str, tuple[Connector, Connector]] = {
    "kvferry": ("ferry", "ferry"),
    "from-upstream": ("upstream", "ferry"),
    "to-upstream": ("ferry", "upstream"),
}
Engines = dict[tuple[Role, Connector], Served]


def spec_of(role: Role, connector: Connector, folder: Path) -> ServeSpec:
    """Few enough blocks that sixteen long prompts do not fit at once."""
    options = {
        "debug_socket_dir": str(folder / "debug"),
        "publish_timeout": float(UNFETCHED_S),
        "silence_timeout": 30.0,  # four servers on two cores: a peer that has no time for some seconds is not dead
    }
    return ServeSpec(
        f"{role}-{connector}",
        role,
        build_model(QWEN3, folder),
        folder,
        connector=connector,
        arguments=(
            *("--max-model-len", "2304", "--block-size", "32", "--max-num-seqs", "16"),
            *("--num-gpu-blocks-override", "600"),
        ),
        options={**(options if connector == "ferry" else {}), **reporting(connector, folder)},
        environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(UNFETCHED_S)},
    )


def ends_of(engines: Engines, way: tuple[Connector, Connector], folder: Path) -> Ends:
    pair = pair_of(engines, way)
    return Ends(
        pair.prefill.url,
        pair.decode.url,
        folder / "transfers.jsonl",
        folder / "debug",
        SERVED_NAME,
        told_by=frozenset(("producer", "consumer") if way[0] == "ferry" else ("consumer",)),
    )


def pair_of(engines: Engines, way: tuple[Connector, Connector]) -> ServedPair:
    return ServedPair.of(engines["prefill", way[0]], engines["decode", way[1]])


def routers(
    served: ServedPair, folder: Path, wanted: Sequence[str], proxy: Path | None
) -> Iterator[tuple[str, AbstractContextManager[str]]]:
    for name in wanted:
        log = folder / f"{name}.log"
        match name, proxy:
            case "kvferry", _:
                yield name, serve_router(served, log=log, arguments=PATIENT)
            case "example-proxy", Path() as script:
                yield name, serve_example_proxy(served, script, log=log)
            case _:
                yield name, serve_vllm_router(served, ROUTER, log=log)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router", action="append", choices=("kvferry", "vllm-router", "example-proxy"), default=[])
    parser.add_argument("--proxy", type=Path, help="mooncake_connector_proxy.py of vLLM's source archive")
    parser.add_argument("--way", action="append", choices=tuple(WAYS), default=[])
    parser.add_argument("--folder", type=Path, help="where logs and reports stay; a temporary one by default")
    chosen = parser.parse_args()
    wanted = chosen.router or ["kvferry", "vllm-router"]
    if "vllm-router" in wanted and not ROUTER.exists():
        print(f"{ROUTER} is missing: `make load-routers` installs it")
        return 2
    if "example-proxy" in wanted and (chosen.proxy is None or not chosen.proxy.exists()):
        parser.error("example-proxy needs --proxy FILE: mooncake_connector_proxy.py of vLLM's source archive")
    with ExitStack() as stack:
        folder = chosen.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = {name: WAYS[name] for name in chosen.way or WAYS}
        engines = start(ways.values(), folder, stack)
        return load(engines, ways, wanted, folder, chosen)


def start(ways: Iterable[tuple[Connector, Connector]], folder: Path, stack: ExitStack) -> Engines:
    roles: tuple[Role, Role] = ("prefill", "decode")
    needed = sorted({one for way in ways for one in zip(roles, way, strict=True)})
    served = stack.enter_context(serve_engines([spec_of(role, connector, folder) for role, connector in needed]))
    return dict(zip(needed, served, strict=True))


def load(
    engines: Engines,
    ways: dict[str, tuple[Connector, Connector]],
    wanted: Sequence[str],
    folder: Path,
    chosen: argparse.Namespace,
) -> int:
    asks = plan_load(chosen.requests, seed=chosen.seed)
    print(f"seed {chosen.seed}: {len(asks)} requests, {len({ask.prompt for ask in asks})} prompts", flush=True)
    first = ends_of(engines, next(iter(ways.values())), folder)
    references = asyncio.run(
        take_references(
            first.prefill, asks, model=SERVED_NAME, concurrency=chosen.concurrency,
            forget=lambda: forget_caches([first.prefill]),
        )
    )  # fmt: skip
    stable = sum(one.stable_for(len(one.alone.text)) for one in references.values())
    print(f"the single engine agrees with itself on {stable} of {len(references)} prompts", flush=True)
    bad = 0
    for way, kinds in ways.items():
        ends = ends_of(engines, kinds, folder)
        for name, router in routers(pair_of(engines, kinds), folder, wanted, chosen.proxy):
            with router as url:
                audit = run_load(url, ends, asks, references, concurrency=chosen.concurrency)
            print(f"{way}, {name}: {audit}", *audit.faults, sep="\n  ", flush=True)
            bad += bool(audit.faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
