"""Hashing pages in the memory of one end: SHA-256, cut to 16 bytes, over what a page is and what it holds.

    layer, component, content type, coordinates | first and last position, number of rows | rows in canonical order

So a right copy of the wrong page is found too. Bytes between the parts that move (padding, other ranks' heads,
positions that were not asked for) are not looked at. Of a row go in its bytes or, where one end has its pages on a
device, its sums; how either is read is the reader's (:mod:`kvferry.runtime.page_reading`). Rows are read some
thousands at a time; reading and hashing both run without Python's lock.
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvferry.layout import Placed
from kvferry.plan.assign import Move
from kvferry.runtime.page_reading import Box, Int64s, PageReader
from kvferry.runtime.report import Side
from kvferry.runtime.verify_pages import Cell, Pages, coordinates_of

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


def hash_pages(listed: Sequence[Pages], side: Side, reader: PageReader, *, sums: bool) -> Digests:
    """The digests of some cells' pages, in order; of their rows' ``sums`` or of their bytes."""
    found: list[bytes] = []
    nbytes = 0
    for pages in listed:
        found += _hashed(pages, side, reader, sums=sums)
        nbytes += pages.rows.count * _row_bytes(pages.cell)
    return Digests(b"".join(found), sum(pages.covered for pages in listed), nbytes)


def joined(parts: Sequence[Digests]) -> Digests:
    """Digests of cells that follow each other."""
    pages, nbytes = sum(part.pages for part in parts), sum(part.nbytes for part in parts)
    return Digests(b"".join(part.data for part in parts), pages, nbytes)


def _hashed(pages: Pages, side: Side, reader: PageReader, *, sums: bool) -> Iterator[bytes]:
    """The digest of every page."""
    cell = pages.cell
    placed = cell.source if side == "producer" else cell.target
    box = _box_of(placed, cell.move)
    read = reader.sums if sums else reader.rows
    named = hashlib.sha256(_name(cell, sums=sums))
    position = pages.rows.position
    for begin, end in _chunks(pages.cuts):
        low = int(pages.cuts[begin])
        found = read(placed, pages.rows.at(slice(low, int(pages.cuts[end]))), box)
        for page in range(begin, end):
            first, stop = int(pages.cuts[page]), int(pages.cuts[page + 1])
            digest = named.copy()
            digest.update(struct.pack("<qqq", position[first], position[stop - 1], stop - first))
            digest.update(found[first - low : stop - low].data)
            yield digest.digest()[:DIGEST_BYTES]


def _name(cell: Cell, *, sums: bool) -> bytes:
    component = cell.target.component
    axes = [axis.name for axis in component.global_axes]
    kind = "kvferry.page-sums/1" if sums else "kvferry.page/1"
    return repr((kind, *component.key, component.content.type, axes, coordinates_of(cell))).encode()


def _row_bytes(cell: Cell) -> int:
    """Bytes of cache in one row of a cell."""
    return cell.target.component.content.nbytes * math.prod(stop - start for start, stop in coordinates_of(cell))


def _box_of(placed: Placed, move: Move) -> Box:
    """What of a row a cell is."""
    return tuple(
        slice(interval.start - axis.start, interval.stop - axis.start)
        for axis, interval in zip(placed.component.global_axes, move.box, strict=True)
    )


def _chunks(cuts: Int64s) -> Iterator[tuple[int, int]]:
    """Runs of pages with not too many rows together."""
    begin, last = 0, int(cuts.size) - 1
    while begin < last:
        end = int(np.searchsorted(cuts, cuts[begin] + _CHUNK_ROWS, side="right")) - 1
        end = min(max(end, begin + 1), last)
        yield begin, end
        begin = end
