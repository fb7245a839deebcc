"""What a runtime counts between two times that it is asked: writes, receives, and how transfers ended.

Counted on the runtime's loop, taken by the embedding engine's thread; whoever takes, takes all and starts a new
interval. Single values are kept rather than sums, so that a reader can make any histogram of them; an engine that
takes once a step keeps them few.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvferry.protocol import Outcome


class Write(NamedTuple):
    """One write of a producer rank to one consumer rank, every byte of which arrived. Times are seconds."""

    nbytes: int
    descriptors: int
    bind: float
    """From block tables to descriptors."""
    write: float
    """From descriptors to the engine's word that all has landed."""


class Receive(NamedTuple):
    """One fetch of a consumer rank that brought all it was to bring. Times are seconds."""

    tokens: int
    resolve: float
    """From the order to the pulls: the producer was found, its layouts and the plan made."""
    wait: float
    """From the pulls to the end."""


class End(NamedTuple):
    """How a transfer can end on one side, as it is counted."""

    side: str
    """``producer`` or ``consumer``."""
    outcome: str
    """A :class:`kvferry.protocol.Fate`."""
    reason: str
    """A :class:`kvferry.errors.ProtocolReason`; empty when it was done."""


Counted = Literal[
    "verified_pages",
    "verified_bytes",
    "verify_mismatches",
    "retries",
    "refused_connections",
    "refused_orders",
    "engines_renewed",
    "fences",
]
"""What is only counted, by the name of its metric."""


@dataclass(frozen=True, slots=True)
class Interval:
    """All that happened since the last one was taken."""

    writes: tuple[Write, ...] = ()
    receives: tuple[Receive, ...] = ()
    ends: Counter[End] = field(default_factory=Counter)
    counts: Counter[Counted] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.writes or self.receives or self.ends or self.counts)


_NOTHING = Interval()
"""What most steps take."""


class Tally:
    """Counts for one runtime; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: list[Write] = []
        self._receives: list[Receive] = []
        self._ends: Counter[End] = Counter()
        self._counts: Counter[Counted] = Counter()

    def wrote(self, write: Write) -> None:
        """Every byte of a write arrived."""
        with self._lock:
            self._writes.append(write)

    def received(self, receive: Receive) -> None:
        """A fetch is done."""
        with self._lock:
            self._receives.append(receive)

    def ended(self, side: str, outcome: Outcome) -> None:
        """A transfer came to an end, good or bad."""
        end = End(side, outcome.fate.value, outcome.reason.value if outcome.reason else "")
        with self._lock:
            self._ends[end] += 1

    def count(self, what: Counted, number: int) -> None:
        """Something that is only counted."""
        with self._lock:
            self._counts[what] += number

    def take(self) -> Interval:
        """All that was counted since this was last called."""
        with self._lock:
            if not (self._writes or self._receives or self._ends or self._counts):
                return _NOTHING
            taken = Interval(tuple(self._writes), tuple(self._receives), self._ends, self._counts)
            self._writes, self._receives, self._ends, self._counts = [], [], Counter(), Counter()
        return taken
