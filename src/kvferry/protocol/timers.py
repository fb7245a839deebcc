"""Deadlines by key, without a clock: a heap whose stale entries are skipped, and swept when they outnumber the live.

Setting a key again moves its deadline; each key is due at most once for each time it is set.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """At most one deadline for each key."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._live: dict[K, tuple[float, int]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    @property
    def next(self) -> float | None:
        """When the earliest key is due."""
        self._skip_stale()
        return self._heap[0][0] if self._heap else None

    def set(self, key: K, when: float) -> None:
        self._serial += 1
        serial = self._serial
        self._live[key] = (when, serial)
        heapq.heappush(self._heap, (when, serial, key))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(at, number, one) for one, (at, number) in self._live.items()]
            heapq.heapify(self._heap)

    def hasten(self, key: K, when: float) -> None:
        """Make a key that is set due by ``when``, unless it is due sooner."""
        if key in self._live and self._live[key][0] > when:
            self.set(key, when)

    def cancel(self, key: K) -> None:
        self._live.pop(key, None)

    def pop_due(self, now: float) -> K | None:
        """The earliest key that is due, which is then unset; ``None`` when none is."""
        self._skip_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._live[key]
        return key

    def _skip_stale(self) -> None:
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
