"""A memory that does not grow: the newest of what was noted, by key."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(Generic[K, V]):
    """As many as ``most``; the one that was noted first goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.known: OrderedDict[K, V] = OrderedDict()

    def note(self, key: K, value: V) -> None:
        """Remember one."""
        self.known[key] = value
        if len(self.known) > self._most:
            self.known.popitem(last=False)

    def get(self, key: K) -> V | None:
        """What was noted."""
        return self.known.get(key)

    def __contains__(self, key: K) -> bool:
        return key in self.known
