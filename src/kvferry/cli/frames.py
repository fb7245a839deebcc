"""Frames: the stretch of memory that one block occupies, and who holds what of it.

Components whose address ranges meet share a *frame*: with one block stride, block ``b`` of all of them lies in
``[origin + b * stride, origin + (b + 1) * stride)``. Groups that overlay one storage share a frame and own its blocks
in turn. Where a block is spread out instead (pages of one head of all blocks together, as in LHBNC), there is no frame
of a block, and only the sums over all blocks are told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.layout import Component, Layout, Loop, Nest, nest_of
from kvferry.layout.check import ENUMERATION_LIMIT, clusters_of
from kvferry.layout.nest import Int64s


@dataclass(frozen=True)
class Frame:
    """Components that share a stretch of memory; in order of the file."""

    components: tuple[Component, ...]

    @cached_property
    def origin(self) -> int:
        """Address of the first live byte of block 0."""
        return min(c.address for c in self.components)

    @cached_property
    def stride(self) -> int:
        """Bytes from one block to the next (of the widest stride, where they differ)."""
        return max(c.block_stride for c in self.components)

    @cached_property
    def num_blocks(self) -> int:
        return max(c.num_blocks for c in self.components)

    @cached_property
    def is_framed(self) -> bool:
        """Whether every block lies in one stretch of ``stride`` bytes of its own."""
        reach = max(c.address + c.last_in_block for c in self.components) - self.origin
        return len({c.block_stride for c in self.components}) == 1 and reach <= self.stride

    @cached_property
    def held_bytes(self) -> int:
        """Bytes from the first byte of block 0 to the end of the last block's place."""
        if not self.is_framed:
            return max(c.stop for c in self.components) - self.origin
        return max(self.num_blocks * self.stride, max(c.stop for c in self.components) - self.origin)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        return tuple(sorted({c.group for c in self.components}))

    def of_group(self, group: int) -> tuple[Component, ...]:
        return tuple(c for c in self.components if c.group == group)

    def live_in_block(self, group: int) -> int:
        """Live bytes of one block when ``group`` owns it."""
        return sum(c.live_bytes for c in self.of_group(group))

    def held_in_block(self) -> float:
        """Bytes set aside for one block, padding included."""
        return self.stride if self.is_framed else self.held_bytes / self.num_blocks

    def live_union(self) -> int | None:
        """Bytes that any group's components reach, over all blocks; None when that is too much to enumerate."""
        nests = [(c.address, _nest(c, with_blocks=not self.is_framed)) for c in self.components]
        if sum(nest.runs for _, nest in nests) > ENUMERATION_LIMIT:
            return None
        starts = np.concatenate([address - self.origin + nest.offsets() for address, nest in nests])
        stops = starts + np.concatenate([np.full(nest.runs, nest.run, dtype=np.int64) for _, nest in nests])
        once = _covered(starts, stops)
        return once * self.num_blocks if self.is_framed else once


def frames_of(layout: Layout) -> tuple[Frame, ...]:
    """All frames of a layout, in order of address."""
    place = {id(c): i for i, c in enumerate(layout.components)}
    return tuple(
        Frame(tuple(sorted(cluster, key=lambda c: place[id(c)]))) for cluster in clusters_of(layout.components)
    )


def loops_in_block(component: Component) -> list[Loop]:
    """Loops over everything that one block holds of ``component``."""
    return [*(Loop(a.count, a.stride) for a in component.axes), Loop(component.pages, component.page_stride)]


def _nest(component: Component, *, with_blocks: bool) -> Nest:
    loops = loops_in_block(component)
    if with_blocks:
        loops.append(Loop(component.num_blocks, component.block_stride))
    return nest_of(loops, component.content.nbytes)


def spans_in_block(component: Component, finest: float) -> Sequence[tuple[int, int]]:
    """(offset, length) of what one block holds, gaps below ``finest`` bytes closed: for drawing.

    Offsets count from the component's first byte in the block; loops are kept from the widest inwards while one step
    is wide enough to be seen.
    """
    nest = nest_of(loops_in_block(component), component.content.nbytes)
    run = nest.run
    kept: list[Loop] = []
    for loop in nest.loops:
        if loop.stride < finest and not kept:
            run += (loop.count - 1) * loop.stride
        else:
            kept.append(loop)
    return [(int(offset), run) for offset in np.sort(Nest(tuple(kept), run).offsets())]


def _covered(starts: Int64s, stops: Int64s) -> int:
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    before = np.concatenate([[starts[0]], stops[:-1]])
    return int(np.maximum(0, stops - np.maximum(starts, before)).sum())
