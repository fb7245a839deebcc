"""Moving padding where that joins two live runs: an option of the library, never of ``kvferry plan``.

Two descriptors with the same gap between them on both sides may be one if nobody can miss the bytes in the gap. A
*frame* is what one block owns of a cluster of components whose address ranges meet: that is so where all of them have
one block stride and each block of all of them lies in one stretch of that size. A gap is harmless where

* it lies in one frame, or in two that follow each other, on both sides, so that it touches only blocks that the request
  lists: every byte that moves is of a listed block, and the two that enclose the gap say which blocks these are;
* at the consumer no component of the group that owns the block has a live byte in it, whoever writes that byte. Live
  bytes of *other* groups do not matter: they overlay the block, and a block id has one owner at a time;
* no region ends in it: only storages of one region are considered.

Padding lies between two live bytes with none between them, and each live byte is written once, so no two transfers
write the same padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Component, Loop, Placement, nest_of
from kvferry.layout.check import clusters_of
from kvferry.layout.nest import Int64s
from kvferry.plan.bind import Copies, Side, merge
from kvferry.plan.request import BlockTable

FRAME_RUNS_LIMIT = 100_000
"""Live runs of one block of one group that are looked at; a block with more keeps its gaps."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """Live bytes of one group in one frame: ``[starts[i], stops[i])`` from the frame's first byte on, ascending."""

    starts: Int64s
    stops: Int64s

    def misses(self, start: Int64s, stop: Int64s) -> Mask:
        """Which of the intervals ``[start, stop)`` hold no live byte."""
        first = np.searchsorted(self.stops, start, side="right")
        last = np.searchsorted(self.starts, stop, side="left")
        missed: Mask = np.greater_equal(first, last)
        return missed


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one cluster: block ``b`` owns ``[origin + b*stride, origin + (b+1)*stride)`` of ``storage``."""

    storage: int
    origin: int
    stop: int
    """One past the last live byte."""
    stride: int
    live: dict[int, Live]
    """By group."""


@dataclass(frozen=True, slots=True)
class Framed:
    """One worker and its frames."""

    side: Side
    frames: Sequence[Frames]


@dataclass(frozen=True, slots=True, eq=False)
class _Gaps:
    """Gaps ``[start, stop)`` between two descriptors in one cluster, as places in its frames."""

    first: Int64s
    """Block of the byte before the gap."""
    last: Int64s
    """Block of the byte after the gap."""
    start: Int64s
    """From the first byte of the frame of ``first``."""
    stop: Int64s
    """From the first byte of the frame of ``last``."""

    @property
    def near(self) -> Mask:
        """Which lie in one frame, or in two that follow each other."""
        near: Mask = np.less_equal(self.last - self.first, 1)
        return near


def frames_of(placement: Placement) -> tuple[Frames, ...]:
    """The frames of every cluster that has them; in order of (storage, address)."""
    found = []
    for storage, memory in enumerate(placement.storages):
        inside = [p.component for p in placement.placed if p.storage == storage]
        for cluster in clusters_of(inside) if len(memory.spans) == 1 else ():
            frames = _frames(storage, cluster)
            if frames is not None:
                found.append(frames)
    return tuple(found)


def bridge(copies: Copies, tables: Sequence[BlockTable], *, src: Framed, dst: Framed) -> Copies:
    """``copies`` (sorted by source) joined over every gap that is harmless; ``tables`` are the consumer's."""
    starts, ends = (copies.src[1:], copies.dst[1:]), (copies.src + copies.nbytes, copies.dst + copies.nbytes)
    gap = starts[0] - ends[0][:-1]
    # A gap of nothing on both sides would have been joined, so what is equal here is a gap.
    at = np.flatnonzero(starts[1] - ends[1][:-1] == gap)
    harmless = np.zeros(at.size, dtype=np.bool_)
    for where, frames, gaps in _by_cluster(dst, ends[1][at], starts[1][at]):
        harmless[where] = _is_padding(frames, gaps, tables)
    readable = np.zeros(at.size, dtype=np.bool_)
    for where, _, gaps in _by_cluster(src, ends[0][at], starts[0][at]):
        readable[where] = gaps.near
    follows = np.zeros(gap.size, dtype=np.bool_)
    follows[at] = harmless & readable
    return merge(copies, follows)


def _by_cluster(end: Framed, start: Int64s, stop: Int64s) -> Iterator[tuple[Int64s, Frames, _Gaps]]:
    """The gaps ``[start, stop)`` that lie inside a cluster with frames: their places, cluster by cluster."""
    for frames in end.frames:
        base = end.side.binding.bases[frames.storage]
        inside = np.flatnonzero((start > base + frames.origin) & (stop < base + frames.stop))
        if inside.size:
            before, after = (x[inside] - base - frames.origin for x in (start - 1, stop))
            first, last = before // frames.stride, after // frames.stride
            places = before + 1 - first * frames.stride, after - last * frames.stride
            yield inside, frames, _Gaps(first, last, *places)


def _is_padding(frames: Frames, gaps: _Gaps, tables: Sequence[BlockTable]) -> Mask:
    """Which gaps hold no live byte of the groups that own their blocks."""
    one_frame = gaps.first == gaps.last
    head = _misses(frames, gaps.first, part=(gaps.start, np.where(one_frame, gaps.stop, frames.stride)), tables=tables)
    tail = _misses(frames, gaps.last, part=(np.zeros_like(gaps.stop), gaps.stop), tables=tables)
    padding: Mask = gaps.near & head & (one_frame | tail)
    return padding


def _misses(frames: Frames, block: Int64s, *, part: tuple[Int64s, Int64s], tables: Sequence[BlockTable]) -> Mask:
    """Which parts of the frame of ``block`` hold no live byte of the group whose table lists the block."""
    found = np.zeros(block.size, dtype=np.bool_)
    for group, live in frames.live.items():
        owned = np.isin(block, tables[group].ids)
        found |= owned & live.misses(*part)
    return found


def _frames(storage: int, cluster: Sequence[Component]) -> Frames | None:
    origin = min(c.address for c in cluster)
    strides = {c.block_stride for c in cluster}
    if len(strides) > 1 or max(c.address + c.last_in_block for c in cluster) - origin > min(strides):
        return None
    live: dict[int, Live] = {}
    for group in sorted({c.group for c in cluster}):
        found = _live([c for c in cluster if c.group == group], origin)
        if found is None:
            return None
        live[group] = found
    return Frames(storage, origin, max(c.stop for c in cluster), strides.pop(), live)


def _live(members: Sequence[Component], origin: int) -> Live | None:
    nests = [
        nest_of([Loop(c.pages, c.page_stride), *(Loop(a.count, a.stride) for a in c.axes)], c.content.nbytes)
        for c in members
    ]
    if sum(nest.runs for nest in nests) > FRAME_RUNS_LIMIT:
        return None
    starts = np.concatenate([c.address - origin + n.offsets() for c, n in zip(members, nests, strict=True)])
    stops = starts + np.repeat([n.run for n in nests], [n.runs for n in nests])
    order = np.argsort(starts, kind="stable")
    return Live(starts[order], stops[order])
