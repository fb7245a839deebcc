"""A clock for deadlines by which others are judged: it counts the time in which this process could have noticed them.

A process, or its whole machine, may stand still for seconds: stopped, swapped out, its virtual processors taken away.
When it goes on, what its peers have sent meanwhile lies unread, and a plain clock would call them silent before it is
read. So time that passes between two looks counts up to a bound only; whoever waits for a deadline looks more often
than that. A peer that is silent while this process runs is noticed as early as ever.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Final

MOST_BETWEEN_LOOKS: Final = 0.5
"""Seconds. Far above the time that a process which runs needs to look again, far below every deadline."""

LOOK_EVERY: Final = 0.25
"""Seconds after which whoever waits looks again, so that all of its time counts."""


class AwakeClock:
    """Seconds, never going back; may be asked from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._awake = clock()

    def __call__(self) -> float:
        """Now. It starts as the plain clock and falls behind it by what was slept through."""
        return self._look(MOST_BETWEEN_LOOKS)

    def after_idling(self) -> float:
        """Now, where nobody has waited since the last look, and so nobody needed to look: all of the time counts."""
        return self._look(math.inf)

    def _look(self, most: float) -> float:
        with self._lock:
            now = self._clock()
            self._awake += min(now - self._seen, most)
            self._seen = now
            return self._awake
