"""Strands and rows: the bytes of one cell inside one unit, as runs contiguous on both sides.

A *unit* is a stretch of rows that is uniform on both sides: it lies in one kernel block of each (or in one block, where
kernel blocks follow each other without a gap). A *strand* is one cell of one component in one unit: a loop nest with
two strides a loop, one for each side. Folding it makes the innermost loop the longest run that is contiguous on both
sides; what cannot be folded is enumerated once, when the plan is compiled. The result, over all components of a class,
is a handful of int64 columns: *rows* of (source offset, destination offset, length).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kvferry.errors import PlanError, PlanReason
from kvferry.layout.nest import Int64s, spread

ROWS_LIMIT = 16_000_000
"""Rows that one unit of a class may have: more is refused before memory is spent on them. As many as a plan may have
descriptors, so that nothing is refused for its rows that would be allowed for its descriptors."""


@dataclass(frozen=True, slots=True)
class PairLoop:
    """``count`` steps, ``src`` bytes apart at the source and ``dst`` bytes apart at the destination."""

    count: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the rows of a strand, addresses apart; strands of equal layers share it."""

    axes: tuple[PairLoop, ...]
    row: PairLoop
    """Rows of a full unit."""
    nbytes: int
    """Bytes at one coordinate."""


@dataclass(frozen=True, slots=True)
class Strand:
    """One cell of one component in the unit that begins at offset 0 of a block."""

    shape: Shape
    src_storage: int
    src: int
    dst_storage: int
    dst: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of one unit, in order of (source storage, source offset)."""

    src_storage: Int64s
    src: Int64s
    dst_storage: Int64s
    dst: Int64s
    nbytes: Int64s

    @property
    def count(self) -> int:
        return int(self.nbytes.size)


@dataclass(frozen=True, slots=True)
class _Fold:
    """Runs of one shape, relative to the strand's offsets."""

    src: Int64s
    dst: Int64s
    run: int


def fold(loops: Sequence[PairLoop], nbytes: int) -> tuple[list[PairLoop], int]:
    """Lengthen the run by every loop that continues it on both sides; return the loops left and the run.

    >>> fold([PairLoop(4, 100, 32), PairLoop(8, 4, 4)], 4)
    ([PairLoop(count=4, src=100, dst=32)], 32)
    """
    left = [loop for loop in loops if loop.count > 1]
    while True:
        found = next((loop for loop in left if loop.src == nbytes and loop.dst == nbytes), None)
        if found is None:
            return sorted(left, key=lambda loop: -loop.src), nbytes
        left.remove(found)
        nbytes *= found.count


def _loops(shape: Shape, count: int) -> tuple[list[PairLoop], int]:
    """What is left of ``count`` rows of ``shape`` when they are folded, and the run."""
    return fold([*shape.axes, PairLoop(count, shape.row.src, shape.row.dst)], shape.nbytes)


def _fold(shape: Shape, count: int) -> _Fold:
    loops, run = _loops(shape, count)
    src = spread([(loop.count, loop.src) for loop in loops], 0)
    dst = spread([(loop.count, loop.dst) for loop in loops], 0)
    return _Fold(src, dst, run)


def runs_of(strands: Sequence[Strand], rows: int) -> int:
    """How many runs so many rows of a unit have before neighbours are joined; none of them is enumerated."""
    shapes = Counter(strand.shape for strand in strands)
    return sum(number * prod(loop.count for loop in _loops(shape, rows)[0]) for shape, number in shapes.items())


def rows_of(strands: Sequence[Strand], start: int, stop: int) -> Rows:
    """The rows of ``strands`` for rows ``[start, stop)`` of a unit, joined where both sides are contiguous."""
    count = stop - start
    runs = runs_of(strands, count)
    if runs > ROWS_LIMIT:
        raise PlanError(
            PlanReason.LIMIT_EXCEEDED,
            f"one block would need {runs} descriptors, over {ROWS_LIMIT}: the page orders of the two sides have only "
            "single elements in common",
        )
    folds = {shape: _fold(shape, count) for shape in {strand.shape for strand in strands}}
    parts = [folds[strand.shape] for strand in strands]
    sizes = np.array([p.src.size for p in parts])
    first_src = np.array([s.src + start * s.shape.row.src for s in strands], dtype=np.int64)
    first_dst = np.array([s.dst + start * s.shape.row.dst for s in strands], dtype=np.int64)
    unjoined = Rows(
        np.repeat(np.array([s.src_storage for s in strands], dtype=np.int64), sizes),
        np.repeat(first_src, sizes) + np.concatenate([p.src for p in parts]),
        np.repeat(np.array([s.dst_storage for s in strands], dtype=np.int64), sizes),
        np.repeat(first_dst, sizes) + np.concatenate([p.dst for p in parts]),
        np.repeat(np.array([p.run for p in parts], dtype=np.int64), sizes),
    )
    return _join(unjoined)


def _join(rows: Rows) -> Rows:
    order = np.lexsort((rows.src, rows.src_storage))
    ss, src, ds, dst, n = (c[order] for c in (rows.src_storage, rows.src, rows.dst_storage, rows.dst, rows.nbytes))
    follows = (
        (ss[1:] == ss[:-1]) & (ds[1:] == ds[:-1]) & (src[1:] == src[:-1] + n[:-1]) & (dst[1:] == dst[:-1] + n[:-1])
    )
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    return Rows(ss[heads], src[heads], ds[heads], dst[heads], np.add.reduceat(n, heads))
