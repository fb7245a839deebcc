"""Bind: rows of the classes x units of the request -> descriptors, with one broadcast add for each class.

1. The units of a class are sorted by source offset, and neighbours that continue each other on both sides are joined
   (a small sort: as many elements as blocks).
2. Rows and joined units are added in an order that is sorted by source address wherever rows and units nest: rows are
   gathered into *bands*, such that all units of a band lie before the next band; a band is written unit by unit.
3. The columns of all classes are put together. If they are not sorted by source yet, they are sorted; then
   neighbours that continue each other on both sides are joined. No source byte is read twice, so in sorted order the
   only row that can continue another is the next one: after this pass no two descriptors can be joined. Where rows and
   units alone show that this pass would find nothing (:func:`_is_settled`), it is skipped.
4. Where registered regions touch, what crosses the seam is cut there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Binding, Placement
from kvferry.layout.nest import Int64s
from kvferry.layout.placement import extents_of
from kvferry.plan.descriptors import Descriptors
from kvferry.plan.pair import ClassPlan
from kvferry.plan.request import TransferRequest
from kvferry.plan.strands import Rows
from kvferry.plan.units import (
    PartialUnit,
    Places,
    RowRange,
    attention_units,
    needed_of,
    partial_units,
    places_of,
    state_place,
)

COPIES_LIMIT = 64_000_000
"""Descriptors before the last join: 1.5 GB of columns."""

CARRIED_RUNS_LIMIT = 1_000_000
"""Runs of a unit past which nothing is carried beyond the needed rows: not worth counting what it might save."""

CHOICES_KEPT = 1024
"""Partial units for which a class remembers what to carry."""

LENGTHS_JOINED_EARLY = 8
"""Distinct run lengths of one class whose units are joined before the rows are added; more are joined at the end."""


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Columns of descriptors on their way; int64 of one length."""

    src: Int64s
    dst: Int64s
    nbytes: Int64s
    settled: bool = False
    """Known to be sorted by source, with no two that can be joined."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Joined units: where each begins on both sides, and of how many units it consists."""

    src: Int64s
    dst: Int64s
    units: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Anchored:
    """Rows with absolute addresses (for unit offset 0), in order of source address."""

    src: Int64s
    dst: Int64s
    nbytes: Int64s


@dataclass(frozen=True, slots=True)
class Side:
    """One worker: its placement and where it is."""

    placement: Placement
    binding: Binding

    @property
    def bases(self) -> Int64s:
        return extents_of(self.placement, self.binding).bases

    @property
    def seams(self) -> Int64s:
        """Addresses where two registered regions touch, ascending."""
        return extents_of(self.placement, self.binding).seams


def copies_of(classes: Sequence[ClassPlan], request: TransferRequest, src: Side, dst: Side) -> list[Copies]:
    """Rows times units of every class, before the last join."""
    bases = (src.bases, dst.bases)
    found = [one for plan in classes if (one := _select(plan, request)) is not None]
    carry = _carry_for(found, bases)
    return [part for one in found for batch in one.batches(carry) for part in batch.copies(bases)]


def joined_copies(classes: Sequence[ClassPlan], request: TransferRequest, src: Side, dst: Side) -> Copies:
    """Everything that one pair moves for one request, sorted by source, nothing left to join."""
    return join(together(copies_of(classes, request, src, dst)))


def finish(copies: Copies, src: Side, dst: Side, *, max_descriptors: int) -> Descriptors:
    """``copies``, cut at the seams between regions of both sides and counted."""
    for side, column in ((src, "src"), (dst, "dst")):
        copies = _cut(copies, side.seams, column)
    if copies.src.size > max_descriptors:
        raise PlanError(
            PlanReason.LIMIT_EXCEEDED,
            f"{copies.src.size} descriptors, over the limit of {max_descriptors}: raise it, or move fewer tokens",
        )
    return Descriptors.proven(copies.src, copies.dst, copies.nbytes)


class _Carry(Enum):
    """What to move of units of which only some rows are needed."""

    NEEDED = 0
    CHEAPER = 1
    """For each class what takes fewer rows."""
    WIDEST = 2
    """All that may be moved."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Rows that are moved in each of some units."""

    rows: Rows
    places: Places

    def copies(self, bases: tuple[Int64s, Int64s]) -> list[Copies]:
        return spread_rows(_anchor(self.rows, *bases), self.places)


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    """The units of one class that a request needs."""

    plan: ClassPlan
    places: Places
    partial: tuple[PartialUnit, ...]
    at: tuple[int, ...]
    """Place of each partial unit among all."""

    def edges(self, carry: _Carry) -> list[_Batch]:
        """A batch for each partial unit."""
        return [self._edge(_range_for(self.plan, partial, carry), at) for partial, at in self._partial_at]

    def batches(self, carry: _Carry) -> list[_Batch]:
        """The full units together, then each partial one; a partial one of which all is moved counts as full."""
        whole = np.ones(self.places.src.size, dtype=np.bool_)
        edges = []
        for partial, at in self._partial_at:
            chosen = _range_for(self.plan, partial, carry)
            if chosen.size < self.plan.key.unit_rows:
                whole[at] = False
                edges.append(self._edge(chosen, at))
        inner = [_Batch(self.plan.full, self.places.only(np.flatnonzero(whole)))] if whole.any() else []
        return inner + edges

    @property
    def _partial_at(self) -> Iterable[tuple[PartialUnit, int]]:
        return zip(self.partial, self.at, strict=True)

    def _edge(self, rows: RowRange, at: int) -> _Batch:
        return _Batch(self.plan.rows(rows.start, rows.stop), self.places.only([at]))


def _select(plan: ClassPlan, request: TransferRequest) -> _Selection | None:
    key = plan.key
    if key.kind == "state":
        place = state_place(key, request)
        return None if place is None else _Selection(plan, place, (), ())
    needed = needed_of(key, request)
    units = attention_units(key, needed, request.consumer[key.dst.group])
    if not units.size:
        return None
    partial = partial_units(key, needed, request.start)
    at = [np.flatnonzero(units == one.unit) for one in partial]
    here = [(one, int(found[0])) for one, found in zip(partial, at, strict=True) if found.size]
    return _Selection(plan, places_of(key, units, request), tuple(o for o, _ in here), tuple(i for _, i in here))


def _range_for(plan: ClassPlan, partial: PartialUnit, carry: _Carry) -> RowRange:
    needed, widest = partial.needed, partial.widest
    if carry is _Carry.NEEDED or plan.runs(widest.size) > CARRIED_RUNS_LIMIT:
        return needed
    if carry is _Carry.WIDEST:
        return widest
    counts = [plan.rows(rows.start, rows.stop).count for rows in (needed, widest)]
    return widest if counts[1] < counts[0] else needed


def _carry_for(found: Sequence[_Selection], bases: tuple[Int64s, Int64s]) -> _Carry:
    """How to treat partial units. Where there is one in all, it does not matter in which blocks: that is remembered."""
    partial = [(one.plan, unit) for one in found for unit in one.partial]
    if not partial:
        return _Carry.NEEDED
    if len(partial) > 1:
        return _fewest(found, bases)
    plan, unit = partial[0]
    key = (unit.needed, unit.widest, bases[0].tobytes(), bases[1].tobytes())
    chosen = plan.choices.get(key)
    if chosen is None:
        chosen = _fewest(found, bases).value
        if len(plan.choices) >= CHOICES_KEPT:
            plan.choices.clear()
        plan.choices[key] = chosen
    return _Carry(chosen)


def _fewest(found: Sequence[_Selection], bases: tuple[Int64s, Int64s]) -> _Carry:
    """The way to treat partial units that leaves the fewest descriptors, moving no more than it must for that.

    It is one for all classes, because rows of different classes may join when both are moved whole: keys by column
    followed by values by row are one run only where the values behind the end are carried as the keys are.
    """

    def left(carry: _Carry) -> int:
        edges = [part for one in found for batch in one.edges(carry) for part in batch.copies(bases)]
        return int(join(together(edges)).src.size)

    return min(_Carry, key=left)


def _anchor(rows: Rows, src_bases: Int64s, dst_bases: Int64s) -> Anchored:
    src = rows.src + src_bases[rows.src_storage]
    dst = rows.dst + dst_bases[rows.dst_storage]
    order = np.argsort(src, kind="stable")
    return Anchored(src[order], dst[order], rows.nbytes[order])


def spread_rows(rows: Anchored, places: Places) -> list[Copies]:
    """Every row at every unit, as columns sorted by source where rows and units nest."""
    order = np.argsort(places.src, kind="stable")
    units = _Stretch(places.src[order], places.dst[order], np.ones(order.size, dtype=np.int64))
    lengths = np.unique(rows.nbytes)
    if lengths.size > LENGTHS_JOINED_EARLY:
        return [_add(rows, units)]
    parts = []
    for length in lengths.tolist():
        mine = rows.nbytes == length
        some = rows if lengths.size == 1 else Anchored(rows.src[mine], rows.dst[mine], rows.nbytes[mine])
        stretches = _stretch(units, length)
        parts.append(replace(_add(some, stretches), settled=_is_settled(some, stretches, length)))
    return parts


def _stretch(units: _Stretch, length: int) -> _Stretch:
    """Join units that begin ``length`` bytes after each other on both sides."""
    follows = _continues(units, (length, length))
    if not follows.any():
        return units
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    return _Stretch(units.src[heads], units.dst[heads], np.add.reduceat(units.units, heads))


def _add(rows: Anchored, units: _Stretch) -> Copies:
    if rows.src.size * units.src.size > COPIES_LIMIT:
        raise PlanError(
            PlanReason.LIMIT_EXCEEDED,
            f"{rows.src.size} runs in each of {units.src.size} units, over {COPIES_LIMIT} in all: move fewer tokens",
        )
    band = _band(rows, units)
    # [bands, units, rows of a band]: sorted by source where a band fits between two units.
    shape = (rows.src.size // band, 1, band)
    return Copies(
        (rows.src.reshape(shape) + units.src[None, :, None]).ravel(),
        (rows.dst.reshape(shape) + units.dst[None, :, None]).ravel(),
        (rows.nbytes.reshape(shape) * units.units[None, :, None]).ravel(),
    )


def _band(rows: Anchored, units: _Stretch) -> int:
    """Rows of a band: so many that all units of a band lie before the next one; all rows where that is not even."""
    apart = np.flatnonzero(rows.src[1:] + units.src[0] > rows.src[:-1] + units.src[-1]) + 1
    sizes = np.diff([0, *apart.tolist(), rows.src.size])
    return int(sizes[0]) if (sizes == sizes[0]).all() else rows.src.size


def _is_settled(rows: Anchored, units: _Stretch, length: int) -> bool:
    """Whether rows of one length x units are sorted by source and cannot be joined any more.

    Looks at rows and at units, never at their product. Where a row's units all lie before the next row, the units are
    sorted and were joined already, so only the step from a row's last unit to the first of the next row is left. Where
    all rows of a unit lie before the next unit, the steps are those inside a unit, and from one unit to the next.
    Anything else is left to the plain pass.
    """
    band = _band(rows, units)
    if band == 1:
        return not _continues(rows, _reach(units, length * units.units[-1])).any()
    if band < rows.src.size or units.units.max() > 1:
        return False
    reach = _reach(rows, length)
    in_order = (np.diff(units.src) >= reach[0]).all()
    return bool(in_order and not _continues(rows, (length, length)).any() and not _continues(units, reach).any())


def _reach(some: Anchored | _Stretch, last: int) -> tuple[int, int]:
    """Bytes from the first to one past the last on both sides, where the last one has ``last`` bytes."""
    return some.src[-1] - some.src[0] + last, some.dst[-1] - some.dst[0] + last


def _continues(some: Anchored | _Stretch, reach: tuple[int, int]) -> NDArray[np.bool_]:
    """Which begin where the one before ends on both sides, when each reaches so far."""
    follows: NDArray[np.bool_] = np.equal(np.diff(some.src), reach[0]) & np.equal(np.diff(some.dst), reach[1])
    return follows


def together(parts: Sequence[Copies]) -> Copies:
    """All columns behind each other."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.empty(0, dtype=np.int64)
        return Copies(none, none.copy(), none.copy())
    return Copies(
        np.concatenate([p.src for p in parts]),
        np.concatenate([p.dst for p in parts]),
        np.concatenate([p.nbytes for p in parts]),
    )


def join(copies: Copies) -> Copies:
    """Sorted by source; neighbours that continue each other on both sides made one."""
    if copies.settled:
        return copies
    src, dst, nbytes = copies.src, copies.dst, copies.nbytes
    if not (src[1:] > src[:-1]).all():
        order = np.argsort(src)
        src, dst, nbytes = src[order], dst[order], nbytes[order]
    follows = src[:-1] + nbytes[:-1] == src[1:]
    if follows.any():
        follows &= dst[:-1] + nbytes[:-1] == dst[1:]
    return merge(Copies(src, dst, nbytes), follows)


def merge(copies: Copies, follows: NDArray[np.bool_]) -> Copies:
    """One for each row and all rows behind it that ``follows`` marks; what lies between them is included."""
    if not follows.any():
        return copies
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    tails = np.concatenate([heads[1:], [copies.src.size]]) - 1
    src = copies.src[heads]
    return Copies(src, copies.dst[heads], copies.src[tails] + copies.nbytes[tails] - src)


def _cut(copies: Copies, seams: Int64s, column: str) -> Copies:
    """Cut what crosses a seam between two touching regions of the side named by ``column``."""
    if not seams.size:
        return copies
    start = copies.src if column == "src" else copies.dst
    first = np.searchsorted(seams, start, side="right")
    last = np.searchsorted(seams, start + copies.nbytes, side="left")
    inside = last - first
    if not inside.any():
        return copies
    owner = np.repeat(np.arange(start.size), inside + 1)
    piece = np.arange(owner.size) - np.repeat(np.cumsum(inside + 1) - (inside + 1), inside + 1)
    # Piece 0 begins with the run, piece k at the k-th seam inside it.
    seam = np.minimum(first[owner] + np.maximum(piece, 1) - 1, seams.size - 1)
    shift = np.where(piece == 0, 0, seams[seam] - start[owner])
    ends = np.concatenate([shift[1:], shift[:1]])
    final = piece == inside[owner]
    nbytes = np.where(final, copies.nbytes[owner], ends) - shift
    return Copies(copies.src[owner] + shift, copies.dst[owner] + shift, nbytes)
