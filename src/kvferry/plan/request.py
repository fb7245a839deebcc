"""What one request wants moved: a token range, and the block tables of both sides with the position of each table.

A table never travels without the position of its first token; which of its entries exist is a mask, so a missing
block is not a number. Tables are NumPy arrays from the wire to the descriptors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Group
from kvferry.layout.nest import Int64s
from kvferry.layout.records import LIMIT

POSITION_LIMIT = 2**62
"""Positions stay below this, so that sums of two of them fit int64."""


class InvalidRequestError(PlanError, ValueError):
    """A request that contradicts itself or the layouts it is for."""

    def __init__(self, message: str) -> None:
        super().__init__(PlanReason.INVALID_REQUEST, message)


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The blocks of one group: entry ``i`` covers the entry's positions from ``first_token`` on."""

    blocks: Int64s
    """Block ids, int64 ``[entries]``; whatever stands where ``held`` is False is ignored."""
    held: NDArray[np.bool_]
    """Whether there is a block at that entry, bool ``[entries]``."""
    first_token: int | None
    """Position of the first token of entry 0; None for a state that has one block a request."""

    def __post_init__(self) -> None:
        if self.blocks.ndim != 1 or self.blocks.dtype != np.int64 or self.held.dtype != np.bool_:
            raise InvalidRequestError(f"blocks is {self.blocks.dtype}{list(self.blocks.shape)}, not int64 [entries]")
        if self.blocks.shape != self.held.shape:
            raise InvalidRequestError(f"{self.blocks.size} blocks but {self.held.size} marks of which are held")
        if self.first_token is not None and not 0 <= self.first_token < POSITION_LIMIT:
            raise InvalidRequestError(f"first_token {self.first_token} is not in [0, 2**62)")
        if self.ids.size and int(self.ids.min()) < 0:
            raise InvalidRequestError(f"block id {int(self.ids.min())} is negative")
        self.blocks.setflags(write=False)
        self.held.setflags(write=False)

    @classmethod
    def of(cls, blocks: Sequence[int | None], *, first_token: int | None = None) -> "BlockTable":
        """A table from a list in which None means that there is no block.

        >>> BlockTable.of([7, None, 3], first_token=0).ids.tolist()
        [7, 3]
        """
        if any(b is not None and not 0 <= b <= LIMIT for b in blocks):
            raise InvalidRequestError(f"block ids must be in [0, 2**63): {[b for b in blocks if b is not None][:8]}")
        held = np.array([b is not None for b in blocks], dtype=np.bool_)
        return cls(np.array([b or 0 for b in blocks], dtype=np.int64), held, first_token)

    @classmethod
    def empty(cls) -> "BlockTable":
        """A table without entries: nothing is listed."""
        return cls.of([], first_token=0)

    @property
    def entries(self) -> int:
        """Entries, with and without a block."""
        return int(self.blocks.size)

    @property
    def origin(self) -> int:
        """``first_token`` of a table that has one, as every attention table does that was checked."""
        assert self.first_token is not None, "an attention table was checked to have positions"  # noqa: S101
        return self.first_token

    @cached_property
    def ids(self) -> Int64s:
        """The block ids that exist, in table order."""
        return self.blocks if self.held.all() else self.blocks[self.held]


@dataclass(frozen=True)
class TransferRequest:
    """Positions ``[start, stop)`` and one table for each group of each side, in that side's order."""

    start: int
    stop: int
    producer: tuple[BlockTable, ...]
    consumer: tuple[BlockTable, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop < POSITION_LIMIT:
            raise InvalidRequestError(f"tokens [{self.start}, {self.stop}): 0 <= start <= stop < 2**62 must hold")


@dataclass(frozen=True, slots=True)
class SideTables:
    """What the tables of one side must agree with: the groups, ids and overlays of all its files."""

    side: str
    groups: tuple[Group, ...]
    blocks_of_group: tuple[int, ...]
    """Ids of group ``g`` are below ``blocks_of_group[g]``; 0: no component of the side is in ``g``."""
    overlays: tuple[tuple[int, ...], ...]

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Number, positions, ranges and distinctness of ``tables``; raises :class:`PlanError`."""
        if len(tables) != len(self.groups):
            raise InvalidRequestError(
                f"{self.side}: {len(tables)} tables, but the layouts have {len(self.groups)} groups"
            )
        for place, (table, group) in enumerate(zip(tables, self.groups, strict=True)):
            self._check_table(table, group, place)
        for place, table in enumerate(tables):
            self._check_distinct(table.ids, f"group {place}")
        for overlay in self.overlays:
            together = np.concatenate([tables[g].ids for g in overlay])
            self._check_distinct(together, f"groups {list(overlay)}, which overlay one storage")

    def _check_table(self, table: BlockTable, group: Group, place: int) -> None:
        where = f"{self.side}[{place}]"
        if table.first_token is None:
            if group.kind == "attention":
                raise InvalidRequestError(f"{where}: first_token is missing; an attention table has positions")
            if table.entries > 1:
                raise InvalidRequestError(f"{where}: {table.entries} states without first_token: one, or positions")
        elif table.first_token % group.entry_tokens:
            raise InvalidRequestError(
                f"{where}: first_token {table.first_token} is no multiple of {group.entry_tokens}, "
                "the tokens of one table entry"
            )
        elif table.first_token + table.entries * group.entry_tokens >= POSITION_LIMIT:
            raise InvalidRequestError(f"{where}: {table.entries} entries reach past position 2**62")
        blocks = self.blocks_of_group[place]
        if blocks and table.ids.size and int(table.ids.max()) >= blocks:
            raise InvalidRequestError(
                f"{where}: block id {int(table.ids.max())} is out of range: group {place} has {blocks} blocks"
            )

    def _check_distinct(self, ids: Int64s, where: str) -> None:
        ordered = np.sort(ids)
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if twice.size:
            raise PlanError(
                PlanReason.DUPLICATE_BLOCKS,
                f"{self.side} {where}: block {int(ordered[twice[0]])} is listed twice: a block has one owner at a time",
            )
