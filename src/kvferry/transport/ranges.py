"""Which addresses may be read or written: registered regions, and the check that every submission passes first.

A descriptor must lie inside *one* registered region on each side (engines refuse or, worse, half do what crosses the
seam of two registrations), and no byte of the peer may be written twice by one submission (engines write such rows in
any order and say success). Both are checked on whole columns: a binary search into the sorted region starts, and one
sort of starts and ends.

Why sorting starts and ends apart is enough: intervals are pairwise disjoint exactly when, with starts and ends each in
order, the end of place ``i`` never exceeds the start of place ``i + 1``. If two of them share a point ``x``, at least
two more starts than ends are at or below ``x``, so some end comes after the start of the next place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors, Int64Array


@dataclass(frozen=True, slots=True)
class RegionTable:
    """Disjoint regions, in the order of their addresses."""

    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        for before, after in zip(self.regions, self.regions[1:], strict=False):
            if before.address + before.nbytes > after.address:
                raise TransportError(
                    TransportReason.INVALID_REGIONS,
                    f"regions must be disjoint and ordered: {describe(before)} overlaps or follows {describe(after)}",
                )

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Self:
        """The table of these regions, given in any order."""
        return cls(tuple(sorted(regions, key=lambda region: region.address)))

    def with_regions(self, regions: Sequence[Region]) -> "RegionTable":
        """This table and more regions."""
        return RegionTable.of((*self.regions, *regions))

    def without(self, regions: Sequence[Region]) -> "RegionTable":
        """This table less some of its regions, each of which must be in it."""
        for region in regions:
            if region not in self.regions:
                raise TransportError(TransportReason.NOT_REGISTERED, f"{describe(region)} is not registered")
        return RegionTable(tuple(region for region in self.regions if region not in set(regions)))

    def outside(self, addresses: Int64Array, nbytes: Int64Array) -> int | None:
        """The first row that does not lie inside one region; ``None`` when all do."""
        if not self.regions:
            return 0 if addresses.size else None
        starts = np.array([region.address for region in self.regions], np.int64)
        ends = np.array([region.address + region.nbytes for region in self.regions], np.int64)
        place = np.searchsorted(starts, addresses, side="right") - 1
        # Ends are compared through the room that is left, since address + nbytes could wrap.
        inside = (place >= 0) & (nbytes > 0) & (nbytes <= ends[place] - addresses)
        return None if inside.all() else int(inside.argmin())


def describe(region: Region) -> str:
    """A region as people read it."""
    return f"[{region.address:#x}, {region.address + region.nbytes:#x}) in {region.memory} memory"


def check_descriptors(descriptors: Descriptors, local: RegionTable, peer: RegionTable) -> None:
    """Refuse a submission of which any row leaves registered memory, or which writes a byte twice."""
    for name, table, addresses in (("src", local, descriptors.src), ("dst", peer, descriptors.dst)):
        row = table.outside(addresses, descriptors.nbytes)
        if row is not None:
            raise TransportError(
                TransportReason.OUT_OF_RANGE, _outside(name, row, descriptors=descriptors, table=table)
            )
    if _writes_twice(descriptors.dst, descriptors.nbytes):
        raise TransportError(
            TransportReason.INVALID_DESCRIPTORS,
            f"two of {descriptors.count} descriptors write the same byte of the peer; their order is not defined",
        )


def _outside(name: str, row: int, *, descriptors: Descriptors, table: RegionTable) -> str:
    address = int(getattr(descriptors, name)[row])
    owner = "this process" if name == "src" else "the peer"
    known = ", ".join(describe(region) for region in table.regions[:4]) or "none"
    more = f" and {len(table.regions) - 4} more" if len(table.regions) > 4 else ""
    return (
        f"descriptor {row}: {name} {address:#x} + {int(descriptors.nbytes[row])} bytes is not inside one region "
        f"registered by {owner}: {known}{more}; nothing was written"
    )


def _writes_twice(dst: Int64Array, nbytes: Int64Array) -> bool:
    ends = dst + nbytes
    if bool((ends[:-1] <= dst[1:]).all()):
        return False
    starts = np.sort(dst)
    # Equal lengths, the usual case, make the order of ends that of starts.
    ends = starts + nbytes[0] if bool((nbytes == nbytes[0]).all()) else np.sort(ends)
    return bool((ends[:-1] > starts[1:]).any())


def split_rows(descriptors: Descriptors, largest: int) -> Descriptors:
    """The same bytes in rows of at most ``largest`` bytes, in the same order."""
    if not descriptors.count or int(descriptors.nbytes.max()) <= largest:
        return descriptors
    pieces = -(-descriptors.nbytes // largest)
    row = np.repeat(np.arange(descriptors.count), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = (np.arange(row.size) - first) * largest
    return Descriptors.proven(
        descriptors.src[row] + offset,
        descriptors.dst[row] + offset,
        np.minimum(descriptors.nbytes[row] - offset, largest),
    )
