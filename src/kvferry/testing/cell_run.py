"""Runs one cell (:mod:`kvferry.testing.cells`): builds its two engines, sends prompts through both, judges.

What must hold in every cell. Each transfer is proven by digests of the moved pages, equal at both ends. (Where vLLM's
own connector is the decode side, its memory is read as it reports the receive; where it is the prefill side, what came
is compared with the same prompt between two kvferry engines.) Each answer is that of a single engine, by the rule of
:mod:`kvferry.testing.comparison`. The cell really is what it says: the kernel split is there in every rank, a long
prompt took several steps at prefill or one, a repeated prompt was found in the prefix caches or not
(:mod:`kvferry.testing.cell_checks`). And at the end every block is back in all pools.

The single engine and its answers do not depend on the cell, so a :class:`Baseline` is made once for each model.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from kvferry.testing.cell_checks import (
    not_built_as_said,
    not_computed_as_said,
    not_found_as_said,
    not_moved_as_said,
)
from kvferry.testing.cell_engines import cell_specs, prompts_of, single_spec
from kvferry.testing.cells import Cell, Peer
from kvferry.testing.comparison import Prompt, Reference, judge, take_references
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engines import Engine, EngineError, start_engines
from kvferry.testing.model_recipes import MODELS, TinyModel
from kvferry.testing.models import build_model
from kvferry.testing.pair import Pair, Served
from kvferry.testing.transfer_report import Transfer, wait_for_report, wait_for_reports
from kvferry.testing.upstream_pair import Fleet

TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """A single engine that does both jobs, and its answers."""

    model: TinyModel
    folder: Path
    single: Engine
    references: tuple[Reference, ...]


@dataclass(frozen=True, slots=True)
class CellResult:
    """What came of a cell."""

    requests: int
    transfers: int
    nbytes: int
    problems: tuple[str, ...]
    """Empty when all is right."""


class CellOutcome(msgspec.Struct, frozen=True):
    """One line of a file of results, for ``docs/support.md``."""

    cell: str
    test: str
    seconds: float
    problems: tuple[str, ...]


@contextmanager
def start_baseline(model: str, *, models: Path, logs: Path, forge: EngineForge) -> Iterator[Baseline]:
    """Start the single engine of ``model`` and let it answer."""
    tiny = MODELS[model]
    folder = build_model(tiny, models)
    spec = single_spec(tiny, folder)
    with start_engines([spec], logs=logs, forge=forge) as (single,):
        yield Baseline(tiny, folder, single, take_references(single, prompts_of(model)))


def run_cell(cell: Cell, baseline: Baseline, *, logs: Path, forge: EngineForge) -> CellResult:
    """Start the cell's engines, send the baseline's prompts through them, and judge."""
    specs = cell_specs(cell, baseline.folder, logs / "transfers.jsonl")
    with start_engines(specs, logs=logs, forge=forge) as engines:
        homes = [(engine, engine.inspect().free_blocks) for engine in engines]
        run = _Run(cell, baseline, Fleet.of(engines), logs / "transfers.jsonl")
        unlike = tuple(not_built_as_said(cell, engines))
        result = run.with_upstream() if cell.peer is not Peer.NONE else run.between_ourselves()
        for engine, home in homes:
            engine.wait_for_free_blocks(home, TIMEOUT_S)
    return replace(result, problems=(*unlike, *result.problems))


@dataclass(frozen=True, slots=True)
class _Run:
    """A cell whose engines are up."""

    cell: Cell
    baseline: Baseline
    fleet: Fleet
    report: Path

    def between_ourselves(self) -> CellResult:
        """Two kvferry engines: digests from both ends."""
        pair = self.fleet.pair("prefill", "decode")
        served = _serve(pair, self.baseline.references)
        found = wait_for_reports([self.report], [s.transfer_id for s in served], TIMEOUT_S)
        transfers = [found[answer.transfer_id] for answer in served]
        problems: list[str] = []
        for reference, answer, transfer in zip(self.baseline.references, served, transfers, strict=True):
            problems += self._judged(reference, answer, transfer)
            problems += [f"{reference.prompt.name}: {p}" for p in transfer.problems()]
        problems += not_found_as_said(self.cell, served[-2:], transfers[-2:])
        return CellResult(len(served), len(transfers), sum(t.nbytes for t in transfers), tuple(problems))

    def with_upstream(self) -> CellResult:
        """Each prompt between two kvferry engines, then the cell's way. Only what is asked again can be found."""
        there = ("upstream", "decode") if self.cell.peer is Peer.PREFILL else ("prefill", "upstream")
        ways = _Way(self.fleet.pair("prefill", "decode")), _Way(self.fleet.pair(*there))
        problems: list[str] = []
        for reference in self.baseline.references:
            for way in ways:
                if reference is not self.baseline.references[-1]:
                    way.forget_prefixes()
                way.serve(reference.prompt)
            between = self._between(ways[0].served[-1])
            other = self._with_theirs(ways[1].served[-1], between)
            for way, transfer in zip(ways, (between, other), strict=True):
                way.transfers.append(transfer)
                problems += self._judged(reference, way.served[-1], transfer)
            problems += [f"{reference.prompt.name}: {p}" for p in (*between.problems(), *self._unlike(between, other))]
        for way in ways:
            problems += not_found_as_said(self.cell, way.served[-2:], way.transfers[-2:])
        moved = ways[0].transfers
        return CellResult(len(moved), len(moved), sum(transfer.nbytes for transfer in moved), tuple(problems))

    def _between(self, answer: Served) -> Transfer:
        return wait_for_report(self.report, answer.transfer_id, lambda found: found.complete, TIMEOUT_S)

    def _with_theirs(self, answer: Served, between: Transfer) -> Transfer:
        def holds(found: Transfer) -> bool:
            if self.cell.peer is Peer.PREFILL:
                return found.landed == between.landed
            return not found.landing_problems()

        return wait_for_report(self.report, answer.transfer_id, holds, TIMEOUT_S)

    def _unlike(self, between: Transfer, other: Transfer) -> Iterator[str]:
        """What is not as between kvferry engines where vLLM's connector is at one end."""
        if self.cell.peer is Peer.PREFILL:
            if other.landed != between.landed:
                yield f"digests {other.landed} with vLLM's connector, {between.landed} without"
            return
        yield from other.landing_problems()
        if other.sent != between.sent:
            yield f"digests {other.sent} with vLLM's connector, {between.sent} without"

    def _judged(self, reference: Reference, answer: Served, transfer: Transfer) -> Iterator[str]:
        """The answer, and how it came about."""
        verdict = judge(reference, answer.decode, single=self.baseline.single, exact=self.baseline.model.exact)
        name = answer.decode.request_id
        if not verdict.equal:
            yield f"{name}: {verdict.how}: {verdict.detail}"
        yield from (f"{name}: {p}" for p in not_computed_as_said(self.cell, reference.prompt, answer))
        yield from (f"{name}: {p}" for p in not_moved_as_said(self.cell, transfer))


@dataclass(frozen=True, slots=True)
class _Way:
    """Two engines of a cell, and what went through them."""

    pair: Pair
    served: list[Served] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    def forget_prefixes(self) -> None:
        """Of both engines."""
        for engine in (self.pair.prefill, self.pair.decode):
            _forget_prefixes(engine)

    def serve(self, prompt: Prompt) -> None:
        """Prefill, then decode."""
        name = f"{prompt.name}-{self.pair.prefill.spec.name}-{self.pair.decode.spec.name}"
        self.served.append(self.pair.generate(prompt.tokens, max_tokens=prompt.max_tokens, name=name))


def _forget_prefixes(engine: Engine) -> None:
    """Empty the prefix cache; vLLM does not while a connector holds blocks."""
    deadline = time.monotonic() + TIMEOUT_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise EngineError(f"{engine.spec.name}: blocks were still held after {TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def _serve(pair: Pair, references: Sequence[Reference]) -> list[Served]:
    """The first ones one after the other, the others at once, and the repeated one when it can be found."""
    prompts = [reference.prompt for reference in references]
    served = [pair.generate(p.tokens, max_tokens=p.max_tokens, name=p.name) for p in prompts[:2]]
    tickets = [pair.submit(p.tokens, max_tokens=p.max_tokens, name=p.name) for p in prompts[2:-1]]
    served += [ticket.result() for ticket in tickets]
    last = prompts[-1]
    return [*served, pair.generate(last.tokens, max_tokens=last.max_tokens, name=last.name)]
