"""200 mixed requests on served pairs, through kvferry's router and PyPI's ``vllm-router``: ``make load-routers``.

Real ``vllm serve`` processes, nothing forked: a prefill and a decode engine with kvferry, and the same with vLLM's own
connector (:mod:`kvferry.testing.router_load`). Each way from a prefill to a decode engine of which one at least is
kvferry's has each router in front of it in turn. What is asked, compared and audited is in
:mod:`kvferry.testing.mixed_load`.

``--router example-proxy --proxy FILE`` puts the proxy there that vLLM gives as an example
(:mod:`kvferry.testing.example_proxy` says where it is).
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from kvferry.testing.example_proxy import serve_example_proxy
from kvferry.testing.mixed_load import plan_load, run_load
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.router_load import CONCURRENCY, PATIENT, REQUESTS, WAYS, Fleet, Way, references_of, serve_fleet
from kvferry.testing.serve import ServedPair, serve_router, serve_vllm_router

ROUTER = Path(__file__).parents[1] / ".venv-router" / "bin" / "vllm-router"


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
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
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
        fleet = stack.enter_context(serve_fleet(ways.values(), build_model(QWEN3, folder), folder))
        return load(fleet, ways, wanted, chosen)


def load(fleet: Fleet, ways: Mapping[str, Way], wanted: Sequence[str], chosen: argparse.Namespace) -> int:
    asks = plan_load(chosen.requests, seed=chosen.seed)
    print(f"seed {chosen.seed}: {len(asks)} requests, {len({ask.prompt for ask in asks})} prompts", flush=True)
    first = fleet.ends(next(iter(ways.values())))
    references = references_of(first.prefill, asks, concurrency=chosen.concurrency)
    stable = sum(one.stable_for(len(one.alone.text)) for one in references.values())
    print(f"the single engine agrees with itself on {stable} of {len(references)} prompts", flush=True)
    bad = 0
    for way, kinds in ways.items():
        ends = fleet.ends(kinds)
        for name, router in routers(fleet.pair(kinds), fleet.folder, wanted, chosen.proxy):
            with router as url:
                audit = run_load(url, ends, asks, references, concurrency=chosen.concurrency)
            print(f"{way}, {name}: {audit}", *audit.faults, sep="\n  ", flush=True)
            bad += bool(audit.faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
