"""Moving padding where that joins two live runs: an option of the library, never of ``kvferry plan``.

Two rows of one unit with the same gap between them on both sides may be one run if nobody can miss the bytes in the
gap. That is so where the unit is a whole block on both sides, the block owns its frame (the components whose ranges
meet have one block stride and lie in one frame of that size), and no component of the consumer's group has a live byte
in the gap. Live bytes of *other* groups do not matter: they overlay the block, and a block id has one owner at a time.
The gap never reaches past the frame, since it lies between two live runs of the block, and never out of a region, since
only storages of one region are considered.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Loop, Placement, nest_of
from kvferry.layout.check import clusters_of
from kvferry.layout.nest import Int64s
from kvferry.plan.pair import ONE_PLACE, ClassPlan
from kvferry.plan.strands import Rows

FRAME_RUNS_LIMIT = 100_000
"""Live runs of one block that are looked at; a block with more keeps its gaps."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Live bytes of one group in one block of one storage: ``[starts[i], stops[i])``, ascending, joined."""

    starts: Int64s
    stops: Int64s


def bridged_rows(plan: ClassPlan, src: Placement, dst: Placement) -> Rows:
    """The rows of a full unit of ``plan``, joined over padding where that is harmless."""
    rows, key = plan.full, plan.key
    if rows.count < 2 or key.src.unit_map != ONE_PLACE or key.dst.unit_map != ONE_PLACE:
        return rows
    follows = (rows.src_storage[1:] == rows.src_storage[:-1]) & (rows.dst_storage[1:] == rows.dst_storage[:-1])
    gap_at = rows.dst[:-1] + rows.nbytes[:-1]
    gap = rows.dst[1:] - gap_at
    follows &= (gap > 0) & (rows.src[1:] - rows.src[:-1] - rows.nbytes[:-1] == gap)
    for storage in np.unique(rows.src_storage).tolist():
        if _frame(src, storage, key.src.group) is None:
            follows &= rows.src_storage[1:] != storage
    for storage in np.unique(rows.dst_storage).tolist():
        here = rows.dst_storage[1:] == storage
        frame = _frame(dst, storage, key.dst.group)
        follows &= ~here if frame is None else ~here | _is_padding(frame, gap_at, gap_at + gap)
    if not follows.any():
        return rows
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    tails = np.concatenate([heads[1:] - 1, [rows.count - 1]])
    return Rows(
        rows.src_storage[heads],
        rows.src[heads],
        rows.dst_storage[heads],
        rows.dst[heads],
        rows.src[tails] + rows.nbytes[tails] - rows.src[heads],
    )


def _is_padding(frame: Frame, start: Int64s, stop: Int64s) -> NDArray[np.bool_]:
    """Boolean mask of the gaps ``[start, stop)`` that meet no live byte."""
    first = np.searchsorted(frame.stops, start, side="right")
    last = np.searchsorted(frame.starts, stop, side="left")
    return np.greater_equal(first, last)


def _frame(placement: Placement, storage: int, group: int) -> Frame | None:
    """Live bytes of ``group`` in block 0 of ``storage``; None where a block does not own one frame."""
    if len(placement.storages[storage].spans) != 1:
        return None
    inside = [p.component for p in placement.placed if p.storage == storage]
    starts: list[Int64s] = []
    stops: list[Int64s] = []
    for cluster in clusters_of(inside):
        if all(c.group != group for c in cluster):
            continue
        origin = min(c.address for c in cluster)
        strides = {c.block_stride for c in cluster}
        if len(strides) > 1 or max(c.address + c.last_in_block for c in cluster) - origin > min(strides):
            return None
        for component in cluster:
            if component.group == group:
                loops = [
                    Loop(component.pages, component.page_stride),
                    *(Loop(a.count, a.stride) for a in component.axes),
                ]
                nest = nest_of(loops, component.content.nbytes)
                if nest.runs > FRAME_RUNS_LIMIT:
                    return None
                starts.append(component.address + nest.offsets())
                stops.append(starts[-1] + nest.run)
    order = np.argsort(np.concatenate(starts), kind="stable")
    return Frame(np.concatenate(starts)[order], np.concatenate(stops)[order])
