"""Which positions of a fetch have arrived from one producer rank: parts are counted by position, never by number.

For each cache group a sorted list of disjoint ranges. A part of a later epoch voids all of an earlier one (the
prompt was computed again), a part of an earlier epoch is ignored. Parts may overlap, repeat and come in any order.
"""

from bisect import bisect_left, bisect_right

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.protocol.messages import PartDone
from kvferry.protocol.values import Span

MAX_RANGES = 4096
"""Disjoint ranges of one group; a producer whose parts are more scattered than this is not sending chunks."""


class Coverage:
    """The arrived positions of one pull."""

    def __init__(self, span: Span, *, groups: int) -> None:
        self._span = span
        self._epoch = 0
        self._groups = groups
        self._ranges: list[list[tuple[int, int]]] = []
        self._seen = [False] * groups
        self._restart(0)

    @property
    def complete(self) -> bool:
        """Every position has arrived in every group; an empty span is complete once a part has said so."""
        whole = [(self._span.start, self._span.stop)]
        if self._span.start == self._span.stop:
            return all(self._seen)
        return all(ranges == whole for ranges in self._ranges)

    def add(self, part: PartDone) -> None:
        """Count one part in; raises :class:`RemoteProtocolError` when it is outside what was asked for."""
        groups = range(self._groups) if part.groups is None else part.groups
        if not self._span.start <= part.start <= part.stop <= self._span.stop:
            raise _malformed(f"part [{part.start}, {part.stop}) of a pull for [{self._span.start}, {self._span.stop})")
        if any(group >= self._groups for group in groups):
            raise _malformed(f"part of group {max(groups)}, there are {self._groups}")
        if part.epoch < self._epoch:
            return
        if part.epoch > self._epoch:
            self._restart(part.epoch)
        for group in groups:
            self._seen[group] = True
            if part.start < part.stop:
                self._ranges[group] = _joined(self._ranges[group], part.start, part.stop)

    def _restart(self, epoch: int) -> None:
        self._epoch = epoch
        self._seen = [False] * self._groups
        self._ranges = [[] for _ in range(self._groups)]


def _joined(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The union of sorted disjoint ranges and one more; touching ranges join."""
    first = bisect_left(ranges, start, key=lambda one: one[1])
    last = bisect_right(ranges, stop, key=lambda one: one[0])
    if first < last:
        start = min(start, ranges[first][0])
        stop = max(stop, ranges[last - 1][1])
    joined = [*ranges[:first], (start, stop), *ranges[last:]]
    if len(joined) > MAX_RANGES:
        raise _malformed(f"parts in more than {MAX_RANGES} pieces")
    return joined


def _malformed(message: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.MALFORMED, message)
