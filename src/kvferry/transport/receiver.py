"""What a receiving process says about itself, in its own memory: where it may be written to over ``cma``.

The kernel lets a process write wherever another one of the same user has memory. A consumer tells its producer a
process and addresses, and a liar could tell those of somebody else. So a receiver keeps a small record of what it has
registered, its address is part of the address that it tells, and a writer reads that record out of the very process
which it is about to write to: nothing outside the regions listed there is written. A process that holds no such record
is not written to at all.

The record is four words that never move (a mark of 16 bytes, where the list is, how many entries it has), and a list
of addresses and lengths that is replaced as a whole.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Int64Array
from kvferry.transport.ranges import RegionTable, describe

MARK: Final = (0x9C5E_71D2_0B6F_4A38 - (1 << 64), 0x2FD8_93A4_E07B_516C)
"""Two words that no other memory has by chance."""

HEAD_WORDS: Final = 4
MAX_ENTRIES: Final = 65_536

ReadWords = Callable[[int, int], Int64Array]
"""Reads so many words at an address of the peer; raises ``TransportError``."""


class ReceiverRecord:
    """The record of one transport. It lives as long as the object."""

    def __init__(self) -> None:
        self._list = np.zeros(2, np.int64)
        self._head = np.array([*MARK, 0, 0], np.int64)
        self.show(RegionTable(()))

    @property
    def address(self) -> int:
        """Of the record, in this process."""
        return int(self._head.ctypes.data)

    def show(self, table: RegionTable) -> None:
        """Tell of these regions, and of no others."""
        rows = [(region.address, region.nbytes) for region in table.regions]
        fresh = np.array(rows, np.int64).reshape(-1)
        # No entries, then the list, then how many: a reader in between sees too little, never too much.
        self._head[3] = 0
        self._head[2] = fresh.ctypes.data
        self._head[3] = len(rows)
        self._list = fresh


def check_receiver(read: ReadWords, address: int, regions: Sequence[Region]) -> None:
    """Raise unless each of ``regions`` lies in what the peer's record at ``address`` tells of."""
    head = read(address, HEAD_WORDS)
    place, count = int(head[2]), int(head[3])
    if (int(head[0]), int(head[1])) != MARK or not 0 <= count <= MAX_ENTRIES:
        raise TransportError(
            TransportReason.NOT_REGISTERED,
            f"there is no record of a receiver at {address:#x} of that process: it is not a kvferry receiver, or its "
            "transport is closed",
        )
    known = read(place, 2 * count).reshape(count, 2) if count else np.empty((0, 2), np.int64)
    starts, ends = known[:, 0], known[:, 0] + known[:, 1]
    for region in regions:
        at = int(np.searchsorted(starts, region.address, side="right")) - 1
        if at < 0 or region.address + region.nbytes > int(ends[at]):
            raise TransportError(
                TransportReason.NOT_REGISTERED,
                f"{describe(region)} is not inside a region that the receiving process has registered; nothing was "
                "written",
            )
