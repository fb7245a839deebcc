"""200 mixed requests, kvferry at both ends, through kvferry's router and through PyPI's ``vllm-router``.

The whole load of ``make load-routers``, which has more ways and forks nothing: prompts of 1 to 2,000 tokens, sixteen
clients at a time, some of which leave, and prompts that are asked again. Both routers stand before the same two
engines. What is judged, and how the engines' block pools are asked: :mod:`kvferry.testing.mixed_load`. It takes a
minute and a half on two quiet cores, so it runs with ``--cells all`` only (``make test-vllm``).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.mixed_load import Reference, plan_load, run_load
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.router_load import CONCURRENCY, PATIENT, REQUESTS, WAYS, Fleet, references_of, serve_fleet
from kvferry.testing.serve import ServedPair, serve_router, serve_vllm_router

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.timeout(1500)]

VLLM_ROUTER = Path(__file__).parents[2] / ".venv-router" / "bin" / "vllm-router"
WAY = WAYS["kvferry"]
ASKS = plan_load(REQUESTS, seed=1)


@pytest.fixture(autouse=True, scope="module")
def of_every_cell(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")


@dataclass(frozen=True, slots=True)
class Site:
    """Two engines, and what one of them answers alone."""

    fleet: Fleet
    references: dict[str, Reference]


@pytest.fixture(scope="module")
def site(model_folder: Path, forge: EngineForge, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    model = build_model(QWEN3, model_folder)
    with serve_fleet([WAY], model, tmp_path_factory.mktemp("load"), forge=forge) as fleet:
        yield Site(fleet, references_of(fleet.pair(WAY).prefill.url, ASKS))


Router = Callable[[ServedPair, Path], AbstractContextManager[str]]


def kvferrys(pair: ServedPair, log: Path) -> AbstractContextManager[str]:
    return serve_router(pair, log=log, arguments=PATIENT)


def pypis(pair: ServedPair, log: Path) -> AbstractContextManager[str]:
    if not VLLM_ROUTER.exists():
        pytest.skip("vllm-router is not installed: `make test-vllm` and `make load-routers` do it")
    return serve_vllm_router(pair, VLLM_ROUTER, log=log)


@pytest.mark.parametrize("router", [kvferrys, pypis], ids=["kvferry serve-router", "vllm-router"])
def test_200_mixed_requests_are_answered_right_and_no_block_is_lost(router: Router, site: Site, tmp_path: Path) -> None:
    ends = site.fleet.ends(WAY)
    with router(site.fleet.pair(WAY), tmp_path / "router.log") as url:
        audit = run_load(url, ends, ASKS, site.references, concurrency=CONCURRENCY)
    print(audit)
    assert audit.faults == []  # wrong answers, unequal pages, blocks that are not back, transfers that are not over
    assert sum(audit.ends.values()) == REQUESTS
    assert audit.ends.keys() == {"finished", "left"}
    assert audit.ends["finished"] >= sum(ask.stays for ask in ASKS) >= REQUESTS * 2 / 3
    assert audit.ends["left"] >= sum(ask.leaves_after == 0 for ask in ASKS) > 0
    assert audit.by_text + audit.by_logprobs == audit.ends["finished"]
    assert audit.by_text > REQUESTS / 2
