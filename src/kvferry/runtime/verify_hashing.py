"""Hashing pages in the memory of one end: SHA-256, cut to 16 bytes, over what a page is and what it holds.

    layer, component, content type, coordinates | first and last position, number of rows | bytes in canonical order

So a right copy of the wrong page is found too. Bytes between the parts that move (padding, other ranks' heads,
positions that were not asked for) are not looked at. Rows are gathered by NumPy, some thousands at a time; gathering
and hashing both run without Python's lock.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Binding, Placed
from kvferry.plan.assign import Move
from kvferry.runtime.digest import cells_of
from kvferry.runtime.report import Side
from kvferry.runtime.verify_pages import Cell, Int64s, Pages, coordinates_of

DIGEST_BYTES: Final = 16

_CHUNK_ROWS: Final = 4096
"""Rows gathered at once, unless one page has more."""


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of a pull, in order of cell and position, and what they stand for."""

    data: bytes
    pages: int
    """Pairs of (layer and component, entry of the consumer's table) that were hashed."""
    nbytes: int


def hash_pages(listed: Sequence[Pages], side: Side, binding: Binding) -> Digests:
    """The digests of some cells' pages, in order."""
    found: list[bytes] = []
    nbytes = 0
    for pages in listed:
        for digest, size in _hashed(pages, side, binding):
            found.append(digest)
            nbytes += size
    return Digests(b"".join(found), sum(pages.covered for pages in listed), nbytes)


def joined(parts: Sequence[Digests]) -> Digests:
    """Digests of cells that follow each other."""
    pages, nbytes = sum(part.pages for part in parts), sum(part.nbytes for part in parts)
    return Digests(b"".join(part.data for part in parts), pages, nbytes)


def _hashed(pages: Pages, side: Side, binding: Binding) -> Iterator[tuple[bytes, int]]:
    """The digest of every page, with how many bytes of cache it is of."""
    cell = pages.cell
    placed = cell.source if side == "producer" else cell.target
    named = hashlib.sha256(_name(cell))
    memory = _box_of(placed, cell.move, binding)
    position = pages.rows.position
    for begin, end in _chunks(pages.cuts):
        low, high = int(pages.cuts[begin]), int(pages.cuts[end])
        chunk = slice(low, high)
        found = memory[(pages.rows.block[chunk], pages.rows.kernel_block[chunk], pages.rows.row[chunk])]
        flat = np.ascontiguousarray(found).reshape(-1)
        width = flat.size // (high - low)
        for page in range(begin, end):
            first, stop = int(pages.cuts[page]), int(pages.cuts[page + 1])
            digest = named.copy()
            digest.update(struct.pack("<qqq", position[first], position[stop - 1], stop - first))
            part = flat[(first - low) * width : (stop - low) * width]
            digest.update(part.data)
            yield digest.digest()[:DIGEST_BYTES], part.size


def _name(cell: Cell) -> bytes:
    component = cell.target.component
    axes = [axis.name for axis in component.global_axes]
    return repr(("kvferry.page/1", *component.key, component.content.type, axes, coordinates_of(cell))).encode()


def _box_of(placed: Placed, move: Move, binding: Binding) -> NDArray[np.uint8]:
    """The memory of a cell as ``[block, kernel block, row, *coordinates of the box, content byte]``."""
    component = placed.component
    cells = cells_of(component, binding.bases[placed.storage] + component.address)
    inner = tuple(
        slice(interval.start - axis.start, interval.stop - axis.start)
        for axis, interval in zip(component.global_axes, move.box, strict=True)
    )
    return cells[(slice(None), slice(None), slice(None), *inner)]


def _chunks(cuts: Int64s) -> Iterator[tuple[int, int]]:
    """Runs of pages with not too many rows together."""
    begin, last = 0, int(cuts.size) - 1
    while begin < last:
        end = int(np.searchsorted(cuts, cuts[begin] + _CHUNK_ROWS, side="right")) - 1
        end = min(max(end, begin + 1), last)
        yield begin, end
        begin = end
