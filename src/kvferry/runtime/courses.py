"""How far each transfer of a consumer has come outside of its machine.

The machine says what is to be done; a *course* has what doing it takes: what is pulled, from which producer, by which
plan, through which pulls. What a fetch is to bring is *offered* under its ticket, and becomes the course of its
transfer when the machine begins the fetch; so that course is always of the fetch which the machine means, and a fetch
that is refused leaves none. A course is forgotten when no blocks are held for it and nothing of it is under way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.ids import Incarnation, TransferId
from kvferry.plan import Plan
from kvferry.protocol import PullKey, Span, Ticket
from kvferry.runtime.checking import Verified
from kvferry.runtime.producers import RemoteEngine
from kvferry.runtime.pulling import Pulled


@dataclass(slots=True)
class Course:
    """How far one transfer has come on this side."""

    pulled: Pulled
    ticket: Ticket | None
    """``None``: no blocks are held for it (any more), the producer is only told that it is not needed."""
    began: float
    resolving: bool = True
    checking: set[int] = field(default_factory=set)
    """Producer ranks whose pages are being compared."""
    verified: Verified = field(default_factory=Verified)
    engine: RemoteEngine | None = None
    plan: Plan | None = None
    targets: dict[int, bool] = field(default_factory=dict)
    """Producer ranks that are pulled from, each with whether there is anything to fetch."""
    open: set[int] = field(default_factory=set)
    """Producer ranks whose pulls are not over."""
    sent: float | None = None
    transport: str = "no transport"
    """By which its bytes come; known when the first pull is sent."""


class Courses:
    """Those of the transfers that are known."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offered: dict[Ticket, Course] = {}
        """Of fetches that the machine has not begun, and may refuse."""
        self._known: dict[TransferId, Course] = {}

    def offer(self, pulled: Pulled, ticket: Ticket) -> None:
        """What the fetch of this ticket is to bring."""
        self._offered[ticket] = Course(pulled, ticket, self._clock())

    def begin(self, transfer: TransferId, ticket: Ticket) -> Course:
        """The machine begins the fetch of this ticket; nothing else is under way for its transfer."""
        course = self._known[transfer] = self._offered.pop(ticket)
        return course

    def begin_release(self, pulled: Pulled) -> Course:
        """The machine begins to tell a producer that it is not needed."""
        course = self._known[pulled.transfer] = Course(pulled, None, self._clock())
        return course

    def get(self, transfer: TransferId) -> Course | None:
        """The course of a transfer, while it is known."""
        return self._known.get(transfer)

    def of_fetch(self, transfer: TransferId, ticket: Ticket) -> Course | None:
        """That of one fetch, also where it was refused."""
        course = self._known.get(transfer)
        return course if course is not None and course.ticket == ticket else self._offered.get(ticket)

    @property
    def open_pulls(self) -> Iterator[PullKey]:
        """Pulls that are not over."""
        for transfer, course in self._known.items():
            for rank in sorted(course.open):
                yield PullKey(transfer, rank)

    @property
    def engines(self) -> Iterator[RemoteEngine]:
        """Producers that courses have found; each as often as one has."""
        return (course.engine for course in self._known.values() if course.engine is not None)

    def engine_of(self, producer: Incarnation) -> RemoteEngine | None:
        """This life of a producer, where a course has found it."""
        return next((one for one in self.engines if one.incarnation == producer), None)

    def only_releases(self, transfer: TransferId) -> bool:
        """Whether no blocks are held for it."""
        course = self._known.get(transfer)
        return course is None or course.ticket is None

    def span_of(self, transfer: TransferId) -> Span:
        """Which positions it wants."""
        course = self._known.get(transfer)
        return course.pulled.span if course is not None else Span(0, 0)

    def resolved(self, transfer: TransferId) -> None:
        """Nobody looks for its producer any more."""
        self._known[transfer].resolving = False
        self._drop_idle(transfer)

    def pull_over(self, key: PullKey) -> None:
        """One of its pulls is over."""
        if (course := self._known.get(key.transfer)) is not None:
            course.open.discard(key.rank)
            self._drop_idle(key.transfer)

    def released(self, transfer: TransferId, ticket: Ticket) -> None:
        """The blocks of this ticket are quiet."""
        self._offered.pop(ticket, None)
        course = self._known.get(transfer)
        if course is not None and course.ticket == ticket:
            course.ticket = None
            self._drop_idle(transfer)

    def _drop_idle(self, transfer: TransferId) -> None:
        course = self._known[transfer]
        if course.ticket is None and not course.open and not course.resolving:
            del self._known[transfer]
