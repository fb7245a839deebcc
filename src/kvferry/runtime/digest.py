"""A digest of moved cache contents that does not depend on layouts, addresses or the plan.

Both ends hash, in one canonical order (layer, component, position, coordinates by axis name, content byte), what their
own memory holds where the two boxes meet. Equal digests mean: the same place of the model's cache has the same bytes at
both ends. Nothing of the planner is used: each side walks its own layout with its own block table, so a wrong plan
shows, and not only a wrong copy.

Positions are the needed ones of the layout specification: in ``[start, stop)``, inside the window or chunk, held by
both ranks, in entries that the consumer lists; of a state, its one entry. Where a row holds several positions it is
hashed once and whole. How memory is read is the reader's (:mod:`kvferry.runtime.page_reading`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Component, ContextParallel, Group, Placed, Placement
from kvferry.plan import BlockTable, TransferRequest
from kvferry.runtime.page_reading import Int64s, PageReader, Rows, token_axis
from kvferry.runtime.report import Side

_Bools = NDArray[np.bool_]

_CHUNK_ROWS = 4096
"""Rows gathered at once, so that a long prompt does not double the memory in use."""


@dataclass(frozen=True, slots=True)
class PageDigest:
    """What was hashed, and the result."""

    digest: str
    """32 hexadecimal digits (BLAKE2b)."""
    pages: int
    """Number of (component, table entry) that held a hashed position."""


def page_digest(
    producer: Placement, consumer: Placement, request: TransferRequest, *, side: Side, reader: PageReader
) -> PageDigest:
    """Digest of what the request moves between two ranks, read from the memory of ``side``.

    A consumer that was not told the producer's tables passes empty ones; they are not used for its side.
    """
    theirs = {placed.component.key: placed for placed in producer.placed}
    pages = 0
    total = hashlib.blake2b(digest_size=16)
    for placed in sorted(consumer.placed, key=lambda p: p.component.key):
        peer = theirs.get(placed.component.key)
        if peer is None:
            continue
        coordinates = _meet(peer.component, placed.component)
        if coordinates is None:
            continue
        source = peer if side == "producer" else placed
        sides = ((producer, peer.component), (consumer, placed.component))
        rows, entries = rows_of_pair(side, *sides, request)
        pages += entries
        _hash_rows(total, source, rows=rows, coordinates=coordinates, reader=reader)
    return PageDigest(total.hexdigest(), pages)


def _meet(one: Component, other: Component) -> dict[str, tuple[int, int]] | None:
    """The coordinates that both hold of each global axis; None when some axis has none."""
    others = {axis.name: axis for axis in other.global_axes}
    shared = {a.name: (max(a.start, others[a.name].start), min(a.stop, others[a.name].stop)) for a in one.global_axes}
    return shared if all(low < high for low, high in shared.values()) else None


def rows_of_pair(
    side: Side,
    producer: tuple[Placement, Component],
    consumer: tuple[Placement, Component],
    request: TransferRequest,
) -> tuple[Rows, int]:
    """The rows of the component of ``side`` to hash, and in how many table entries they lie.

    ``producer`` and ``consumer`` are a placement and one of its components; both ends find rows of equal positions.
    """
    theirs, ours = producer[0].groups[producer[1].group], consumer[0].groups[consumer[1].group]
    listed = request.consumer[consumer[1].group]
    is_producer = side == "producer"
    source = producer[1] if is_producer else consumer[1]
    group = theirs if is_producer else ours
    table = request.producer[producer[1].group] if is_producer else listed
    if ours.kind == "state":
        wanted = _state_block(listed, ours, request.stop)
        found = _state_block(table, group, request.stop)
        block = np.array([found] if wanted is not None and found is not None else [], np.int64)
        return Rows(block, np.zeros_like(block), np.zeros_like(block), np.full_like(block, request.stop)), block.size
    positions = _needed(ours, request)
    positions = positions[_on_rank(positions, theirs.share) & _on_rank(positions, ours.share)]
    positions = positions[_listed(positions, listed, ours)]
    if is_producer:
        positions = positions[_listed(positions, table, group)]
    return _locate(source, group, table=table, positions=positions)


def _state_block(table: BlockTable, group: Group, stop: int) -> int | None:
    """The block that holds the state after ``stop`` tokens."""
    if stop == 0:
        return None
    entry = 0 if table.first_token is None else (stop - 1 - table.first_token) // group.block_tokens
    if not 0 <= entry < table.entries or not table.held[entry]:
        return None
    return int(table.blocks[entry])


def _needed(group: Group, request: TransferRequest) -> Int64s:
    low = request.start
    if group.sliding_window is not None:
        low = max(low, request.stop - group.sliding_window)
    if group.chunk is not None and request.stop:
        low = max(low, (request.stop - 1) // group.chunk * group.chunk)
    return np.arange(low, request.stop, dtype=np.int64)


def _on_rank(positions: Int64s, share: ContextParallel | None) -> _Bools:
    if share is None:
        return np.ones(positions.shape, np.bool_)
    mine: _Bools = (positions // share.interleave) % share.size == share.rank
    return mine


def _listed(positions: Int64s, table: BlockTable, group: Group) -> _Bools:
    entries = (positions - (table.first_token or 0)) // group.entry_tokens
    inside = (entries >= 0) & (entries < table.entries)
    inside[inside] = table.held[entries[inside]]
    return inside


def _locate(component: Component, group: Group, *, table: BlockTable, positions: Int64s) -> tuple[Rows, int]:
    """Where ``component`` keeps ``positions``: each row once, in order of its first position."""
    from_first = positions - (table.first_token or 0)
    entry, inside = np.divmod(from_first, group.entry_tokens)
    if group.share is not None:
        deal = group.share.interleave
        inside = inside // (deal * group.share.size) * deal + inside % deal
    token = token_axis(component)
    row = inside // component.row_tokens
    first = np.ones(row.shape, np.bool_)
    first[1:] = (row[1:] != row[:-1]) | (entry[1:] != entry[:-1])
    entry, row = entry[first], row[first]
    rows = Rows(table.blocks[entry], *np.divmod(row, token.count), positions[first])
    return rows, int(np.unique(entry).size)


def _hash_rows(
    total: "hashlib.blake2b",
    placed: Placed,
    *,
    rows: Rows,
    coordinates: Mapping[str, tuple[int, int]],
    reader: PageReader,
) -> None:
    component = placed.component
    header = [*component.key, component.content.type, rows.block.size, sorted(coordinates.items())]
    total.update(repr(header).encode())
    box = tuple(slice(c[0] - a.start, c[1] - a.start) for a in component.global_axes for c in [coordinates[a.name]])
    for begin in range(0, rows.count, _CHUNK_ROWS):
        total.update(reader.rows(placed, rows.at(slice(begin, begin + _CHUNK_ROWS)), box).data)
