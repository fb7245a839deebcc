"""Cells as an operator starts them: real ``vllm serve`` processes, nothing forked, with routers in front.

They take minutes to start, so they run with ``--cells all`` only (``make test-vllm``); ``tests/router/test_serve.py``,
a dense model over Mooncake, always runs. What is judged is what :mod:`kvferry.testing.mixed_load` judges, of clients
that leave among others: each answer against the single engine's, digests of the pages at both ends, all blocks home.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.mixed_load import Ends, Reference, forget_caches, plan_load, run_load, take_references
from kvferry.testing.model_recipes import LFM2, QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.router_load import Fleet, Way
from kvferry.testing.serve import (
    SERVED_NAME,
    Connector,
    Role,
    ServedPair,
    ServePair,
    ServeSpec,
    Side,
    reporting,
    serve_engines,
    serve_pair,
    serve_router,
    serve_vllm_router,
)
from kvferry.testing.transfer_report import Transfer, read_reports, wait_for_reports

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.timeout(1500)]

LONGEST = 900
CLIENTS = 8
UNFETCHED_S = 30
"""How long a prompt waits for a decode engine that never comes."""
VLLM_ROUTER = Path(__file__).parents[2] / ".venv-router" / "bin" / "vllm-router"
ASKS = plan_load(40, seed=11, longest=LONGEST)
COMMON = ("--max-model-len", "1024", "--max-num-seqs", "8")
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(UNFETCHED_S)}


@pytest.fixture(autouse=True, scope="module")
def of_every_cell(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")


def options(folder: Path, **more: object) -> dict[str, object]:
    told = {"transfer_report": str(folder / "transfers.jsonl"), "debug_socket_dir": str(folder / "debug")}
    # Four servers on two cores: a peer that has no time for some seconds is not dead.
    return {**told, "publish_timeout": float(UNFETCHED_S), "silence_timeout": 30.0, **more}


def references_of(ends: Ends) -> dict[str, Reference]:
    def forget() -> None:
        forget_caches(ends.engines)

    forget()
    return asyncio.run(take_references(ends.prefill, ASKS, model=ends.model, concurrency=CLIENTS, forget=forget))


def test_a_short_convolution_over_cma_between_unequal_blocks(model_folder: Path, tmp_path: Path) -> None:
    pair = ServePair(
        build_model(LFM2, model_folder),
        tmp_path,
        arguments=(*COMMON, "--compilation-config", '{"custom_ops":["none"]}'),
        options=options(tmp_path, transport="cma"),
        environment=ENVIRONMENT,
        prefill=Side(arguments=("--block-size", "128", "--num-gpu-blocks-override", "60")),
        decode=Side(arguments=("--block-size", "64", "--num-gpu-blocks-override", "120")),
    )
    with serve_pair(pair) as served, serve_router(served, log=tmp_path / "router.log") as router:
        ends = Ends(
            served.prefill.url,
            served.decode.url,
            tmp_path / "transfers.jsonl",
            tmp_path / "debug",
            SERVED_NAME,
            least=2,
        )
        audit = run_load(router, ends, ASKS, references_of(ends), concurrency=CLIENTS)
    assert audit.faults == []
    assert audit.ends["finished"] > 20


@dataclass(frozen=True, slots=True)
class Mixed:
    """Engines of both connectors for a dense model, and what one of them answers alone."""

    fleet: Fleet
    references: dict[str, Reference]


@pytest.fixture(scope="module")
def mixed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("mixed")
    model = build_model(QWEN3, model_folder)
    whose: list[tuple[Role, Connector]] = [
        (role, connector) for connector in ("ferry", "upstream") for role in ("prefill", "decode")
    ]
    specs = [
        ServeSpec(
            f"{connector}-{role}",
            role,
            model,
            folder,
            connector=connector,
            arguments=(*COMMON, "--block-size", "32", "--num-gpu-blocks-override", "300"),
            options={**(options(folder) if connector == "ferry" else {}), **reporting(connector, folder)},
            environment=ENVIRONMENT,
        )
        for role, connector in whose
    ]
    with serve_engines(specs) as served:
        fleet = Fleet(folder, dict(zip(whose, served, strict=True)))
        yield Mixed(fleet, references_of(fleet.ends(("ferry", "ferry"))))


Router = Callable[[ServedPair, Path], AbstractContextManager[str]]


def kvferrys(pair: ServedPair, log: Path) -> AbstractContextManager[str]:
    return serve_router(pair, log=log)


def pypis(pair: ServedPair, log: Path) -> AbstractContextManager[str]:
    if not VLLM_ROUTER.exists():
        pytest.skip("vllm-router is not installed: `make test-vllm` and `make load-routers` do it")
    return serve_vllm_router(pair, VLLM_ROUTER, log=log)


WAYS: list[Way] = [("upstream", "ferry"), ("ferry", "upstream")]


@pytest.mark.parametrize("router", [kvferrys, pypis], ids=["kvferry serve-router", "vllm-router"])
@pytest.mark.parametrize("way", WAYS, ids=["from upstream", "to upstream"])
def test_mixed_load_with_vllms_own_connector_at_one_end(way: Way, router: Router, mixed: Mixed, tmp_path: Path) -> None:
    ends = mixed.fleet.ends(way)
    with router(mixed.fleet.pair(way), tmp_path / "router.log") as url:
        audit = run_load(url, ends, ASKS, mixed.references, concurrency=CLIENTS)
    assert audit.faults == []
    assert audit.ends["finished"] > 20


@pytest.mark.parametrize("length", [2, 96, 97, 700])
def test_pages_are_those_of_a_transfer_between_kvferry_engines(length: int, mixed: Mixed, tmp_path: Path) -> None:
    prompt = (f"{length} tokens of a prompt that three pairs of servers move; " * 20)[:length]
    between = ask(mixed, ("ferry", "ferry"), prompt, tmp_path)
    assert between.proven, between.problems()
    assert between.landed
    for way in WAYS:
        other = ask(mixed, way, prompt, tmp_path)
        assert other.proven or way[0] == "upstream", other.problems()
        assert other.landed == between.landed


def ask(mixed: Mixed, way: Way, prompt: str, folder: Path) -> Transfer:
    """Through a router, whose transfer is the only new one, with no prefix cached at either end."""
    ends = mixed.fleet.ends(way)
    forget_caches(ends.engines)
    before = read_reports([ends.report]).keys()
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    with serve_router(mixed.fleet.pair(way), log=folder / "router.log") as url:
        answers = [
            httpx.post(f"{address}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status().json()
            for address in (url, ends.prefill)
        ]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    (new,) = read_reports([ends.report]).keys() - before
    return wait_for_reports([ends.report], [new], 5 if len(ends.told_by) == 2 else 0.5)[new]
