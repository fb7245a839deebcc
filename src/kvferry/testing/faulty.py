"""A transport that misbehaves on demand: wraps any other, and does to its submissions what real engines do.

:class:`Misdeeds` is the list of what is to go wrong; each submission takes the next one, and later ones are honest.

* ``Slow``: rows go to the engine a few at a time, with a pause between.
* ``FailAfter``: some rows are written, then it fails; nothing follows (an honest failure).
* ``FailAndWriteLater``: it says that it failed and is not quiet; after a while it writes all the same, with the bytes
  that the source holds *then*, unless an engine was destroyed in between: the writer's own, or the one it writes to.
* ``Hang``: rows may have been written, no end is ever told, and asking it to stop changes nothing.
* ``Repeat``: all rows are written twice, the second time later; it is done when both are.
* ``Corrupt``, ``SwapTargets``, ``WrongSource``: it is done, and says so, and what it wrote is not what it was to write:
  some bytes of one row are flipped, two rows have exchanged their places, one row holds another one's content.

``close()`` fences as the engine inside does: nothing of a submission that was not handed over is written after it.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan import Descriptors
from kvferry.transport import Peer, Submission, SubmissionState, Transport


@dataclass(frozen=True, slots=True)
class Slow:
    """A link that carries ``rows`` rows, then nothing for ``pause`` seconds."""

    rows: int
    pause: float


@dataclass(frozen=True, slots=True)
class FailAfter:
    """Fail once the first ``rows`` rows are written."""

    rows: int


@dataclass(frozen=True, slots=True)
class FailAndWriteLater:
    """Claim failure at once, write after ``delay`` seconds; ``None``: not before :meth:`Misdeeds.write_late`."""

    delay: float | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Write the first ``rows`` rows and never end."""

    rows: int = 0


@dataclass(frozen=True, slots=True)
class Repeat:
    """Write everything, and once more ``delay`` seconds later."""

    delay: float


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Write everything, but the first ``nbytes`` bytes of row ``row`` (counted round) with all their bits flipped."""

    nbytes: int = 1
    row: int = 0


@dataclass(frozen=True, slots=True)
class SwapTargets:
    """The first two rows of equal length go to each other's place."""


@dataclass(frozen=True, slots=True)
class WrongSource:
    """The second of the first two rows of equal length is written from the first one's source."""


Untruth = Corrupt | SwapTargets | WrongSource
"""Misdeeds that nobody is told of."""

Misdeed = Slow | FailAfter | FailAndWriteLater | Hang | Repeat | Untruth


class Misdeeds:
    """What is to go wrong next, shared by all engines of one rank. Any thread may change it."""

    def __init__(self, *planned: Misdeed, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.always: Misdeed | None = None
        """For every submission, once the planned ones are used up."""
        self.done: list[Misdeed] = []
        """What was taken."""
        self._planned = deque(planned)
        self._late = threading.Event()

    def plan(self, *misdeeds: Misdeed) -> None:
        """Add to the list."""
        self._planned.extend(misdeeds)

    def take(self) -> Misdeed | None:
        """The next one, for a new submission."""
        misdeed = self._planned.popleft() if self._planned else self.always
        if misdeed is not None:
            self.done.append(misdeed)
        return misdeed

    def write_late(self) -> None:
        """Let all that claimed failure write now."""
        self._late.set()

    @property
    def late_is_due(self) -> bool:
        """Whether :meth:`write_late` was called."""
        return self._late.is_set()


class FaultySubmission:
    """One submission that goes wrong. It moves when it is polled, as the memory transport's do."""

    def __init__(self, engine: Transport, peer: Peer, rows: Descriptors, misdeed: Misdeed, misdeeds: Misdeeds) -> None:
        self._engine, self._peer, self._rows = engine, peer, rows
        self._misdeed, self._misdeeds = misdeed, misdeeds
        self._began = self._last = misdeeds.clock()
        self._next = 0
        self._rounds = 0
        self._inner: list[Submission] = []
        self._state = SubmissionState.PENDING
        self._error: TransportError | None = None
        self._owes = True
        """Rows may still be handed to the engine."""
        self._cancelled = False
        if isinstance(misdeed, Hang | FailAfter) and misdeed.rows:
            self._hand(misdeed.rows)

    @property
    def descriptors(self) -> int:
        """How many rows were submitted."""
        return self._rows.count

    @property
    def total_bytes(self) -> int:
        """How many bytes were submitted."""
        return self._rows.total_bytes

    @property
    def error(self) -> TransportError | None:
        """Why it failed, if it did."""
        return self._error

    @property
    def quiet(self) -> bool:
        """Nothing more is handed over, and what was is quiet."""
        self.poll()
        return not self._owes and all(one.quiet for one in self._inner)

    @property
    def destination_quiet(self) -> bool:
        """The same at the far end."""
        self.poll()
        return not self._owes and all(one.destination_quiet for one in self._inner)

    def tell(self, ended: Callable[[], object]) -> None:
        """It tells nobody."""

    def cancel(self) -> None:
        """Ask it to stop. One that hangs, or has lied, does not listen."""
        self._cancelled = True
        for one in self._inner:
            one.cancel()
        if isinstance(self._misdeed, Slow | FailAfter | Repeat):
            self._owes = False
            self._fail(TransportReason.CANCELLED, "the submission was cancelled")

    def fence(self, error: TransportError) -> None:
        """The engine inside is destroyed."""
        self._owes = False
        if self._state is SubmissionState.PENDING:
            self._state, self._error = SubmissionState.FAILED, error

    def poll(self) -> SubmissionState:
        """Move on as far as the misdeed says."""
        states = [one.poll() for one in self._inner]
        match self._misdeed:
            case Slow():
                self._poll_slow(self._misdeed, states)
            case FailAfter():
                if SubmissionState.PENDING not in states:
                    self._owes = False
                    self._fail(TransportReason.ENGINE_FAULT, f"failed after {self._next} rows")
            case FailAndWriteLater():
                self._fail(TransportReason.ENGINE_FAULT, "said to have failed")
                self._write_late(self._misdeed)
            case Hang():
                pass
            case Repeat():
                self._poll_repeat(self._misdeed, states)
            case Corrupt() | SwapTargets() | WrongSource():
                raise TypeError(f"{self._misdeed} is no way to go wrong in time")
            case _:
                assert_never(self._misdeed)
        return self._state

    def _poll_slow(self, slow: Slow, states: Sequence[SubmissionState]) -> None:
        now = self._misdeeds.clock()
        if self._owes and (not self._next or now >= self._last + slow.pause):
            self._hand(slow.rows)
            self._owes = self._next < self._rows.count
        elif not self._owes:
            self._end_with(states)

    def _poll_repeat(self, repeat: Repeat, states: Sequence[SubmissionState]) -> None:
        due = self._rounds == 0 or (self._rounds == 1 and self._misdeeds.clock() >= self._began + repeat.delay)
        if self._owes and due:
            self._next = 0
            self._hand(self._rows.count)
            self._rounds += 1
            self._owes = self._rounds < 2
        elif not self._owes:
            self._end_with(states)

    def _write_late(self, misdeed: FailAndWriteLater) -> None:
        due = self._misdeeds.late_is_due if misdeed.delay is None else self._passed(misdeed.delay)
        if self._owes and due:
            self._hand(self._rows.count)
            self._owes = False

    def _passed(self, seconds: float) -> bool:
        return self._misdeeds.clock() >= self._began + seconds

    def _end_with(self, states: Sequence[SubmissionState]) -> None:
        """End as the engine's own submissions did."""
        if self._state is not SubmissionState.PENDING or SubmissionState.PENDING in states:
            return
        failed = next((one for one in self._inner if one.error is not None), None)
        if failed is None:
            self._state = SubmissionState.DONE
        else:
            self._state, self._error = SubmissionState.FAILED, failed.error

    def _hand(self, count: int) -> None:
        """Give the engine the next ``count`` rows; a refusal of it is the end."""
        first, self._next = self._next, min(self._next + count, self._rows.count)
        chosen = slice(first, self._next)
        self._last = self._misdeeds.clock()
        rows = Descriptors.of(self._rows.src[chosen], self._rows.dst[chosen], self._rows.nbytes[chosen])
        try:
            self._inner.append(self._engine.submit(self._peer, rows))
        except TransportError as error:
            self._owes = False
            if self._state is SubmissionState.PENDING:
                self._state, self._error = SubmissionState.FAILED, error

    def _fail(self, reason: TransportReason, said: str) -> None:
        if self._state is SubmissionState.PENDING:
            self._state, self._error = SubmissionState.FAILED, TransportError(reason, said)


def _mistaken(rows: Descriptors, misdeed: SwapTargets | WrongSource) -> Descriptors:
    order = np.argsort(rows.nbytes, kind="stable")
    alike = np.flatnonzero(np.diff(rows.nbytes[order]) == 0)
    if not alike.size:
        raise ValueError("no two rows of equal length to confuse")
    one, other = (int(order[alike[0] + step]) for step in (0, 1))
    src, dst = rows.src.copy(), rows.dst.copy()
    if isinstance(misdeed, SwapTargets):
        dst[[one, other]] = dst[[other, one]]
    else:
        src[other] = src[one]
    return Descriptors.of(src, dst, rows.nbytes)


class FaultyTransport:
    """A transport around another one (:class:`kvferry.transport.base.Transport`)."""

    def __init__(self, engine: Transport, misdeeds: Misdeeds) -> None:
        self._engine = engine
        self._misdeeds = misdeeds
        self._open: list[FaultySubmission] = []
        self._untrue: list[NDArray[np.uint8]] = []
        """Sources of corrupted rows, alive as long as the engine may read them."""

    @property
    def name(self) -> str:
        """Of the engine inside: peers are not told."""
        return self._engine.name

    @property
    def close_stops_peers(self) -> bool:
        """As the engine inside."""
        return self._engine.close_stops_peers

    def address(self) -> str:
        """As the engine inside."""
        return self._engine.address()

    def protocol_in_use(self) -> str:
        """As the engine inside."""
        return self._engine.protocol_in_use()

    def register(self, regions: Sequence[Region]) -> None:
        """As the engine inside."""
        self._engine.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        """As the engine inside."""
        self._engine.unregister(regions)

    def admit(self, address: str) -> None:
        """As the engine inside."""
        self._engine.admit(address)

    def retire(self) -> None:
        """As the engine inside."""
        self._engine.retire()

    def peer_is_gone(self, address: str) -> bool:
        """As the engine inside."""
        return self._engine.peer_is_gone(address)

    def open_peer(self, address: str, regions: Sequence[Region]) -> Peer:
        """As the engine inside."""
        return self._engine.open_peer(address, regions)

    def submit(self, peer: Peer, descriptors: Descriptors) -> Submission:
        """Honest, unless a misdeed is planned."""
        misdeed = self._misdeeds.take()
        match misdeed:
            case None:
                return self._engine.submit(peer, descriptors)
            case SwapTargets() | WrongSource():
                return self._engine.submit(peer, _mistaken(descriptors, misdeed))
            case Corrupt():
                return self._corrupted(peer, descriptors, misdeed)
            case _:
                pass
        submission = FaultySubmission(self._engine, peer, descriptors, misdeed, self._misdeeds)
        self._open = [one for one in self._open if not one.quiet]
        self._open.append(submission)
        return submission

    def _corrupted(self, peer: Peer, rows: Descriptors, misdeed: Corrupt) -> Submission:
        """The row is written from a copy that is not true."""
        row = misdeed.row % rows.count
        source, length = int(rows.src[row]), int(rows.nbytes[row])
        copy = np.frombuffer(ctypes.string_at(source, length), np.uint8).copy()
        copy[: misdeed.nbytes] ^= 0xFF
        self._engine.register([Region(copy.ctypes.data, length)])
        self._untrue.append(copy)
        sources = rows.src.copy()
        sources[row] = copy.ctypes.data
        return self._engine.submit(peer, Descriptors.of(sources, rows.dst, rows.nbytes))

    def close(self) -> None:
        """Fence as the engine inside does."""
        self._engine.close()
        error = TransportError(TransportReason.CLOSED, "the transport was closed")
        for submission in self._open:
            submission.fence(error)
