"""Which engine to ask next: the least loaded one that has not just failed.

A pool knows its engines in flight and failing, and nothing of HTTP. Each failure opens a pause (``Cooldown``)
in which the engine is ranked behind all others; it is still tried when all others have failed too, because
asking costs less than refusing. After the pause the engine is on trial: until it has answered once, only one
request at a time prefers it. Time is asked of an injected clock, so that tests need not wait.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

from kvferry.router.config import Cooldown
from kvferry.router.faults import UpstreamError

Clock = Callable[[], float]
"""Seconds that never go back."""


class Engine(Protocol):
    """Anything with an address."""

    @property
    def url(self) -> str: ...


E = TypeVar("E", bound=Engine)


class Standing(IntEnum):
    """How an engine stands, best first."""

    READY = 0
    ON_TRIAL = 1
    COOLING = 2


@dataclass(slots=True)
class _Record:
    in_flight: int = 0
    failures: int = 0
    """In a row; any answer sets it back."""
    cool_until: float = float("-inf")


class Pool(Generic[E]):
    """The engines of one role."""

    def __init__(self, engines: Sequence[E], *, cooldown: Cooldown, clock: Clock) -> None:
        self._engines = tuple(engines)
        self._records = {engine.url: _Record() for engine in engines}
        self._cooldown = cooldown
        self._clock = clock
        self._turn = 0

    @property
    def engines(self) -> tuple[E, ...]:
        return self._engines

    def ranked(self, *, avoid: Collection[str] = ()) -> list[E]:
        """All engines, the best first; those whose URL is to be avoided come after their equals."""
        size = len(self._engines)
        turn, self._turn = self._turn, (self._turn + 1) % size

        def rank(place: int) -> tuple[int, bool, int, int]:
            engine = self._engines[place]
            standing = self._standing_for_next(engine)
            return standing, engine.url in avoid, self._records[engine.url].in_flight, (place - turn) % size

        return [self._engines[place] for place in sorted(range(size), key=rank)]

    @contextmanager
    def using(self, engine: E) -> Iterator[None]:
        """Count one request in flight, and learn from how it ends.

        An ``UpstreamError`` that is the engine's own counts against it; a refused request or a plain end counts for it;
        a cancelled one says nothing.
        """
        record = self._records[engine.url]
        record.in_flight += 1
        known = record.failures
        try:
            yield
        except UpstreamError as fault:
            # What was in flight together fails together: that is one failure of the engine, not a row of them.
            if fault.blames_engine and record.failures <= known:
                self._failed(record)
            raise
        except Exception:
            self._answered(record)
            raise
        else:
            self._answered(record)
        finally:
            record.in_flight -= 1

    def standing(self, engine: E) -> Standing:
        """How the engine stands now."""
        record = self._records[engine.url]
        if not record.failures:
            return Standing.READY
        return Standing.COOLING if self._clock() < record.cool_until else Standing.ON_TRIAL

    def in_flight(self, engine: E) -> int:
        """Requests that the engine is working on for this router."""
        return self._records[engine.url].in_flight

    def usable(self) -> bool:
        """Whether some engine is not cooling down."""
        return any(self.standing(engine) is not Standing.COOLING for engine in self._engines)

    def _standing_for_next(self, engine: E) -> Standing:
        standing = self.standing(engine)
        if standing is Standing.ON_TRIAL:
            # The first to come takes the trial, ranked as an equal; while it runs nobody else prefers the engine.
            return Standing.ON_TRIAL if self._records[engine.url].in_flight else Standing.READY
        return standing

    def _failed(self, record: _Record) -> None:
        record.failures += 1
        record.cool_until = self._clock() + self._cooldown.seconds(record.failures)

    def _answered(self, record: _Record) -> None:
        record.failures = 0
