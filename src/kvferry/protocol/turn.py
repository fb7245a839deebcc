"""One turn of a machine: an event has come, and until it is dealt with actions and words gather here.

The parts of a machine share one turn. It has the time of the event, the actions in the order in which they are asked
for, and for each transfer that they are about what its story will say of this event.
"""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from kvferry.ids import TransferId

A = TypeVar("A")


class Turn(Generic[A]):
    """The event that is being dealt with; :meth:`begin` clears what was of the one before."""

    def __init__(self, word_of: Callable[[A], str]) -> None:
        self._word_of = word_of
        self._told: dict[TransferId, list[str]] = {}
        self.now = 0.0
        self.actions: list[A] = []

    def begin(self, now: float) -> None:
        """The next event."""
        self.now, self.actions, self._told = now, [], {}

    @property
    def told(self) -> Mapping[TransferId, list[str]]:
        """The words about each transfer that this event changed."""
        return self._told

    def emit(self, transfer: TransferId, action: A) -> None:
        """Ask for something, about one transfer."""
        self.actions.append(action)
        self.note(transfer, self._word_of(action))

    def ask(self, action: A) -> None:
        """Ask for something that no single transfer's story has to tell."""
        self.actions.append(action)

    def note(self, transfer: TransferId, word: str) -> None:
        """Say something about a transfer."""
        self._told.setdefault(transfer, []).append(word)

    def changed(self, transfer: TransferId) -> None:
        """Its state is another one, if nothing else is to be said of it."""
        self._told.setdefault(transfer, [])
