"""Placement and binding: a layout taken apart into what is the same after a restart and what is not.

A **placement** has no absolute address. Its memory is a list of *storages*; a component lies at an offset in one of
them. A storage is the smallest set of registered regions whose relative position matters: regions that touch, or that
one component spans, share a storage; all others move independently of each other. So two workers that allocate alike
have equal placements and one fingerprint, whatever addresses the allocator gave them.

A **binding** is one base address for each storage. Plans are compiled for placements; bindings come in per request.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Literal

import msgspec
import numpy as np

from kvferry.errors import PlanError, PlanReason
from kvferry.ids import Fingerprint
from kvferry.layout.check import Area, areas_of, check_layout, clusters_of
from kvferry.layout.nest import Int64s
from kvferry.layout.records import (
    LIMIT,
    Component,
    Count,
    Group,
    InvalidLayoutError,
    Layout,
    Offset,
    Parallel,
    Record,
    Region,
)

EXTENTS_KEPT = 64
"""Bindings of which a placement remembers where its regions are: a rank's peers of equal layout, mostly."""


class Span(Record, frozen=True):
    """One registered region, relative to the base of its storage."""

    offset: Offset
    nbytes: Count


class Storage(Record, frozen=True):
    """Regions at fixed distances; the first starts at the base."""

    memory: str
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.spans:
            raise InvalidLayoutError("a storage has at least one region")


class Placed(Record, frozen=True):
    """A component whose ``address`` is an offset into ``storage``."""

    storage: Offset
    component: Component


class _PlacementForm(Record, frozen=True):
    groups: tuple[Group, ...]
    storages: tuple[Storage, ...]
    placed: tuple[Placed, ...]
    format: Literal["kvferry.placement/1"] = "kvferry.placement/1"


@dataclass(frozen=True, eq=False)
class Placement:
    """A checked layout without addresses; equal, and hashed, by fingerprint."""

    groups: tuple[Group, ...]
    storages: tuple[Storage, ...]
    """Empty when the layout had no regions: such a placement cannot be planned."""
    placed: tuple[Placed, ...]

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """SHA-256 of the wire form."""
        return Fingerprint(sha256(encode_placement(self)).hexdigest())

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """The components alone, addresses being offsets in their storages."""
        return tuple(p.component for p in self.placed)

    @cached_property
    def on_host(self) -> bool:
        """Whether all of it is memory of the CPU."""
        return all(storage.memory == "cpu" for storage in self.storages)

    @cached_property
    def overlays(self) -> tuple[tuple[int, ...], ...]:
        """Sets of two or more groups whose components' address ranges meet, transitively.

        A block id is owned by one group of such a set at a time.
        """
        sets: list[set[int]] = []
        inside: dict[int, list[Component]] = {}
        for placed in self.placed:
            inside.setdefault(placed.storage, []).append(placed.component)
        for storage in sorted(inside):
            for cluster in clusters_of(inside[storage]):
                merged = {c.group for c in cluster}
                apart = [s for s in sets if not s & merged]
                sets = [*apart, merged.union(*(s for s in sets if s & merged))]
        return tuple(sorted(tuple(sorted(s)) for s in sets if len(s) > 1))

    @cached_property
    def blocks_of_group(self) -> tuple[int, ...]:
        """Block ids of group ``g`` are in ``[0, blocks_of_group[g])``; 0 where a group has no component here."""
        return tuple(
            min((c.num_blocks for c in self.components if c.group == g), default=0) for g in range(len(self.groups))
        )

    @cached_property
    def spans(self) -> Int64s:
        """Storage, offset and length of every region: int64 of shape ``[3, regions]``."""
        rows = [(place, span.offset, span.nbytes) for place, one in enumerate(self.storages) for span in one.spans]
        columns: Int64s = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
        return columns

    @cached_property
    def _extents(self) -> "dict[tuple[int, ...], Extents]":
        """By the bases of a binding, for :func:`extents_of`."""
        return {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)


class Binding(Record, frozen=True):
    """The absolute base address of each storage of one worker's placement."""

    bases: tuple[Offset, ...]


@dataclass(frozen=True, slots=True)
class BoundLayout:
    """One worker's layout, taken apart."""

    placement: Placement
    binding: Binding

    @property
    def regions(self) -> tuple[Region, ...]:
        """The registered regions, absolute."""
        return regions_of(self.placement, self.binding)


def bind_layout(layout: Layout) -> BoundLayout:
    """Check ``layout`` and take it apart. Raises :class:`PlanError`."""
    check_layout(layout)
    pools = _pools(layout)
    bases = tuple(pool[0].address for pool in pools)
    storages = tuple(_storage(pool) for pool in pools)
    placed = tuple(_place(component, bases) for component in layout.components)
    return BoundLayout(Placement(layout.groups, storages, placed), Binding(bases))


def regions_of(placement: Placement, binding: Binding) -> tuple[Region, ...]:
    """The regions that ``binding`` gives ``placement``; refused when their numbers differ."""
    check_binding(placement, binding)
    return tuple(
        Region(base + span.offset, span.nbytes, storage.memory)
        for storage, base in zip(placement.storages, binding.bases, strict=True)
        for span in storage.spans
    )


def check_binding(placement: Placement, binding: Binding) -> None:
    """Raise unless ``binding`` has one base for each storage of ``placement``, and the regions are disjoint there."""
    extents_of(placement, binding)


@dataclass(frozen=True, eq=False)
class Extents:
    """Registered regions ``[starts[i], stops[i])`` of one worker, ascending and disjoint."""

    starts: Int64s
    stops: Int64s
    bases: Int64s
    """Of the storages, in their order."""

    @cached_property
    def seams(self) -> Int64s:
        """Addresses where one region ends and the next begins at once: no descriptor may cross them."""
        touching: Int64s = self.starts[1:][self.stops[:-1] == self.starts[1:]]
        return touching


def extents_of(placement: Placement, binding: Binding) -> Extents:
    """Where the regions of ``placement`` are. Raises :class:`PlanError` when ``binding`` cannot be of that worker.

    Asked several times for each request, always of the same few workers, so the answers are remembered.
    """
    known = placement._extents
    found = known.get(binding.bases)
    if found is None:
        found = _extents(placement, binding)
        if len(known) >= EXTENTS_KEPT:
            known.clear()
        known[binding.bases] = found
    return found


def _extents(placement: Placement, binding: Binding) -> Extents:
    if len(binding.bases) != len(placement.storages):
        raise PlanError(
            PlanReason.INVALID_LAYOUT,
            f"the binding has {len(binding.bases)} bases, the placement {len(placement.storages)} storages: "
            "they are not of one worker",
        )
    storage, offset, nbytes = placement.spans
    bases = np.array(binding.bases, dtype=np.int64)
    bases.setflags(write=False)
    base = bases[storage]
    if (base > LIMIT - (offset + nbytes)).any():
        raise InvalidLayoutError("the binding has a region that reaches past 2**63 - 1")
    starts = base + offset
    order = np.argsort(starts)
    starts, stops = starts[order], (starts + nbytes)[order]
    twice = np.flatnonzero(stops[:-1] > starts[1:])
    if twice.size:
        first, second = ((int(starts[i]), int(stops[i])) for i in (twice[0], twice[0] + 1))
        raise InvalidLayoutError(f"the binding has regions {list(first)} and {list(second)}, which overlap")
    return Extents(starts, stops, bases)


def encode_placement(placement: Placement) -> bytes:
    """MessagePack; equal placements give equal bytes."""
    return msgspec.msgpack.encode(_PlacementForm(placement.groups, placement.storages, placement.placed))


def decode_placement(data: bytes) -> Placement:
    """Decode and check like any other layout; raises :class:`PlanError` on whatever a peer may have sent."""
    try:
        form = msgspec.msgpack.decode(data, type=_PlacementForm)
        bases: list[int] = []
        regions: list[Region] = []
        for storage in form.storages:
            bases.append(regions[-1].stop + 1 if regions else 0)
            regions += [Region(bases[-1] + s.offset, s.nbytes, storage.memory) for s in storage.spans]
        components = tuple(_unplace(placed, bases) for placed in form.placed)
    except (msgspec.DecodeError, PlanError, RecursionError) as error:
        raise InvalidLayoutError(f"a peer's placement does not decode: {error}") from error
    layout = Layout("peer", Parallel(0, 1, 0, 1, 0, 1), tuple(regions), form.groups, components)
    check_layout(layout)
    placement = Placement(form.groups, form.storages, form.placed)
    if bind_layout(layout).placement != placement:
        raise InvalidLayoutError("a peer's placement is not in canonical form: its storages can be taken apart")
    return placement


def _unplace(placed: Placed, bases: Sequence[int]) -> Component:
    if placed.storage >= len(bases):
        raise InvalidLayoutError(f"{placed.component.label}: storage {placed.storage} of {len(bases)}")
    component = placed.component
    return msgspec.structs.replace(component, address=component.address + bases[placed.storage])


def _pools(layout: Layout) -> list[list[Region]]:
    """Regions that share a storage: touching ones, and those that one component's address range spans."""
    pools: list[list[Area]] = []
    spans = sorted((c.address, c.stop) for c in layout.components)
    reach, at = -1, 0
    for area in areas_of(layout.regions):
        if pools and area.address < reach:
            pools[-1].append(area)
        else:
            pools.append([area])
        while at < len(spans) and spans[at][0] < area.stop:
            reach = max(reach, spans[at][1])
            at += 1
    return [[region for area in pool for region in area.regions] for pool in pools]


def _storage(regions: Sequence[Region]) -> Storage:
    base = regions[0].address
    memories = {region.memory for region in regions}
    if len(memories) != 1:
        raise PlanError(
            PlanReason.UNSUPPORTED,
            f"one component spans regions of {sorted(memories)}: register each memory's tensors on their own",
        )
    return Storage(memories.pop(), tuple(Span(r.address - base, r.nbytes) for r in regions))


def _place(component: Component, bases: Sequence[int]) -> Placed:
    storage = max(bisect_right(bases, component.address) - 1, 0)
    base = bases[storage] if bases else 0
    return Placed(storage, msgspec.structs.replace(component, address=component.address - base))
