"""The life of single transfers on this side, for people: when, what came, what state followed, what was asked for.

Bounded twice: the newest transfers, and the newest entries of each. Entries are words, never the values themselves,
so a story keeps no block list alive.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.ids import TransferId


@dataclass(frozen=True, slots=True)
class Entry:
    """One event in the life of a transfer."""

    at: float
    event: str
    state: str
    """The state that followed; empty when the transfer is no longer known."""

    actions: tuple[str, ...]


class Story:
    """What happened to each of the newest transfers."""

    def __init__(self, *, transfers: int = 1024, entries: int = 64) -> None:
        self._limit = transfers
        self._entries = entries
        self._lives: OrderedDict[TransferId, deque[Entry]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lives)

    def add(self, transfer: TransferId, entry: Entry) -> None:
        life = self._lives.get(transfer)
        if life is None:
            life = self._lives[transfer] = deque(maxlen=self._entries)
            if len(self._lives) > self._limit:
                self._lives.popitem(last=False)
        life.append(entry)

    @property
    def open(self) -> tuple[TransferId, ...]:
        """Those of the transfers kept here that this side still knows, oldest first."""
        return tuple(transfer for transfer, life in self._lives.items() if life[-1].state)

    def of(self, transfer: TransferId) -> tuple[Entry, ...]:
        """The entries kept for one transfer, oldest first; empty when nothing is known of it."""
        return tuple(self._lives.get(transfer, ()))


def render(entries: Iterable[Entry]) -> str:
    """A story as lines of text, times relative to its first entry."""
    lines: list[str] = []
    start: float | None = None
    for entry in entries:
        start = entry.at if start is None else start
        asked = f"  -> {', '.join(entry.actions)}" if entry.actions else ""
        lines.append(f"{entry.at - start:+10.3f}s  {entry.event:<18} {entry.state or '-':<10}{asked}")
    return "\n".join(lines)
