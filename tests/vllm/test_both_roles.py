"""Engines in both roles at once: each computes prompts for the other, and for itself when no router sends a request."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvferry.testing.comparison import Prompt, Reference, judge, take_references
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec, Generation
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, Served
from kvferry.testing.transfer_report import read_reports, wait_for_reports
from kvferry.testing.upstream_pair import Fleet, member

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

LENGTHS = (1, 65, 200, 431)
TOKENS = 8
TEXT = token_ids("Two ferries, and each of them is at home on either bank of the river. " * 8)


@dataclass(frozen=True)
class Site:
    """Two engines in both roles, and what a single one without a connector answers."""

    there: Pair
    back: Pair
    single: Engine
    references: tuple[Reference, ...]
    report: Path

    @property
    def both_ways(self) -> tuple[tuple[Pair, str], ...]:
        return (self.there, "there"), (self.back, "back")

    def check(self, reference: Reference, answer: Generation) -> None:
        """The answer is the single engine's."""
        verdict = judge(reference, answer, single=self.single, exact=True)
        assert verdict.equal, f"{reference.prompt.name}: {verdict}"

    def check_moved(self, served: Sequence[Served]) -> None:
        """Every transfer is proven at both ends."""
        ids = [one.transfer_id for one in served]
        for transfer in wait_for_reports([self.report], ids, 15).values():
            assert transfer.problems() == ()


@contextmanager
def sites(model: TinyModel, transport: str, folder: Path, *, models: Path, forge: EngineForge) -> Iterator[Site]:
    report = folder / "transfers.jsonl"

    def spec_of(name: str) -> EngineSpec:
        return EngineSpec(
            name=name, model=str(build_model(model, models)), dtype=model.dtype, custom_ops=model.custom_ops,
            block_size=64, num_blocks=64, max_model_len=1024,
        )  # fmt: skip

    both = [
        member(spec_of(name), "both", "ferry", transport=transport, transfer_report=str(report))
        for name in ("left", "right")
    ]
    with start_engines([*both, spec_of("single")], logs=folder, forge=forge) as engines:
        homes = [(engine, engine.inspect().free_blocks) for engine in engines[:2]]
        prompts = [Prompt(f"prompt-{length}", tuple(TEXT[:length]), TOKENS) for length in LENGTHS]
        fleet = Fleet.of(engines[:2])
        yield Site(
            fleet.pair("left", "right"),
            fleet.pair("right", "left"),
            engines[2],
            take_references(engines[2], prompts),
            report,
        )
        for engine, home in homes:
            assert engine.wait_for_free_blocks(home, timeout=15).held == 0


@pytest.fixture(scope="module", params=[(QWEN3, "mooncake"), (LFM2, "cma")], ids=["dense", "state"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_folder: Path, forge: EngineForge
) -> Iterator[Site]:
    model, transport = request.param
    with sites(model, transport, tmp_path_factory.mktemp("both"), models=model_folder, forge=forge) as one:
        yield one


def test_an_engine_in_both_roles_serves_who_comes_without_a_router(site: Site) -> None:
    left, before = site.there.prefill, read_reports([site.report])
    for reference in site.references:
        prompt = reference.prompt
        alone = left.generate(prompt.tokens, max_tokens=TOKENS, request_id=prompt.name)
        site.check(reference, alone)
        assert (alone.cached_tokens, alone.kv_transfer_params) == (0, None)
    assert read_reports([site.report]) == before, "nothing moves"


def test_two_engines_in_both_roles_serve_each_other_and_themselves(site: Site) -> None:
    served: list[Served] = []
    for pair, way in site.both_ways:
        for reference in site.references:
            prompt = reference.prompt
            served.append(pair.generate(prompt.tokens, max_tokens=TOKENS, name=f"{prompt.name}-{way}"))
            site.check(reference, served[-1].decode)
    tickets = [
        (reference, pair.submit(reference.prompt.tokens, max_tokens=TOKENS, name=f"{reference.prompt.name}-{way}"))
        for reference in site.references
        for pair, way in site.both_ways
    ]
    for reference, ticket in tickets:
        served.append(ticket.result())
        site.check(reference, served[-1].decode)
    moved = [one for one in served if one.decode.cached_tokens]
    site.check_moved(moved)
    assert len(moved) == len(served) * 3 // 4, "of a single token vLLM says that nothing came"


def test_an_engine_in_both_roles_fetches_from_itself(site: Site) -> None:
    """A router may well choose the same engine for both halves of a request."""
    left = site.there.prefill
    to_itself = Pair(site.there.spec, left, left)
    for reference in site.references[1:]:
        prompt = reference.prompt
        served = to_itself.generate(prompt.tokens, max_tokens=TOKENS, name=f"{prompt.name}-itself")
        site.check(reference, served.decode)
        assert served.decode.cached_tokens >= len(prompt.tokens) - 1
        site.check_moved([served])
