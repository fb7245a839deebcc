"""Runs one cell (:mod:`kvferry.testing.cells`): builds its two engines, sends prompts through both, judges.

What must hold in every cell. Each transfer is proven by digests of the moved pages, equal at both ends. (Where vLLM's
own connector is the decode side, its memory is read as it reports the receive; where it is the prefill side, what came
is compared with the same prompt between two kvferry engines.) Each answer
is that of a single engine, by the rule of :mod:`kvferry.testing.comparison`. The cell really is what it says: the
kernel split is there, a long prompt took several steps, a repeated prompt was found in the prefix cache. And at the
end every block is back in both pools.

The single engine and its answers do not depend on the cell, so a :class:`Baseline` is made once for each model.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvferry.testing.cells import Blocks, Cache, Cell, Chunks, Model, Peer, Split
from kvferry.testing.comparison import Prompt, Reference, judge, take_references
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import Engine, EngineError, start_engines
from kvferry.testing.model_recipes import MODELS, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, Served, pair_spec
from kvferry.testing.transfer_report import Transfer, wait_for_report, wait_for_reports
from kvferry.testing.upstream_pair import Fleet, Role, member

KERNEL_BLOCK: Final = 32
MAX_MODEL_LEN: Final = 1024
CHUNK_TOKENS: Final = 192
"""Tokens of a step where prompts are computed in chunks."""

CACHE_TOKENS: Final = 6144
"""Room of each engine's cache."""

TIMEOUT_S: Final = 20.0

_SIZES: Final[Mapping[Blocks, tuple[int, int]]] = {
    Blocks.EQUAL: (128, 128),
    Blocks.SMALLER: (128, 64),
    Blocks.LARGER: (128, 768),
    Blocks.UNEVEN: (96, 64),
}
_STATE_SIZES: Final[Mapping[Blocks, tuple[int, int]]] = {
    # vLLM makes the attention page of this model at least as large as its state: 640 tokens.
    Blocks.EQUAL: (640, 640),
    Blocks.SMALLER: (1280, 640),
    Blocks.LARGER: (640, 1280),
    Blocks.UNEVEN: (640, 960),
}
_LENGTHS: Final = (7, 64, 129, 385, 700, 850)
"""Of the prompts. The last one is longer than every block, so that a prefix cache can find something."""

_TOKENS: Final = 10


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


def block_sizes(cell: Cell) -> tuple[int, int]:
    """The logical blocks of prefill and decode."""
    if cell.model is Model.DEEPSEEK_V2:
        return 16, 16
    return (_STATE_SIZES if cell.model is Model.QWEN3_NEXT else _SIZES)[cell.blocks]


def prompts_of(model: str) -> tuple[Prompt, ...]:
    """Printable text of several lengths; the last prompt is asked a second time."""
    text = f"A ferry crosses the river {model} at night, with one lamp at the bow; "
    prompts = [
        Prompt(f"prompt-{n}", tuple(token_ids(f"{n} times. " + text * (n // len(text) + 1))[:n]), _TOKENS)
        for n in _LENGTHS
    ]
    return (*prompts, Prompt(f"{prompts[-1].name}-again", prompts[-1].tokens, _TOKENS))


@contextmanager
def start_baseline(model: str, *, models: Path, logs: Path, forge: EngineForge) -> Iterator[Baseline]:
    """Start the single engine of ``model`` and let it answer."""
    tiny = MODELS[model]
    folder = build_model(tiny, models)
    block = 16 if model == Model.DEEPSEEK_V2 else 640 if model == Model.QWEN3_NEXT else 128
    spec = _engine_spec("single", tiny, folder, block=block)
    with start_engines([spec], logs=logs, forge=forge) as (single,):
        yield Baseline(tiny, folder, single, take_references(single, prompts_of(model)))


def run_cell(cell: Cell, baseline: Baseline, *, logs: Path, forge: EngineForge) -> CellResult:
    """Start the cell's engines, send the baseline's prompts through them, and judge."""
    specs = cell_specs(cell, baseline.folder, logs / "transfers.jsonl")
    with start_engines(specs, logs=logs, forge=forge) as engines:
        homes = [(engine, engine.inspect().free_blocks) for engine in engines]
        run = _Run(cell, baseline, Fleet.of(engines), logs / "transfers.jsonl")
        result = run.with_upstream() if cell.peer is not Peer.NONE else run.between_ourselves()
        for engine, home in homes:
            engine.wait_for_free_blocks(home, TIMEOUT_S)
    return result


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
        problems = list(_not_as_said(self.cell, pair.prefill, decode=pair.decode))
        served = _serve(pair, self.baseline.references)
        transfers = wait_for_reports([self.report], [s.transfer_id for s in served], TIMEOUT_S)
        for reference, answer in zip(self.baseline.references, served, strict=True):
            problems += self._judged(reference, answer)
            problems += [f"{reference.prompt.name}: {p}" for p in transfers[answer.transfer_id].problems()]
        problems += _caches_missed(self.cell, served, transfers)
        moved = [transfers[answer.transfer_id] for answer in served]
        return CellResult(len(served), len(moved), sum(transfer.nbytes for transfer in moved), tuple(problems))

    def with_upstream(self) -> CellResult:
        """Each prompt between two kvferry engines, then the cell's way."""
        ours = self.fleet.pair("prefill", "decode")
        theirs = self.fleet.pair(
            *(("upstream", "decode") if self.cell.peer is Peer.PREFILL else ("prefill", "upstream"))
        )
        problems: list[str] = []
        nbytes = 0
        for reference in self.baseline.references:
            prompt = reference.prompt
            moved = []
            for way, pair in (("ours", ours), ("theirs", theirs)):
                for engine in (pair.prefill, pair.decode):
                    _forget_prefixes(engine)
                answer = pair.generate(prompt.tokens, max_tokens=prompt.max_tokens, name=f"{prompt.name}-{way}")
                problems += self._judged(reference, answer)
                moved.append(answer.transfer_id)
            between = wait_for_report(self.report, moved[0], lambda found: found.complete, TIMEOUT_S)
            nbytes += between.nbytes
            problems += [f"{prompt.name}: {p}" for p in between.problems()]
            problems += [f"{prompt.name}: {p}" for p in self._unlike(between, moved[1])]
        count = len(self.baseline.references)
        return CellResult(count, count, nbytes, tuple(problems))

    def _unlike(self, between: Transfer, mixed: str) -> Iterator[str]:
        """What is not as between kvferry engines where vLLM's connector is at one end."""
        if self.cell.peer is Peer.PREFILL:
            other = wait_for_report(self.report, mixed, lambda found: found.landed == between.landed, TIMEOUT_S)
            if other.landed != between.landed:
                yield f"digests {other.landed} with vLLM's connector, {between.landed} without"
            return
        other = wait_for_report(self.report, mixed, lambda found: not found.landing_problems(), TIMEOUT_S)
        yield from other.landing_problems()
        if other.sent != between.sent:
            yield f"digests {other.sent} with vLLM's connector, {between.sent} without"

    def _judged(self, reference: Reference, answer: Served) -> Iterator[str]:
        verdict = judge(reference, answer.decode, single=self.baseline.single, exact=self.baseline.model.exact)
        if not verdict.equal:
            yield f"{reference.prompt.name}: {verdict.how}: {verdict.detail}"
        cached, tokens = answer.decode.cached_tokens, len(reference.prompt.tokens)
        if cached < tokens - 1:  # the last one may be left to the decode engine
            yield f"{reference.prompt.name}: the decode engine computed {tokens - cached} tokens of the prompt itself"


def _forget_prefixes(engine: Engine) -> None:
    """Empty the prefix cache; vLLM does not while a connector holds blocks."""
    deadline = time.monotonic() + TIMEOUT_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise EngineError(f"{engine.spec.name}: blocks were still held after {TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def cell_specs(cell: Cell, folder: Path, report: Path) -> list[EngineSpec]:
    """The engines of a cell: prefill and decode, and the same once more under vLLM's connector where that is a side."""
    sides = _sides(cell, folder)
    if cell.peer is Peer.NONE:
        pair = pair_spec(*sides, options={"transport": cell.moves.value, "transfer_report": str(report)})
        return [pair.prefill, pair.decode]
    blocks = block_sizes(cell)
    declared = {} if blocks[0] == blocks[1] else {"upstream_peer": {"block_size": blocks[cell.peer is Peer.DECODE]}}
    there: Role = "prefill" if cell.peer is Peer.PREFILL else "decode"
    upstream = msgspec.structs.replace(sides[there == "decode"], name="upstream")
    prefill, decode = sides
    return [
        member(prefill, "prefill", "ferry", transfer_report=str(report), **(declared if there == "decode" else {})),
        member(decode, "decode", "ferry", transfer_report=str(report), **(declared if there == "prefill" else {})),
        member(upstream, there, "upstream", transfer_report=str(report)),
    ]


def _sides(cell: Cell, folder: Path) -> tuple[EngineSpec, EngineSpec]:
    tiny = MODELS[cell.model]
    prefill, decode = (
        _engine_spec(
            name,
            tiny,
            folder,
            block=block,
            kernel_block=KERNEL_BLOCK if cell.split is Split.ON else None,
            prefix_caching=cell.cache is Cache.ON,
            **({"max_batched_tokens": CHUNK_TOKENS} if cell.chunks is Chunks.ON else {}),
            engine_args={"tensor_parallel_size": tp},
        )
        for name, block, tp in zip(("prefill", "decode"), block_sizes(cell), cell.tp.sizes, strict=True)
    )
    return prefill, decode


def _engine_spec(name: str, tiny: TinyModel, folder: Path, *, block: int, **changed: Any) -> EngineSpec:
    return EngineSpec(
        name=name,
        model=str(folder),
        dtype=tiny.dtype,
        custom_ops=tiny.custom_ops,
        block_size=block,
        num_blocks=max(12, CACHE_TOKENS // block),
        max_model_len=MAX_MODEL_LEN,
        **changed,
    )


def _serve(pair: Pair, references: Sequence[Reference]) -> list[Served]:
    """The first ones one after the other, the others at once, and the repeated one when it can be found."""
    prompts = [reference.prompt for reference in references]
    served = [pair.generate(p.tokens, max_tokens=p.max_tokens, name=p.name) for p in prompts[:2]]
    tickets = [pair.submit(p.tokens, max_tokens=p.max_tokens, name=p.name) for p in prompts[2:-1]]
    served += [ticket.result() for ticket in tickets]
    last = prompts[-1]
    return [*served, pair.generate(last.tokens, max_tokens=last.max_tokens, name=last.name)]


def _not_as_said(cell: Cell, prefill: Engine, *, decode: Engine) -> Iterator[str]:
    """Where the engines are not what the cell says. (Workers of a parallel engine cannot be looked into.)"""
    for engine, block, tp in zip((prefill, decode), block_sizes(cell), cell.tp.sizes, strict=True):
        facts = engine.inspect()
        found = {group.block_tokens for group in facts.groups if group.kind != "MambaSpec"}
        if found != {block}:
            yield f"{engine.spec.name}: blocks of {found} tokens instead of {block}"
        if tp == 1 and cell.split is Split.ON:
            rows = {t.shape[0] for t in facts.tensors.values()} - {facts.num_blocks}
            if rows != {facts.num_blocks * block // KERNEL_BLOCK}:
                yield f"{engine.spec.name}: {rows} rows for {facts.num_blocks} blocks of {block}"


def _caches_missed(cell: Cell, served: Sequence[Served], transfers: Mapping[str, Transfer]) -> Iterator[str]:
    """The last prompt was asked before: with a prefix cache less of it is computed, and less of it moves.

    Beside a state nothing is found at decode: the state that moved is that of the prompt's end, not of a block's.
    """
    again = transfers[served[-1].transfer_id]
    found = served[-1].prefill.cached_tokens > 0, min((line.start for line in again.consumer), default=0) > 0
    holds = [cell.cache is Cache.ON and _LENGTHS[-1] > block for block in block_sizes(cell)]
    wanted = holds[0], holds[1] and not MODELS[cell.model].has_state
    if found != wanted:
        yield f"the repeated prompt was found at prefill and decode: {found} instead of {wanted}"
