"""Units: which stretches of positions a request needs, and where each begins on both sides.

Positions decide, never counts. A class divides the positions into units of ``unit_tokens``; unit ``k`` holds positions
``[k * unit_tokens, (k + 1) * unit_tokens)``. A request needs those units that hold a needed position, that the consumer
rank holds and lists; each must be in the producer's table. A unit lies inside one entry of either table, so a unit that
holds a needed row may carry any other of its rows, but for positions below ``start``: those may belong to a block that
others read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import ContextParallel
from kvferry.layout.nest import Int64s
from kvferry.plan.pair import ClassKey, SideOfClass
from kvferry.plan.request import BlockTable, TransferRequest
from kvferry.plan.shares import held_by, local_index

UNITS_LIMIT = 32_000_000
"""Units of one class in one request: 256 MB a column."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows ``[start, stop)`` of one unit."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PartialUnit:
    """A unit of which only some rows are needed."""

    unit: int
    needed: RowRange
    widest: RowRange
    """What may be moved: the needed rows and all whose positions are at or after ``start``."""


@dataclass(frozen=True, slots=True)
class Needed:
    """Positions ``[start, stop)`` that a request needs of one class, clipped by window and chunk."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Places:
    """Byte offsets of units from the component's first byte, on both sides; int64 of one length."""

    src: Int64s
    dst: Int64s

    def only(self, chosen: Int64s | Sequence[int]) -> "Places":
        """The units at these places of the list."""
        return Places(self.src[chosen], self.dst[chosen])


def needed_of(key: ClassKey, request: TransferRequest) -> Needed:
    """``[start, stop)`` inside the window and the chunk, where there is one."""
    start, stop = request.start, request.stop
    if key.sliding_window is not None:
        start = max(start, stop - key.sliding_window)
    if key.chunk is not None and stop:
        start = max(start, (stop - 1) // key.chunk * key.chunk)
    return Needed(start, stop)


def attention_units(key: ClassKey, needed: Needed, table: BlockTable) -> Int64s:
    """Numbers of the units that hold a needed row which the consumer lists and both shares hold, ascending."""
    tokens, entry = key.unit_tokens, key.dst.entry_tokens
    if needed.start >= needed.stop:
        return np.empty(0, dtype=np.int64)
    first = max(needed.start // tokens, table.origin // tokens)
    last = min(-(-needed.stop // tokens), (table.origin + table.entries * entry) // tokens)
    if last - first > UNITS_LIMIT:
        raise PlanError(
            PlanReason.LIMIT_EXCEEDED,
            f"{last - first} units of {tokens} positions each, over {UNITS_LIMIT}: the two sides have no larger unit",
        )
    units = np.arange(first, max(first, last), dtype=np.int64)
    for share in (key.src.share, key.dst.share):
        if share is not None:
            units = units[held_by(units * tokens, share)]
    if not table.held.all():
        units = units[table.held[(units * tokens - table.origin) // entry]]
    return units


def partial_units(key: ClassKey, needed: Needed, start: int) -> tuple[PartialUnit, ...]:
    """The first and the last unit, where not all of their rows are needed; none, one or two of them."""
    tokens, per_row = key.unit_tokens, key.row_tokens
    first, last = needed.start // tokens, (needed.stop - 1) // tokens
    found = []
    for unit in sorted({first, last}):
        origin = unit * tokens
        low = max(needed.start - origin, 0) // per_row
        high = -(-min(needed.stop - origin, tokens) // per_row)
        carry = min(low, max(0, -(-(start - origin) // per_row)))
        if (low, high) != (0, key.unit_rows):
            found.append(PartialUnit(unit, RowRange(low, high), RowRange(carry, key.unit_rows)))
    return tuple(found)


def places_of(key: ClassKey, units: Int64s, request: TransferRequest) -> Places:
    """Where ``units`` begin on both sides; raises ``missing-positions`` where the producer lists none."""
    tokens = units * key.unit_tokens
    src_table = request.producer[key.src.group]
    require(key.src, tokens, src_table)
    return Places(
        _offsets(key.src, key.row_tokens, tokens=tokens, table=src_table),
        _offsets(key.dst, key.row_tokens, tokens=tokens, table=request.consumer[key.dst.group]),
    )


def state_place(key: ClassKey, request: TransferRequest) -> Places | None:
    """Where the state after ``stop`` tokens lies on both sides; None when there is nothing to move."""
    dst = _state_block(key.dst, request.consumer[key.dst.group], request.stop)
    if dst is None:
        return None
    src = _state_block(key.src, request.producer[key.src.group], request.stop)
    if src is None:
        raise PlanError(
            PlanReason.MISSING_POSITIONS,
            f"the consumer lists a block for the state after {request.stop} tokens, the producer's group "
            f"{key.src.group} lists none",
        )
    return Places(
        np.array([src * key.src.block_stride], dtype=np.int64), np.array([dst * key.dst.block_stride], dtype=np.int64)
    )


def require(side: SideOfClass, tokens: Int64s, table: BlockTable) -> None:
    """Raise ``missing-positions`` unless the producer's ``table`` lists the entries of all ``tokens``."""
    if not tokens.size:
        return
    entry = (tokens - table.origin) // side.entry_tokens
    absent = (entry < 0) | (entry >= table.entries)
    if not absent.any() and not table.held.all():
        absent = ~table.held[entry]
    if absent.any():
        position = int(tokens[np.flatnonzero(absent)[0]])
        _missing(side, table, position)


def _missing(side: SideOfClass, table: BlockTable, position: int) -> None:
    first = table.origin
    raise PlanError(
        PlanReason.MISSING_POSITIONS,
        f"the consumer needs position {position}, the producer's table of group {side.group} lists "
        f"{int(table.held.sum())} blocks for positions [{first}, {first + table.entries * side.entry_tokens}): "
        "ask for what the producer holds, or give the producer's whole table",
    )


def missing_rank(share: ContextParallel, dst: SideOfClass, position: int) -> PlanError:
    """What is raised when no producer file is of the rank that holds ``position``."""
    return PlanError(
        PlanReason.MISSING_POSITIONS,
        f"group {dst.group} of the consumer needs position {position}, which context_parallel rank {share.rank} of "
        f"{share.size} holds; no producer file is of it",
    )


def _offsets(side: SideOfClass, row_tokens: int, *, tokens: Int64s, table: BlockTable) -> Int64s:
    entry = (tokens - table.origin) // side.entry_tokens
    start = table.blocks[entry] * side.block_stride
    if side.unit_map is None:
        return start
    return start + side.unit_map.at(local_index(tokens, side.share) % side.block_tokens // row_tokens)


def _state_block(side: SideOfClass, table: BlockTable, stop: int) -> int | None:
    if stop == 0:
        return None
    entry = 0 if table.first_token is None else (stop - 1 - table.first_token) // side.block_tokens
    if not 0 <= entry < table.entries or not table.held[entry]:
        return None
    return int(table.blocks[entry])
