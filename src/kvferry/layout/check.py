"""What a layout must fulfil beyond its single records: consistency, the memory rule, the regions.

The memory rule: the bytes of component ``c`` in block ``b`` and of ``c'`` in ``b'`` are disjoint, unless
``(c, b) = (c', b')``, or their groups differ and ``b = b'``. It is proven in four steps, each cheaper than the next:

1. no two coordinates of one component share a byte: by the strides alone (:attr:`Nest.is_nested`), else by sorting;
2. components whose address ranges do not meet cannot collide: ranges that meet form a *cluster*;
3. a cluster with one block stride whose blocks each lie in one frame of that size: blocks cannot meet each other, so
   one block is looked at, group by group: by ranges, else by sorting the runs of that block;
4. any other cluster: all runs of all blocks, sorted, group by group and then each pair of groups.

The size of what is enumerated is bounded; a layout past it is refused as ``unsupported``, never accepted unproven.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from msgspec import UNSET

from kvferry.errors import PlanError, PlanReason
from kvferry.layout.nest import Int64s, Loop, Nest, nest_of
from kvferry.layout.records import LIMIT, Component, InvalidLayoutError, Layout, Region

ENUMERATION_LIMIT = 4_000_000
"""Runs that one check may enumerate: about 0.3 s and 100 MB."""


def check_layout(layout: Layout) -> None:
    """Raise :class:`PlanError` unless ``layout`` is consistent, obeys the memory rule and lies in its regions."""
    check_consistency(layout)
    # Bytes that lie in two memories are refused where storages are made, by another name.
    areas = areas_of(layout.regions, across_memories=True)
    for component in layout.components:
        if layout.regions:
            _check_inside(component, areas)
        _check_self(component)
    for cluster in clusters_of(layout.components):
        _check_cluster(cluster)


def check_consistency(layout: Layout) -> None:
    """Everything that two records can contradict each other in, memory apart."""
    seen: set[tuple[str, str]] = set()
    for place, component in enumerate(layout.components):
        where = f"components[{place}] ({component.label})"
        if component.key in seen:
            raise InvalidLayoutError(f"{where} is listed twice: (layer, component) is unique in a file")
        seen.add(component.key)
        if component.group >= len(layout.groups):
            raise InvalidLayoutError(f"{where}: group {component.group}, but there are {len(layout.groups)} groups")
        if component.stop > LIMIT:
            raise InvalidLayoutError(f"{where} reaches to byte {component.stop}, past 2**63 - 1")
        if layout.groups[component.group].kind == "state":
            _check_state(component, where)
        else:
            _check_attention(component, layout, where)


def _check_state(component: Component, where: str) -> None:
    if component.token_axis is not None:
        raise InvalidLayoutError(f"{where}: a state has no token axis")
    if component.pages != 1:
        raise InvalidLayoutError(f"{where}: a state component has kernel_blocks 1, not {component.kernel_blocks}")


def _check_attention(component: Component, layout: Layout, where: str) -> None:
    for field in ("kernel_blocks", "kernel_stride", "tokens_per_row"):
        if getattr(component, field) is UNSET:
            raise InvalidLayoutError(f"{where}: {field} is missing")
    if component.pages > 1 and component.page_stride < 1:
        raise InvalidLayoutError(f"{where}: kernel_stride is 0 with kernel_blocks {component.pages}")
    token = component.token_axis
    if token is None:
        raise InvalidLayoutError(f"{where}: no token axis; every component of an attention group has one")
    if token.start != 0 or token.count != token.total:
        raise InvalidLayoutError(
            f"{where}: the token axis is local: start 0 and count = total, "
            f"not start {token.start}, count {token.count}, total {token.total}"
        )
    group = layout.groups[component.group]
    tokens = token.count * component.row_tokens * component.pages
    if tokens != group.block_tokens:
        raise InvalidLayoutError(
            f"{where}: token count {token.count} x tokens_per_row {component.row_tokens} x kernel_blocks "
            f"{component.pages} = {tokens}, but block_tokens of group {component.group} is {group.block_tokens}"
        )
    share = group.context_parallel
    if share is not None and share.interleave % component.row_tokens:
        raise InvalidLayoutError(
            f"{where}: context_parallel interleave {share.interleave} is no multiple of "
            f"tokens_per_row {component.row_tokens}"
        )


# ---------------------------------------------------------------------------------------------------- regions


@dataclass(frozen=True, slots=True)
class Area:
    """A maximal run of touching regions, in order of address."""

    regions: tuple[Region, ...]

    @property
    def address(self) -> int:
        return self.regions[0].address

    @property
    def stop(self) -> int:
        return self.regions[-1].stop


def areas_of(regions: Sequence[Region], *, across_memories: bool = False) -> tuple[Area, ...]:
    """Touching regions (of one memory) joined, in order of address; regions that overlap are refused."""
    areas: list[list[Region]] = []
    for region in sorted(regions, key=lambda r: r.address):
        last = areas[-1][-1] if areas else None
        if last is not None and region.address < last.stop:
            raise InvalidLayoutError(
                f"regions [{last.address}, {last.stop}) and [{region.address}, {region.stop}) overlap: "
                "regions are disjoint"
            )
        touches = last is not None and region.address == last.stop
        if touches and (across_memories or region.memory == areas[-1][-1].memory):
            areas[-1].append(region)
        else:
            areas.append([region])
    return tuple(Area(tuple(area)) for area in areas)


def _check_inside(component: Component, areas: Sequence[Area]) -> None:
    last = bisect_right(areas, component.address, key=lambda area: area.address) - 1
    if last >= 0 and component.stop <= areas[last].stop:
        return
    nest = nest_of(_loops(component, with_blocks=True), component.content.nbytes)
    _bounded(nest.runs, component)
    starts = component.address + nest.offsets()
    lows = np.array([area.address for area in areas], dtype=np.int64)
    highs = np.array([area.stop for area in areas], dtype=np.int64)
    place = np.searchsorted(lows, starts, side="right") - 1
    outside = (place < 0) | (starts + nest.run > highs[np.maximum(place, 0)])
    if outside.any():
        first = int(starts[outside].min())
        raise PlanError(
            PlanReason.OUTSIDE_REGION,
            f"{component.label} spans [{component.address}, {component.stop}); its bytes "
            f"[{first}, {first + nest.run}) lie in no registered region "
            f"({', '.join(f'[{a.address}, {a.stop})' for a in areas[:4])}{', ...' if len(areas) > 4 else ''}): "
            "register the whole tensor, or correct address, num_blocks or strides",
        )


# ------------------------------------------------------------------------------------------------ memory rule


def clusters_of(components: Sequence[Component]) -> tuple[tuple[Component, ...], ...]:
    """Components whose address ranges (first to last live byte over all blocks) meet, transitively."""
    clusters: list[list[Component]] = []
    reach = -1
    for component in sorted(components, key=lambda c: (c.address, c.stop)):
        if clusters and component.address < reach:
            clusters[-1].append(component)
            reach = max(reach, component.stop)
        else:
            clusters.append([component])
            reach = component.stop
    return tuple(tuple(cluster) for cluster in clusters)


def _loops(component: Component, *, with_blocks: bool) -> list[Loop]:
    loops = [Loop(axis.count, axis.stride) for axis in component.axes]
    loops.append(Loop(component.pages, component.page_stride))
    if with_blocks:
        loops.append(Loop(component.num_blocks, component.block_stride))
    return loops


def _bounded(runs: int, component: Component) -> None:
    if runs > ENUMERATION_LIMIT:
        raise PlanError(
            PlanReason.UNSUPPORTED,
            f"{component.label}: proving its memory would enumerate {runs} runs, over {ENUMERATION_LIMIT}: "
            "its strides do not nest",
        )


def _check_self(component: Component) -> None:
    nest = nest_of(_loops(component, with_blocks=True), component.content.nbytes)
    if nest.is_nested:
        return
    for loop in nest.loops:
        if loop.stride < nest.run:
            _overlap(component, component, f"a stride of {loop.stride} below a run of {nest.run} bytes")
    _bounded(nest.runs, component)
    starts = np.sort(nest.offsets())
    short = np.flatnonzero(np.diff(starts) < nest.run)
    if short.size:
        _overlap(component, component, f"byte {component.address + int(starts[short[0] + 1])} is held twice")


def _overlap(one: Component, other: Component, what: str) -> None:
    where = one.label if one is other else f"{one.label} and {other.label}"
    length, stride = one.last_in_block, one.block_stride
    hint = f"; transfer length {length} exceeds block stride {stride}" if one is other and length > stride else ""
    raise PlanError(
        PlanReason.OVERLAPPING_MEMORY,
        f"{where}: {what}{hint}: no two of (block, kernel block, coordinates, byte) may lie on one byte; "
        "correct the strides or the counts",
    )


def _check_cluster(cluster: Sequence[Component]) -> None:
    if len(cluster) == 1:
        return
    origin = min(c.address for c in cluster)
    strides = {c.block_stride for c in cluster}
    frame = max(c.address + c.last_in_block for c in cluster) - origin
    framed = len(strides) == 1 and frame <= min(strides)
    by_group: dict[int, list[Component]] = {}
    for component in cluster:
        by_group.setdefault(component.group, []).append(component)
    if framed:
        for members in by_group.values():
            _check_one_block(members)
        return
    covers = [_cover(members, with_blocks=True) for members in by_group.values()]
    for cover in covers:
        _check_disjoint(cover)
    for one, other in combinations(covers, 2):
        _check_same_block(one, other)


def _check_one_block(members: Sequence[Component]) -> None:
    ranges = sorted(members, key=lambda c: c.address)
    if all(a.address + a.last_in_block <= b.address for a, b in pairwise(ranges)):
        return
    _check_disjoint(_cover(members, with_blocks=False))


@dataclass(frozen=True, slots=True)
class _Cover:
    """Runs of one group in order of address; ``owner`` indexes ``members``."""

    members: tuple[Component, ...]
    starts: Int64s
    stops: Int64s
    owner: Int64s
    block: Int64s


def _cover(members: Sequence[Component], *, with_blocks: bool) -> _Cover:
    nests = [nest_of(_loops(c, with_blocks=False), c.content.nbytes) for c in members]
    total = sum(n.runs * (c.num_blocks if with_blocks else 1) for n, c in zip(nests, members, strict=True))
    _bounded(total, members[0])
    starts, stops, owner, block = [], [], [], []
    for place, (nest, component) in enumerate(zip(nests, members, strict=True)):
        first = _starts(component, nest, with_blocks=with_blocks)
        starts.append(first.ravel())
        stops.append(first.ravel() + nest.run)
        owner.append(np.full(first.size, place, dtype=np.int64))
        block.append(np.repeat(np.arange(first.shape[0], dtype=np.int64), first.shape[1]))
    order = np.argsort(np.concatenate(starts), kind="stable")
    columns = (np.concatenate(column)[order] for column in (starts, stops, owner, block))
    return _Cover(tuple(members), *columns)


def _starts(component: Component, nest: Nest, *, with_blocks: bool) -> Int64s:
    blocks = np.arange(component.num_blocks if with_blocks else 1, dtype=np.int64) * component.block_stride
    return component.address + blocks[:, None] + nest.offsets()[None, :]


def _check_disjoint(cover: _Cover) -> None:
    bad = np.flatnonzero(cover.stops[:-1] > cover.starts[1:])
    if bad.size:
        at = int(bad[0])
        one, other = (cover.members[int(cover.owner[i])] for i in (at, at + 1))
        _overlap(one, other, f"byte {int(cover.starts[at + 1])} belongs to blocks "
                 f"{int(cover.block[at])} and {int(cover.block[at + 1])} of group {one.group}")  # fmt: skip


def _check_same_block(one: _Cover, other: _Cover) -> None:
    """Where runs of two groups meet, both must belong to the block of one number.

    Runs within each cover are disjoint and sorted, so the runs of ``other`` that meet run ``i`` of ``one`` are the
    slice ``[first[i], last[i])``; all of it has the right block if its first does and the block changes nowhere in it.
    """
    first = np.searchsorted(other.stops, one.starts, side="right")
    last = np.searchsorted(other.starts, one.stops, side="left")
    meets = np.flatnonzero(first < last)
    changes = np.concatenate([[0], np.cumsum(np.diff(other.block) != 0)])
    lo, hi = first[meets], last[meets] - 1
    bad = (other.block[lo] != one.block[meets]) | (changes[lo] != changes[hi])
    if bad.any():
        at = int(meets[np.flatnonzero(bad)[0]])
        mine, theirs = one.members[int(one.owner[at])], other.members[int(other.owner[first[at]])]
        _overlap(mine, theirs, f"groups {mine.group} and {theirs.group} share byte "
                 f"{int(max(one.starts[at], other.starts[first[at]]))} in different blocks")  # fmt: skip
