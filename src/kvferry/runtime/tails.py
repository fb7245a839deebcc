"""What lies around a prompt's positions in its blocks, for a consumer that expects whole blocks.

A transfer moves positions and nothing else. A kvferry consumer clears what no transfer writes; vLLM's own connector
expects its producer to write whole blocks, and vLLM leaves the blocks of a load as they were. Attention masks what is
behind the last position, and before a window's first one, but a masked NaN still spoils the sum; and where a block held
a recurrent state before, or keys and values of another precision, its bytes read as these keys and values may well be
NaN. So where vLLM clears the blocks it gives out (:attr:`~kvferry.runtime.upstream_caches.OwnCaches.whole_blocks`:
beside a state, and where layers differ in precision) such a consumer is sent the rest of its blocks too: at the
producer vLLM has cleared it, or it holds what was computed.

The rest is some requests like any other, planned and proven: one for all groups that keep everything, and of a group
with a window, which would be cut to the window again, one for each run that is no longer than it. What two of them
write is written once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Group
from kvferry.plan import BlockTable, Descriptors, Plan, TransferRequest


def rests_of(request: TransferRequest, plan: Plan) -> Iterator[TransferRequest]:
    """The positions around those of ``request`` for which the blocks of both sides have room."""
    groups = plan.consumer_side.groups
    plain = [place for place, group in enumerate(groups) if group.kind == "attention" and not _is_cut(group)]
    yield from _runs(request, plan, places=plain, cut=None)
    for place, group in enumerate(groups):
        if group.kind == "attention" and _is_cut(group):
            yield from _runs(request, plan, places=[place], cut=group)


def _runs(
    request: TransferRequest, plan: Plan, *, places: Sequence[int], cut: Group | None
) -> Iterator[TransferRequest]:
    """Of these groups alone; ``cut``: the one group that they are, where only some of its positions are kept."""
    sides = ((plan.producer_side.groups, request.producer), (plan.consumer_side.groups, request.consumer))
    spans = [span for groups, tables in sides for place in places for span in _held(groups[place], tables[place])]
    if not spans:
        return
    runs = [(request.stop, min(stop for _, stop in spans))]
    if cut is not None:
        runs.append((max(request.start, *(start for start, _ in spans)), _first_needed(cut, request)))
    alone = tuple(table if place in places else BlockTable.empty() for place, table in enumerate(request.consumer))
    for low, high in runs:
        for start, stop in _pieces(low, high, cut):
            yield replace(request, start=start, stop=stop, consumer=alone)


def _held(group: Group, table: BlockTable) -> Iterator[tuple[int, int]]:
    """The positions from the first block of a table to behind the last one; none where it has none."""
    kept = np.flatnonzero(table.held)
    if table.first_token is not None and kept.size:
        yield (
            table.first_token + int(kept[0]) * group.entry_tokens,
            (table.first_token + int(kept[-1] + 1) * group.entry_tokens),
        )


def _is_cut(group: Group) -> bool:
    return group.sliding_window is not None or group.chunk is not None


def _first_needed(group: Group, request: TransferRequest) -> int:
    """Where the positions of a request begin in a group with a window, or chunks."""
    first = request.start if group.sliding_window is None else max(request.start, request.stop - group.sliding_window)
    return first if group.chunk is None else max(first, max(0, request.stop - 1) // group.chunk * group.chunk)


def _pieces(low: int, high: int, group: Group | None) -> Iterator[tuple[int, int]]:
    """``[low, high)`` in runs of which nothing is cut off.

    >>> list(_pieces(10, 30, Group("attention", 64, sliding_window=8)))
    [(10, 18), (18, 26), (26, 30)]
    """
    while low < high:
        stop = high
        if group is not None and group.sliding_window is not None:
            stop = min(stop, low + group.sliding_window)
        if group is not None and group.chunk is not None:
            stop = min(stop, (low // group.chunk + 1) * group.chunk)
        yield low, stop
        low = stop


def joined(first: Descriptors, rest: Descriptors) -> Descriptors:
    """The copies of both, each byte once: either may write what the other does, since a plan writes some rows along.

    >>> both = joined(Descriptors.of([0, 64], [512, 640], [8, 8]), Descriptors.of([4, 64], [516, 640], [8, 8]))
    >>> both.src.tolist(), both.dst.tolist(), both.nbytes.tolist()
    ([0, 64], [512, 640], [12, 8])
    """
    src, dst, nbytes = (np.concatenate([getattr(one, name) for one in (first, rest)]) for name in _COLUMNS)
    if not dst.size:
        return first
    order = np.argsort(dst, kind="stable")
    src, dst, nbytes = src[order], dst[order], nbytes[order]
    ends = np.maximum.accumulate(dst + nbytes)
    apart = dst[1:] > ends[:-1]
    alike = (src - dst)[1:] == (src - dst)[:-1]
    if (~apart & ~alike & (dst[1:] < ends[:-1])).any():
        raise PlanError(PlanReason.OVERLAPPING_MEMORY, "a prompt and the rest of its blocks are read apart")
    starts = np.flatnonzero(np.concatenate([[True], apart | ~alike]))
    last = np.concatenate([starts[1:], [dst.size]]) - 1
    return Descriptors.proven(src[starts], dst[starts], ends[last] - dst[starts])


_COLUMNS: Final = ("src", "dst", "nbytes")
