"""What a picture of a plan shows: which components, blocks and ranks, and which stretches of descriptors lie in them.

A *window* is the stretch of one worker's memory that one block of one component occupies (from its first to its last
byte); where a block is spread over the pool, it has one window for each of its pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from msgspec.structs import replace

from kvferry.cli.frames import loops_in_block
from kvferry.layout import BoundLayout, Component, Group
from kvferry.plan import BlockTable, Descriptors, Plan, TransferRequest

BLOCKS = 3
"""Consumer blocks of one rank that are drawn."""
SOURCE_BLOCKS = 4
RANKS = 4
PIECES = 4
PIECES_COUNTED = 64

Key = tuple[str, str]
"""(layer, component)."""


@dataclass(frozen=True, slots=True)
class Window:
    """One block, or one piece of a block, of one component."""

    side: str
    worker: int
    component: Component
    """With its address absolute."""
    block: int
    offset: int
    """Of this piece, from the component's first byte in the block."""
    nbytes: int
    tokens: str

    @property
    def words(self) -> str:
        return f"{self.side} {self.worker} block {self.block}"

    @property
    def address(self) -> int:
        return self.component.address + self.block * self.component.block_stride + self.offset


@dataclass(frozen=True, slots=True)
class Windows:
    """Both rows of a panel."""

    src: tuple[Window, ...]
    dst: tuple[Window, ...]
    left_out: tuple[str, ...]
    """What there was no room for."""


@dataclass(frozen=True)
class Scene:
    """A planned request and the workers it is between."""

    plan: Plan
    workers: tuple[Sequence[BoundLayout], Sequence[BoundLayout]]
    names: tuple[Sequence[str], Sequence[str]]
    request: TransferRequest
    moved: dict[tuple[int, int], Descriptors]
    """Descriptors of each (producer, consumer) that moves something."""

    @property
    def descriptors(self) -> int:
        return sum(found.count for found in self.moved.values())

    @property
    def total_bytes(self) -> int:
        return sum(found.total_bytes for found in self.moved.values())

    @property
    def sides(self) -> str:
        counts = len({p for p, _ in self.moved}), len({c for _, c in self.moved})
        return " to ".join(
            f"{n} {word}{'' if n == 1 else 's'}" for n, word in zip(counts, ("producer", "consumer"), strict=True)
        )

    @property
    def active_producers(self) -> list[int]:
        return sorted({p for p, _ in self.moved})

    @cached_property
    def kinds(self) -> tuple[Key, ...]:
        """The first layer of every kind of component that moves: what gets a panel."""
        seen: dict[tuple[int, str], Key] = {}
        for producer, consumer in self.moved:
            for move in self.plan.assignment.moves[producer, consumer]:
                component = self.plan.consumers[consumer].components[move.dst]
                kind = (component.group, component.component)
                if kind not in seen and windows_of(self, component.key).dst:
                    seen[kind] = component.key
        return tuple(seen.values())

    def servers(self, key: Key) -> list[tuple[int, int]]:
        """(producer, consumer) of every pair that moves component ``key``."""
        return [
            pair
            for pair in sorted(self.moved)
            if any(self.plan.consumers[pair[1]].components[m.dst].key == key for m in self.plan.assignment.moves[pair])
        ]

    def component(self, side: int, worker: int, key: Key) -> Component:
        """Component ``key`` of a worker, at its absolute address."""
        bound = self.workers[side][worker]
        placed = next(p for p in bound.placement.placed if p.component.key == key)
        base = bound.binding.bases[placed.storage]
        return replace(placed.component, address=placed.component.address + base)

    def between(self, src: Window, dst: Window) -> list[tuple[int, int, int]]:
        """(source offset, destination offset, bytes) of what goes from one window to the other."""
        found = self.moved.get((src.worker, dst.worker))
        if found is None:
            return []
        low = np.maximum(0, np.maximum(src.address - found.src, dst.address - found.dst))
        high = np.minimum(
            found.nbytes, np.minimum(src.address + src.nbytes - found.src, dst.address + dst.nbytes - found.dst)
        )
        inside = np.flatnonzero(low < high)
        return [
            (int(found.src[i] + low[i]) - src.address, int(found.dst[i] + low[i]) - dst.address, int(high[i] - low[i]))
            for i in inside
        ]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A table entry that the request touches."""

    block: int
    first: int
    stop: int
    """Positions that it covers; equal to ``first`` for a state."""

    @property
    def tokens(self) -> str:
        return "state" if self.first == self.stop else f"tokens {self.first:,}..{self.stop - 1:,}"


def windows_of(scene: Scene, key: Key) -> Windows:
    """The blocks of component ``key`` that fit into a panel, on both sides."""
    pairs = scene.servers(key)
    consumers = sorted({c for _, c in pairs})[:RANKS]
    producers = sorted({p for p, c in pairs if c in consumers})[:RANKS]
    group = [scene.component(side, ranks[0], key).group for side, ranks in ((0, producers), (1, consumers))]
    tables = scene.request.producer[group[0]], scene.request.consumer[group[1]]
    groups = scene.plan.producer_side.groups[group[0]], scene.plan.consumer_side.groups[group[1]]
    wanted = _touched(tables[1], groups[1], _needed(scene.request, groups[1]))
    shown = wanted[: max(1, BLOCKS - len(consumers) + 1)]
    if not shown:
        return Windows((), (), ())
    # Rounded positions of the entries that are drawn, so that both rows show the same tokens.
    reach = (shown[0].first, shown[-1].stop)
    sources = _touched(
        tables[0], groups[0], reach if groups[0].kind == "attention" else _needed(scene.request, groups[0])
    )
    near = sources[:SOURCE_BLOCKS]
    if not near:  # what the first blocks hold belongs to ranks that are not here, and so nobody has to list it
        return Windows((), (), ())
    left_out = [
        f"and {more:,} more {word}"
        for more, word in (
            (len(wanted) - len(shown), "of the consumer's blocks"),
            (len(sources) - len(near), "of the producer's blocks for these"),
            (len({c for _, c in pairs}) - len(consumers), "of the consumers"),
            (_more_layers(scene, key), "of the layers, alike"),
            (len(pieces_of(scene.component(0, producers[0], key))) - PIECES, "pieces of each producer block"),
            (len(pieces_of(scene.component(1, consumers[0], key))) - PIECES, "pieces of each consumer block"),
        )
        if more > 0
    ]
    src = _windows(scene, key, side=0, entries=near, workers=producers)
    dst = _windows(scene, key, side=1, entries=shown, workers=consumers)
    return Windows(src, dst, tuple(left_out))


def _needed(request: TransferRequest, group: Group) -> tuple[int, int]:
    start = request.start
    if group.sliding_window is not None:
        start = max(start, request.stop - group.sliding_window)
    if group.chunk is not None and request.stop:
        start = max(start, (request.stop - 1) // group.chunk * group.chunk)
    return (max(0, request.stop - 1), request.stop) if group.kind == "state" else (start, request.stop)


def _touched(table: BlockTable, group: Group, positions: tuple[int, int]) -> list[_Entry]:
    """Entries with a block that cover any of ``positions``."""
    first = table.first_token
    if group.kind == "state" and first is None:
        return [_Entry(int(b), positions[0], positions[0]) for b in table.ids[:1]]
    tokens, origin = group.entry_tokens, first or 0
    low = max(0, (positions[0] - origin) // tokens)
    high = min(table.entries, -(-(positions[1] - origin) // tokens))
    entries = [e for e in range(low, high) if table.held[e]]
    state = group.kind == "state"
    return [
        _Entry(int(table.blocks[e]), origin + e * tokens, origin + (e if state else e + 1) * tokens) for e in entries
    ]


def _windows(
    scene: Scene, key: Key, *, side: int, entries: Sequence[_Entry], workers: Sequence[int]
) -> tuple[Window, ...]:
    """Block by block, all ranks of a block side by side, so that few ribbons cross."""
    name = ("producer", "consumer")[side]
    found = []
    for entry, worker in product(entries, workers):
        component = scene.component(side, worker, key)
        for offset, nbytes in pieces_of(component)[:PIECES]:
            found.append(Window(name, worker, component, entry.block, offset, nbytes, entry.tokens))
    return tuple(found)


def pieces_of(component: Component) -> list[tuple[int, int]]:
    """(offset, bytes) of the stretches in which one block lies; more than one where other blocks lie between."""
    if component.last_in_block <= component.block_stride:
        return [(0, component.last_in_block)]
    offsets, reach = [0], component.content.nbytes
    for loop in sorted(loops_in_block(component), key=lambda loop: loop.stride):
        if loop.count > 1 and loop.stride >= component.block_stride:
            more = (o + i * loop.stride for i in range(min(loop.count, PIECES_COUNTED)) for o in offsets)
            offsets = sorted(more)[:PIECES_COUNTED]
        else:
            reach += (loop.count - 1) * loop.stride
    return [(offset, reach) for offset in sorted(offsets)]


def _more_layers(scene: Scene, key: Key) -> int:
    pair = scene.servers(key)[0]
    components = scene.plan.consumers[pair[1]].components
    moved = [components[m.dst] for m in scene.plan.assignment.moves[pair]]
    one = next(c for c in moved if c.key == key)
    return len({c.key for c in moved if (c.group, c.component) == (one.group, one.component)}) - 1
