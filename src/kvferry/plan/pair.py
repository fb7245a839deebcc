"""The pair plan: all moves from one producer rank to one consumer rank, sorted into classes.

Components whose tables, block strides and unit offsets are equal on both sides form a *class*; whatever a request
brings (block ids, positions) is worked out once for a class, not once for a component. A class is its strands, and the
rows compiled from them when first asked for, and kept: those of a full unit, and those of part of a unit (a token range
that begins or ends inside one).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd

from kvferry.layout import Component, ContextParallel, Group, Placed, Placement
from kvferry.layout.nest import Int64s
from kvferry.plan.assign import Hole, Move
from kvferry.plan.boxes import Box
from kvferry.plan.strands import PairLoop, Rows, Shape, Strand, rows_of, runs_of

SLICES_KEPT = 256
"""Partial units whose rows a class remembers."""


@dataclass(frozen=True, slots=True)
class RowMap:
    """Where a row of a block begins: ``row // rows * piece_stride + row % rows * row_stride``."""

    rows: int
    piece_stride: int
    row_stride: int

    def at(self, row: Int64s) -> Int64s:
        """Offset of each row from the start of its block."""
        piece = row // self.rows
        return piece * self.piece_stride + (row - piece * self.rows) * self.row_stride


@dataclass(frozen=True, slots=True)
class SideOfClass:
    """What binding needs to know of one side of a class."""

    group: int
    block_tokens: int
    block_stride: int
    share: ContextParallel | None
    unit_map: RowMap | None
    """Where units begin inside a block; None where a unit is the whole block."""

    @property
    def entry_tokens(self) -> int:
        """Consecutive positions of one table entry."""
        return self.block_tokens * (self.share.size if self.share else 1)


@dataclass(frozen=True, slots=True)
class ClassKey:
    """Components with equal keys are bound together."""

    kind: str
    src: SideOfClass
    dst: SideOfClass
    row_tokens: int
    unit_rows: int
    sliding_window: int | None
    chunk: int | None

    @property
    def unit_tokens(self) -> int:
        """Consecutive positions in one unit."""
        return self.unit_rows * self.row_tokens


@dataclass(frozen=True)
class ClassPlan:
    """One class of a pair."""

    key: ClassKey
    strands: tuple[Strand, ...]
    _slices: dict[tuple[int, int], Rows] = field(default_factory=dict, repr=False, compare=False)
    choices: dict[Hashable, int] = field(default_factory=dict, repr=False, compare=False)
    """What binding has found out about partial units and may ask again."""

    @cached_property
    def full(self) -> Rows:
        """Rows of a full unit; a request that needs no full unit does not ask for them."""
        return rows_of(self.strands, 0, self.key.unit_rows)

    def runs(self, rows: int) -> int:
        """Runs of so many rows of a unit, before neighbours are joined."""
        return runs_of(self.strands, rows)

    def rows(self, start: int, stop: int) -> Rows:
        """Rows of part of a unit; remembered."""
        if (start, stop) == (0, self.key.unit_rows):
            return self.full
        known = self._slices.get((start, stop))
        if known is None:
            known = rows_of(self.strands, start, stop)
            if len(self._slices) >= SLICES_KEPT:
                self._slices.clear()
            self._slices[start, stop] = known
        return known


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What moves of equal components have in common: the shape, and where the cell begins in either component."""

    shape: Shape
    src: int
    dst: int

    def strand(self, one: Placed, other: Placed) -> Strand:
        """The strand of one such move."""
        src, dst = one.component.address + self.src, other.component.address + self.dst
        return Strand(self.shape, one.storage, src, other.storage, dst)


def classes_of(src: Placement, dst: Placement, moves: Sequence[Move]) -> tuple[ClassPlan, ...]:
    """Sort ``moves`` into classes and compile the rows of each."""
    strands: dict[ClassKey, list[Strand]] = {}
    known: dict[tuple[object, ...], tuple[_Pattern, list[Strand]]] = {}
    for move in moves:
        one, other = src.placed[move.src], dst.placed[move.dst]
        alike = (*_geometry(one.component), *_geometry(other.component), move.box)
        found = known.get(alike)
        if found is None:
            groups = (src.groups[one.component.group], dst.groups[other.component.group])
            key = class_key(one.component, other.component, groups)
            pattern = _pattern(one.component, other.component, box=move.box, key=key)
            found = known[alike] = pattern, strands.setdefault(key, [])
        found[1].append(found[0].strand(one, other))
    return tuple(ClassPlan(key, tuple(listed)) for key, listed in strands.items())


def _geometry(component: Component) -> tuple[object, ...]:
    """Everything about a component that its class and strands depend on, the address apart."""
    return (
        component.axes,
        component.block_stride,
        component.kernel_blocks,
        component.kernel_stride,
        component.tokens_per_row,
        component.content.nbytes,
        component.group,
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The token axis of one side: equal pieces of ``rows`` rows, uniform inside."""

    rows: int
    piece_stride: int
    row_stride: int


def _pieces(component: Component) -> _Pieces:
    token = component.token_axis
    assert token is not None, "an attention component was checked to have a token axis"  # noqa: S101
    # The stride of an axis of one row says nothing, so it cannot break uniformity.
    row_stride = token.stride if token.count > 1 else component.page_stride or token.stride
    if component.pages == 1 or component.page_stride == token.count * row_stride:
        return _Pieces(token.count * component.pages, 0, row_stride)
    return _Pieces(token.count, component.page_stride, row_stride)


def class_key(one: Component, other: Component, groups: tuple[Group, Group]) -> ClassKey:
    """The class of a producer's and a consumer's component, and with it the largest unit uniform on both sides."""
    src_group, dst_group = groups
    if src_group.kind == "state":
        sides = [SideOfClass(c.group, g.block_tokens, c.block_stride, None, None)
                 for c, g in ((one, src_group), (other, dst_group))]  # fmt: skip
        return ClassKey("state", sides[0], sides[1], one.row_tokens, 1, None, None)
    unit = gcd(_pieces(one).rows, _pieces(other).rows)
    for group in groups:
        if group.share is not None:
            unit = gcd(unit, group.share.interleave // one.row_tokens)
    sides = [_side(c, g, unit) for c, g in ((one, src_group), (other, dst_group))]
    return ClassKey("attention", sides[0], sides[1], one.row_tokens, unit, dst_group.sliding_window, dst_group.chunk)


def _side(component: Component, group: Group, unit_rows: int) -> SideOfClass:
    pieces = _pieces(component)
    whole = unit_rows * component.row_tokens == group.block_tokens
    unit_map = None if whole else RowMap(pieces.rows, pieces.piece_stride, pieces.row_stride)
    return SideOfClass(component.group, group.block_tokens, component.block_stride, group.share, unit_map)


def _pattern(src: Component, dst: Component, *, box: Box, key: ClassKey) -> _Pattern:
    src_at = dst_at = 0
    axes = []
    for mine, theirs, interval in zip(src.global_axes, dst.global_axes, box, strict=True):
        src_at += (interval.start - mine.start) * mine.stride
        dst_at += (interval.start - theirs.start) * theirs.stride
        axes.append(PairLoop(interval.size, mine.stride, theirs.stride))
    row = PairLoop(1, 0, 0)
    if key.kind == "attention":
        row = PairLoop(key.unit_rows, _pieces(src).row_stride, _pieces(dst).row_stride)
    return _Pattern(Shape(tuple(axes), row, src.content.nbytes), src_at, dst_at)


def hole_key(dst: Placement, hole: Hole) -> ClassKey:
    """The class in which positions that nobody serves are looked for: deal by deal, in the missing rank's share."""
    component = dst.placed[hole.dst].component
    group = dst.groups[component.group]
    shares = (share for share in (group.share, hole.share) if share is not None)
    deals = (share.interleave // component.row_tokens for share in shares)
    unit = gcd(group.block_tokens // component.row_tokens, *deals)  # no unit lies in two blocks, or deals
    here = SideOfClass(component.group, group.block_tokens, component.block_stride, group.share, None)
    missing = replace(here, share=hole.share)
    return ClassKey("attention", missing, here, component.row_tokens, unit, group.sliding_window, group.chunk)
