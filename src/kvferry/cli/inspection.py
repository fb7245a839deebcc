"""What ``kvferry inspect`` says of one layout: sums over frames, groups and sets of equal layers, as plain records.

*Live* bytes are those that some coordinate reaches; *padded* bytes are all that is set aside for a block, live or not.
A group's padded bytes count every frame that the group has a component in, whole: while the group owns a block of a
shared frame, no one else can use the rest of it.
"""

from collections.abc import Sequence

import msgspec

from kvferry.cli.frames import Frame, frames_of
from kvferry.cli.layers import Alike, alike, axes_of, pattern_of
from kvferry.cli.sides import Worker
from kvferry.layout import Component, Group, Layout, Placement

INSPECT_FORMAT = "kvferry.inspect/1"


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """One group, over all its components."""

    group: int
    kind: str
    block_tokens: int
    sliding_window: int | None
    chunk: int | None
    context_parallel: str | None
    blocks: int
    layers: int
    components: int
    live_bytes_per_block: int
    padded_bytes_per_block: float
    live_bytes_per_token: float | None
    """None for a state, whose block is one for the whole request."""
    padded_bytes_per_token: float | None
    live_bytes_per_1000_tokens: float | None
    padded_bytes_per_1000_tokens: float | None
    overlays: tuple[int, ...]
    """Other groups that own blocks of the same storage in turn."""


class ComponentReport(msgspec.Struct, frozen=True, kw_only=True):
    """Equal components of several layers; the numbers are those of one layer."""

    layers: str
    layer_names: tuple[str, ...]
    pattern: str
    component: str
    group: int
    optional: bool
    holds: str
    content_bytes: int
    content_type: str
    pages: int
    page_live_bytes: int
    page_stride: int
    live_bytes_per_block: int
    padded_bytes_per_block: float
    """Of the whole frame, which other components may share."""
    live_bytes_per_token: float | None
    shares_frame: bool


class StorageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Regions whose relative position matters, and how much of them is reached."""

    memory: str
    regions: tuple[tuple[int, int], ...]
    """(address, bytes) of each."""
    total_bytes: int
    live_bytes: int | None
    """What any component of any block reaches; None when that is too much to enumerate."""

    @property
    def coverage(self) -> float | None:
        return None if self.live_bytes is None else self.live_bytes / self.total_bytes


class LayoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``inspect`` says."""

    format: str = INSPECT_FORMAT
    engine_id: str
    parallel: str
    fingerprint: str | None
    """None for a placement file, which names no memory."""
    groups: tuple[GroupReport, ...]
    components: tuple[ComponentReport, ...]
    storages: tuple[StorageReport, ...]


def report_of(worker: Worker) -> LayoutReport:
    """Sum up one layout."""
    layout, placement = worker.layout, worker.bound.placement
    frames = frames_of(layout)
    return LayoutReport(
        engine_id=layout.engine_id,
        parallel=_parallel(layout),
        fingerprint=None if worker.is_placement else str(placement.fingerprint),
        groups=tuple(_group(number, placement, frames) for number in range(len(layout.groups))),
        components=tuple(_component(same, layout, frames) for same in alike(layout.components)),
        storages=() if worker.is_placement else _storages(worker, frames),
    )


def _parallel(layout: Layout) -> str:
    p = layout.parallel
    ranks = (("tensor", p.tp_rank, p.tp_size), ("pipeline", p.pp_rank, p.pp_size), ("context", p.pcp_rank, p.pcp_size))
    return ", ".join(f"{kind} rank {rank} of {size}" for kind, rank, size in ranks if size > 1) or "one rank"


def _group(number: int, placement: Placement, frames: Sequence[Frame]) -> GroupReport:
    group = placement.groups[number]
    members = [c for c in placement.components if c.group == number]
    mine = [frame for frame in frames if number in frame.groups]
    live = sum(frame.live_in_block(number) for frame in mine)
    padded = sum(_share(frame, number) for frame in mine)
    share = group.share
    return GroupReport(
        group=number,
        kind=group.kind,
        block_tokens=group.block_tokens,
        sliding_window=group.sliding_window,
        chunk=group.chunk,
        context_parallel=f"rank {share.rank} of {share.size}, {share.interleave} at a time" if share else None,
        blocks=placement.blocks_of_group[number],
        layers=len({c.layer for c in members}),
        components=len(members),
        live_bytes_per_block=live,
        padded_bytes_per_block=padded,
        live_bytes_per_token=_per_tokens(live, group, 1),
        padded_bytes_per_token=_per_tokens(padded, group, 1),
        live_bytes_per_1000_tokens=_per_tokens(live, group, 1000),
        padded_bytes_per_1000_tokens=_per_tokens(padded, group, 1000),
        overlays=tuple(g for overlay in placement.overlays if number in overlay for g in overlay if g != number),
    )


def _share(frame: Frame, group: int) -> float:
    """Bytes set aside for one block of ``group``; where strides differ, those of the group's own."""
    if frame.is_framed or len({c.block_stride for c in frame.components}) == 1:
        return frame.held_in_block()
    return sum(max(c.live_bytes, min(c.block_stride, c.last_in_block)) for c in frame.of_group(group))


def _per_tokens(nbytes: float, group: Group, tokens: int) -> float | None:
    return None if group.kind == "state" else nbytes * tokens / group.entry_tokens


def _component(same: Alike, layout: Layout, frames: Sequence[Frame]) -> ComponentReport:
    one = same.first
    frame = next(f for f in frames if one in f.components)
    return ComponentReport(
        layers=same.layers,
        layer_names=tuple(c.layer for c in same.members),
        pattern=pattern_of(one),
        component=one.component,
        group=one.group,
        optional=one.optional,
        holds=axes_of(one),
        content_bytes=one.content.nbytes,
        content_type=one.content.type,
        pages=one.pages,
        page_live_bytes=one.live_bytes // one.pages,
        page_stride=one.page_stride if one.pages > 1 else 0,
        live_bytes_per_block=one.live_bytes,
        padded_bytes_per_block=_share(frame, one.group),
        live_bytes_per_token=_per_tokens(one.live_bytes, layout.groups[one.group], 1),
        shares_frame=len(frame.components) > 1,
    )


def _storages(worker: Worker, frames: Sequence[Frame]) -> tuple[StorageReport, ...]:
    bases = worker.bound.binding.bases
    inside: list[list[Frame]] = [[] for _ in bases]
    storage_of = {(p.component.layer, p.component.component): p.storage for p in worker.bound.placement.placed}
    for frame in frames:
        inside[storage_of[frame.components[0].key]].append(frame)
    return tuple(
        StorageReport(
            memory=storage.memory,
            regions=tuple((base + span.offset, span.nbytes) for span in storage.spans),
            total_bytes=sum(span.nbytes for span in storage.spans),
            live_bytes=_live(held),
        )
        for storage, base, held in zip(worker.bound.placement.storages, bases, inside, strict=True)
    )


def _live(frames: Sequence[Frame]) -> int | None:
    known = [frame.live_union() for frame in frames]
    return None if None in known else sum(n for n in known if n is not None)


def colour_key(component: Component) -> tuple[int, str]:
    """Components with one key have one colour in every picture of a layout."""
    return (component.group, component.component)
