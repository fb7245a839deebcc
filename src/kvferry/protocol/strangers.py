"""Transfers that only peers have spoken of, counted for each of them, and bounded."""

from collections import Counter
from collections.abc import Iterable

from kvferry.protocol.invariants import holds
from kvferry.protocol.values import Puller


class Strangers:
    """How many there are, and of whom."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._counts: Counter[Puller] = Counter()

    def take(self, puller: Puller) -> bool:
        """Count one more of this rank; false, and nothing is counted, where there is no room."""
        if self._counts[puller] >= self._most_of_one or self._counts.total() >= self._most:
            return False
        self._counts[puller] += 1
        return True

    def give_back(self, puller: Puller) -> None:
        """One of this rank is none any more."""
        self._counts[puller] -= 1
        if not self._counts[puller]:
            del self._counts[puller]

    def check(self, known: Iterable[Puller]) -> None:
        """What holds between any two events; ``known``: whose the present ones are. Raises ``AssertionError``."""
        holds(self._counts == Counter(known), "strangers are counted")
        holds(self._counts.total() <= self._most, "strangers are bounded")
