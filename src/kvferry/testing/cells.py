"""Which pairs of real engines are tried: a covering array over everything that two deployments may differ in.

A *cell* is one prefill and one decode engine, built as eight factors say. All combinations would be thousands, but
faults mostly hang on one factor or on two of them together: so every pair of factor values that can occur at all
occurs in some cell (:func:`missing_pairs` proves it; a test calls it). What cannot occur is in :data:`FORBIDDEN`,
each rule with its reason, and the pairs that this rules out are worked out from the rules, not listed by hand.

This file is the only list. ``make test`` runs the cells marked ``core``, ``make test-vllm`` all of them
(:mod:`kvferry.testing.cell_run` runs one), and ``docs/support.md`` is written from the results.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from itertools import combinations, product
from typing import Any, Final


class Model(StrEnum):
    """Which tiny model: each stands for a family of caches (:mod:`kvferry.testing.model_recipes`).

    Kimi Linear (KDA) is not among them: vLLM 0.32 has it for accelerators only.
    """

    QWEN3 = "qwen3"
    GEMMA3 = "gemma3"
    DEEPSEEK_V2 = "deepseek_v2"
    LFM2 = "lfm2"
    QWEN3_NEXT = "qwen3_next"


class Split(StrEnum):
    """Whether a logical block is several kernel blocks, of 32 tokens, on both sides."""

    OFF = "whole"
    ON = "split"


class Blocks(StrEnum):
    """How the logical block of the decode side stands to that of the prefill side."""

    EQUAL = "equal"
    SMALLER = "smaller"
    """It divides it."""
    LARGER = "larger"
    """It is a multiple of it."""
    UNEVEN = "uneven"
    """Neither divides the other."""


class Tp(StrEnum):
    """Tensor parallel sizes of the prefill and the decode side."""

    ONE_ONE = "tp1-1"
    ONE_TWO = "tp1-2"
    TWO_ONE = "tp2-1"
    TWO_TWO = "tp2-2"

    @property
    def sizes(self) -> tuple[int, int]:
        """Of prefill and decode."""
        prefill, decode = self.value.removeprefix("tp").split("-")
        return int(prefill), int(decode)


class Moves(StrEnum):
    """The transport."""

    MOONCAKE = "mooncake"
    CMA = "cma"


class Peer(StrEnum):
    """Which side, if any, is vLLM's own MooncakeConnector."""

    NONE = "kvferry"
    PREFILL = "from-upstream"
    DECODE = "to-upstream"


class Chunks(StrEnum):
    """Whether the prefill side computes a long prompt in several steps. (The decode side may take as little in one.)"""

    OFF = "at-once"
    ON = "chunked"


class Cache(StrEnum):
    """Whether both sides keep a prefix cache."""

    OFF = "no-cache"
    ON = "prefix-cache"


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of engines."""

    model: Model
    split: Split
    blocks: Blocks
    tp: Tp
    moves: Moves
    peer: Peer
    chunks: Chunks
    cache: Cache
    core: bool = False
    """Whether ``make test`` runs it."""

    @property
    def name(self) -> str:
        """All its values, as a test id."""
        return "-".join(self.values)

    @property
    def values(self) -> tuple[StrEnum, ...]:
        """One of each factor."""
        return tuple(getattr(self, factor) for factor in FACTORS)


FACTORS: Final[dict[str, Any]] = {field.name: field.type for field in fields(Cell) if field.name != "core"}
"""The factors, in the order of a cell's values, each with the values that it may take."""


STATEFUL: Final = frozenset({Model.LFM2, Model.QWEN3_NEXT})
"""Models with a recurrent state beside attention."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination that is in no cell, and why."""

    why: str
    holds: Callable[[Cell], bool]


FORBIDDEN: Final = (
    Rule(
        "vLLM's MLA kernel for the CPU knows one block size, 16 tokens: its blocks cannot be split or differ",
        lambda c: c.model is Model.DEEPSEEK_V2 and (c.split is Split.ON or c.blocks is not Blocks.EQUAL),
    ),
    Rule(
        "vLLM turns chunked prefill and prefix caching off for MLA on a CPU",
        lambda c: c.model is Model.DEEPSEEK_V2 and (c.chunks is Chunks.ON or c.cache is Cache.ON),
    ),
    Rule(
        "beside a state with a prefix cache vLLM ends steps where blocks end: no long prompt is computed at once",
        lambda c: c.model in STATEFUL and c.cache is Cache.ON and c.chunks is Chunks.OFF,
    ),
    Rule(
        "vLLM's own connector knows only Mooncake",
        lambda c: c.peer is not Peer.NONE and c.moves is Moves.CMA,
    ),
    Rule(
        "with vLLM's own connector at one end, blocks may differ only over equal kernel blocks",
        lambda c: c.peer is not Peer.NONE and c.blocks is not Blocks.EQUAL and c.split is Split.OFF,
    ),
    Rule(
        "of vLLM's own connector a prompt is fetched only where its block divides ours",
        lambda c: c.peer is Peer.PREFILL and c.blocks in (Blocks.SMALLER, Blocks.UNEVEN),
    ),
    Rule(
        "with vLLM's own connector, states between unequal tensor parallel sizes are in no cell: refused where it "
        "writes, tested in tests/vllm/test_upstream.py where kvferry does",
        lambda c: c.peer is not Peer.NONE and c.model in STATEFUL and len(set(c.tp.sizes)) > 1,
    ),
    Rule(
        "vLLM's own connector is written no state where it keeps several for a request, for its prefix cache",
        lambda c: c.peer is Peer.DECODE and c.model in STATEFUL and c.cache is Cache.ON,
    ),
)


def refused(cell: Cell) -> str | None:
    """Why this combination cannot be run; ``None`` when it can."""
    return next((rule.why for rule in FORBIDDEN if rule.holds(cell)), None)


Pair = tuple[StrEnum, StrEnum]


def pairs_of(cell: Cell) -> frozenset[Pair]:
    """The pairs of values, of two factors each, that occur in a cell."""
    return frozenset(combinations(cell.values, 2))


@cache
def every_pair() -> frozenset[Pair]:
    """All pairs that some allowed combination has."""
    return frozenset(pair for cell in _allowed() for pair in pairs_of(cell))


def missing_pairs(cells: Sequence[Cell]) -> frozenset[Pair]:
    """The pairs that can occur and do not occur in ``cells``: empty for a covering array."""
    return every_pair() - frozenset(pair for cell in cells for pair in pairs_of(cell))


def complete(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Add cells until no pair is missing, each time the first of those that add most. For whoever extends the list.

    ``python -m kvferry.testing.cells`` prints what is to be added to :data:`CELLS`.
    """
    chosen, missing = list(cells), missing_pairs(cells)
    candidates = tuple(_allowed())
    while missing:
        best = max(candidates, key=lambda cell: len(pairs_of(cell) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return tuple(chosen)


def _allowed() -> Iterator[Cell]:
    for values in product(*FACTORS.values()):
        cell = _cell(values)
        if refused(cell) is None:
            yield cell


def cell_of(line: str, *, core: bool = False) -> Cell:
    """The cell of one line of values, in the order of :data:`FACTORS`."""
    return _cell((factor(word) for factor, word in zip(FACTORS.values(), line.split(), strict=True)), core=core)


def _cell(values: Iterable[StrEnum], *, core: bool = False) -> Cell:
    chosen: dict[str, Any] = dict(zip(FACTORS, values, strict=True))
    return Cell(**chosen, core=core)


CORE: Final[tuple[str, ...]] = (
    "qwen3 split smaller tp1-2 mooncake kvferry at-once no-cache",
    "qwen3 split larger tp2-1 mooncake kvferry chunked prefix-cache",
    "qwen3 whole equal tp2-2 cma kvferry at-once prefix-cache",
    "lfm2 split uneven tp2-1 mooncake kvferry at-once no-cache",
    "lfm2 whole larger tp1-2 cma kvferry chunked prefix-cache",
    "gemma3 split uneven tp1-1 mooncake kvferry chunked prefix-cache",
    "deepseek_v2 whole equal tp1-1 mooncake kvferry at-once no-cache",
    "qwen3_next split larger tp1-1 cma kvferry at-once no-cache",
)
"""What every run of the tests shows."""

REST: Final[tuple[str, ...]] = (
    "gemma3 whole smaller tp2-1 cma kvferry chunked no-cache",
    "qwen3_next whole smaller tp2-2 mooncake kvferry chunked prefix-cache",
    "gemma3 whole uneven tp2-2 cma kvferry at-once no-cache",
    "gemma3 split equal tp1-2 mooncake kvferry chunked no-cache",
    "gemma3 split larger tp2-2 mooncake kvferry at-once no-cache",
    "deepseek_v2 whole equal tp2-1 cma kvferry at-once no-cache",
    "lfm2 whole smaller tp1-1 mooncake kvferry at-once no-cache",
    "qwen3_next whole uneven tp1-2 mooncake kvferry at-once no-cache",
    "qwen3 whole uneven tp1-1 mooncake kvferry at-once no-cache",
    "lfm2 whole equal tp2-2 mooncake kvferry at-once no-cache",
    "qwen3_next whole equal tp2-1 mooncake kvferry at-once no-cache",
    "deepseek_v2 whole equal tp1-2 mooncake kvferry at-once no-cache",
    "deepseek_v2 whole equal tp2-2 mooncake kvferry at-once no-cache",
    "qwen3 whole equal tp1-1 mooncake from-upstream at-once no-cache",
    "qwen3 whole equal tp1-1 mooncake to-upstream at-once no-cache",
    "gemma3 split smaller tp1-2 mooncake to-upstream chunked prefix-cache",
    "gemma3 split larger tp1-2 mooncake from-upstream chunked prefix-cache",
    "lfm2 split larger tp2-2 mooncake to-upstream at-once no-cache",
    "qwen3 split uneven tp2-1 mooncake to-upstream at-once no-cache",
    "deepseek_v2 whole equal tp2-1 mooncake from-upstream at-once no-cache",
    "lfm2 whole equal tp2-2 mooncake from-upstream at-once no-cache",
    "deepseek_v2 whole equal tp1-1 mooncake to-upstream at-once no-cache",
    "qwen3_next whole equal tp1-1 mooncake from-upstream at-once no-cache",
    "qwen3_next split equal tp1-1 mooncake to-upstream at-once no-cache",
)
"""What completes the covering array."""

CELLS: Final = (*(cell_of(line, core=True) for line in CORE), *(cell_of(line) for line in REST))
"""All cells."""


def main() -> None:
    """Print the cells that are missing for a covering array."""
    for cell in complete(CELLS)[len(CELLS) :]:
        print("    " + repr(" ".join(cell.values)) + ",")  # noqa: T201


if __name__ == "__main__":
    main()
