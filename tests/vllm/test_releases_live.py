"""Real engines of two releases of vLLM: the installed one, and those that lie as overlays in ``build``.

An overlay (:mod:`kvferry.testing.vllm_overlay`, ``make test-release RELEASE=...``) has the release's own Python over
the compiled files of the installed vLLM for the CPU. Engines of both releases, under kvferry and under vLLM's own
connector, exchange the caches of the same prompts in every direction in which kvferry is one of the ends. Right is: the
answer of one engine of the installed release alone, one digest for the pages of a prompt whoever computed, wrote and
received them, and every block back.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import CPU_ENVIRONMENT, start_engines
from kvferry.testing.model_recipes import DEEPSEEK_V2, GEMMA3, LFM2, QWEN3, QWEN3_NEXT, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Served
from kvferry.testing.transfer_report import read_reports
from kvferry.testing.upstream_pair import Fleet, Kind, Role, member
from kvferry.testing.vllm_overlay import Overlay, installed_release, overlays

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.timeout(900)]

BUILD: Final = Path(__file__).parents[2] / "build"
OVERLAYS: Final = [one for one in overlays(BUILD) if one.release != installed_release()]
ANSWER: Final = 8

WAYS: Final = (
    ("old-ferry", "new-ferry"),
    ("new-ferry", "old-ferry"),
    ("new-ferry", "new-ferry"),
    ("new-upstream", "old-ferry"),
    ("old-ferry", "new-upstream"),
    ("new-upstream", "new-ferry"),
    ("new-ferry", "new-upstream"),
)
"""Who computes the prompt, who goes on from there."""

BLOCKS: Final = {DEEPSEEK_V2.name: 16, QWEN3_NEXT.name: 640}


def spec_of(model: TinyModel, folder: Path, name: str) -> EngineSpec:
    block = BLOCKS.get(model.name, 64)
    return EngineSpec(
        name=name,
        model=str(folder),
        dtype=model.dtype,
        block_size=block,
        num_blocks=max(16, 4096 // block),
        max_model_len=1024,
        custom_ops=model.custom_ops,
    )


@pytest.fixture(scope="module", params=OVERLAYS or [None], ids=lambda one: one.release if one else "none")
def newer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Overlay, EngineForge]]:
    """An overlay, and the warm process of its engines."""
    if request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    if request.param is None:
        pytest.skip("no other release of vLLM in build: make test-release RELEASE=0.33.0")
    overlay: Overlay = request.param
    log = tmp_path_factory.mktemp("newer") / "forge.log"
    with EngineForge({**CPU_ENVIRONMENT, **overlay.environment}, log) as warm:
        yield overlay, warm


@pytest.mark.parametrize("model", [QWEN3, GEMMA3, DEEPSEEK_V2, LFM2, QWEN3_NEXT], ids=lambda one: one.name)
def test_two_releases_exchange_caches(
    model: TinyModel, newer: tuple[Overlay, EngineForge], forge: EngineForge, tmp_path: Path, model_folder: Path
) -> None:
    overlay, warm = newer
    folder, report = build_model(model, model_folder), tmp_path / "transfers.jsonl"
    roles: tuple[Role, ...] = ("prefill", "decode")
    kinds: tuple[Kind, ...] = ("ferry", "upstream")
    old = [
        member(spec_of(model, folder, f"old-ferry-{role}"), role, "ferry", transfer_report=str(report))
        for role in roles
    ]
    new = [
        member(spec_of(model, folder, f"new-{kind}-{role}"), role, kind, transfer_report=str(report))
        for kind in kinds
        for role in roles
    ]
    with ExitStack() as stack:
        engines = (
            *stack.enter_context(start_engines(old, logs=tmp_path, forge=forge)),
            *stack.enter_context(start_engines(new, logs=tmp_path, forge=warm)),
        )
        assert f"v{overlay.release}" in (tmp_path / "new-ferry-decode.log").read_text(), "another release runs"
        fleet = Fleet.of(engines)
        free = {engine.spec.name: engine.inspect().free_blocks for engine in engines}
        for number, length in enumerate((2, 65, 300, 700)):
            prompt = token_ids(f"{number}: two releases of one engine exchange a prompt of {length} tokens; " * 20)
            prompt = prompt[:length]
            want = fleet.engines["old-ferry-decode"].generate(prompt, max_tokens=ANSWER, request_id=f"alone{number}")
            served = {
                f"{first}>{second}": fleet.pair(f"{first}-prefill", f"{second}-decode").generate(
                    prompt, max_tokens=ANSWER, name=f"{first}-{second}-{number}"
                )
                for first, second in WAYS
            }
            if model.exact:
                told = {way: one.decode.tokens for way, one in served.items()}
                assert told == dict.fromkeys(served, want.tokens), length
            fetched = {way: one.decode.cached_tokens for way, one in served.items()}
            assert set(fetched.values()) <= {length - 1, length}, fetched
            check_pages(served, report)
        for engine in engines:
            engine.wait_for_free_blocks(free[engine.spec.name], timeout=15)


def check_pages(served: dict[str, Served], report: Path) -> None:
    """One digest for all: told by each end that is kvferry, and read at each decode engine. All before the answer."""
    told: dict[str, set[str | None]] = {}
    reports = read_reports([report])
    for way, one in served.items():
        found = reports[one.transfer_id]
        assert found.proven or "upstream" in way, (way, found.problems())
        assert not found.landing_problems() or way.startswith("new-upstream"), (way, found.landing_problems())
        assert found.consumer, way
        lines = (*found.producer, *found.consumer)
        assert {line.status for line in lines} == {"done"}
        told[way] = {line.digest for line in lines}
    assert len(set().union(*told.values())) == 1, told
