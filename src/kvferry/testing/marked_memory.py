"""Memory with a layout in which every byte says what it is.

The mark of a live byte is a hash of (component, position, global coordinates, content byte); all other bytes hold one
value that no one may overwrite. A consumer can so be checked byte by byte without the planner: from its own layout,
its own block tables and the token range alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Component, Group, Layout
from kvferry.plan import BlockTable

UNTOUCHED = 0xA5
"""What memory holds where nothing was written."""

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Tables:
    """What one request wants of one side: tokens ``[start, stop)`` and a table for each group."""

    start: int
    stop: int
    tables: tuple[BlockTable, ...]
    salt: int = 0
    """Which prompt: marks of unequal prompts are unequal at equal positions."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Bytes of one component that are not what they must be."""

    component: str
    position: int
    wrong: int


class MarkedMemory:
    """One allocation that backs a layout whose only region begins at address 0."""

    def __init__(self, layout: Layout) -> None:
        (region,) = layout.regions
        self.bytes: Bytes = np.full(region.nbytes, UNTOUCHED, dtype=np.uint8)
        base = int(self.bytes.ctypes.data)
        self._local = layout
        self.layout = msgspec.structs.replace(
            layout,
            regions=(msgspec.structs.replace(region, address=base),),
            components=tuple(msgspec.structs.replace(c, address=c.address + base) for c in layout.components),
        )

    def fill(self, request: Tables) -> None:
        """Write the marks of all positions of ``request`` from 0 on, as a prefill would."""
        for part in self._parts(request, start=0):
            part.view[...] = part.marks()

    def check(self, request: Tables) -> tuple[list[Mismatch], int]:
        """Compare what ``request`` moved with the marks; returns what is wrong and how many bytes were looked at.

        Every required byte must hold its mark. A byte after ``stop`` in the last entry may hold it or be untouched.
        """
        wrong: list[Mismatch] = []
        checked = 0
        for part in self._parts(request, start=request.start):
            right = part.view == part.marks()
            if part.position >= request.stop:
                right |= part.view == UNTOUCHED
            checked += part.view.size
            bad = int(part.view.size - np.count_nonzero(right))
            if bad:
                wrong.append(Mismatch(part.component.label, part.position, bad))
        return wrong, checked

    def untouched_outside(self, requests: list[Tables]) -> int:
        """Bytes that were written although no request listed their rows."""
        copy = self.bytes.copy()
        try:
            for request in requests:
                for part in self._parts(request, start=request.start):
                    part.view[...] = UNTOUCHED
            return int(np.count_nonzero(self.bytes != UNTOUCHED))
        finally:
            self.bytes[...] = copy

    def _parts(self, request: Tables, *, start: int) -> "Iterator[_Part]":
        for component in self._local.components:
            group = self._local.groups[component.group]
            table = request.tables[component.group]
            if group.kind == "state":
                yield from _state_parts(self.bytes, component, group=group, table=table, request=request)
            else:
                first = _first(group, start, stop=request.stop)
                for part in _row_parts(self.bytes, component, group=group, table=table, first=first):
                    yield replace(part, salt=request.salt)


@dataclass(frozen=True, slots=True)
class _Part:
    """One row of a component, or one whole state, with the position that its marks carry."""

    component: Component
    view: Bytes
    position: int
    salt: int = 0

    def marks(self) -> Bytes:
        """What the bytes of ``view`` must be."""
        return _marks(self.component, self.position, salt=self.salt)


def _first(group: Group, start: int, *, stop: int) -> int:
    if group.sliding_window is not None:
        start = max(start, stop - group.sliding_window)
    if group.chunk is not None and stop:
        start = max(start, (stop - 1) // group.chunk * group.chunk)
    return start


def _row_parts(memory: Bytes, component: Component, *, group: Group, table: BlockTable, first: int) -> Iterator[_Part]:
    per_row = component.row_tokens
    origin = table.first_token or 0
    for entry in np.flatnonzero(table.held).tolist():
        views = _rows_of(memory, component, int(table.blocks[entry]))
        for row, view in enumerate(views):
            position = origin + entry * group.block_tokens + row * per_row
            if position + per_row > first:
                yield _Part(component, view, position)


def _state_parts(
    memory: Bytes, component: Component, *, group: Group, table: BlockTable, request: Tables
) -> Iterator[_Part]:
    stop = request.stop
    entry = 0 if table.first_token is None else (stop - 1 - table.first_token) // group.block_tokens
    if stop and 0 <= entry < table.entries and table.held[entry]:
        yield _Part(component, _rows_of(memory, component, int(table.blocks[entry]))[0], stop, request.salt)


def _rows_of(memory: Bytes, component: Component, block: int) -> list[Bytes]:
    """Writable views ``[global coordinates..., nbytes]``, one for each row of the block (one for a state)."""
    token = component.token_axis
    axes = component.global_axes
    shape = [component.pages, token.count if token else 1, *(a.count for a in axes), component.content.nbytes]
    strides = [component.page_stride, token.stride if token else 0, *(a.stride for a in axes), 1]
    start = component.address + block * component.block_stride
    view = np.lib.stride_tricks.as_strided(memory[start:], shape, strides)
    return [view[page, row] for page in range(shape[0]) for row in range(shape[1])]


def _marks(component: Component, position: int, *, salt: int) -> Bytes:
    axes = component.global_axes
    seed = int.from_bytes(blake2b("/".join(component.key).encode(), digest_size=8).digest(), "little")
    place = np.zeros([a.count for a in axes], dtype=np.uint64)
    for number, axis in enumerate(axes):
        shape = [1] * len(axes)
        shape[number] = axis.count
        place = place * np.uint64(axis.total) + (axis.start + np.arange(axis.count, dtype=np.uint64)).reshape(shape)
    byte = np.arange(component.content.nbytes, dtype=np.uint64)
    key = (place[..., None] * np.uint64(component.content.nbytes) + byte) * np.uint64(0x9E3779B97F4A7C15)
    # Scalars are reduced by hand: NumPy warns when a scalar wraps, and not when an array does.
    return _mixed(key + np.uint64((seed + position * 0xD1B54A32D192ED03 + salt * 0x8CB92BA72F3D8DD7) % 2**64))


def _mixed(key: Hashes) -> Bytes:
    key = (key ^ (key >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((key ^ (key >> np.uint64(32))) & np.uint64(0xFF)).astype(np.uint8)
