"""A sliding window of rows in flight to one peer, over an engine that takes one row at a time and can be polled.

Engines limit what may be outstanding to one peer, over all threads, and some break for good when that is exceeded. So
each peer has one lane: a queue of submissions and one thread, the only one that hands rows to the engine for that peer.
The thread tops the window up, reaps what has finished, and sleeps when neither was possible; it never spins. Descriptor
columns become Python integers one slice at a time, as the window opens.

**Stall.** When rows are out and none has come back for ``stall_s``, every submission of the lane fails (TIMED_OUT);
those with rows out are not quiet, the others are. Time in which this process itself stood still does not count: what
came back meanwhile has not been looked at (:mod:`kvferry.transport.awake`). The rows stay watched: if the peer wakes up
and all of them land after all, the failed submission becomes quiet, and the lane serves again. The stall is also judged
by whoever polls, so a thread stuck inside the engine delays nobody.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvferry.errors import TransportError, TransportReason
from kvferry.plan.descriptors import Descriptors
from kvferry.transport.progress import Progress

_PENDING_SEEN = 8
"""How many unfinished rows a reaping pass looks past: engines finish rows nearly, not exactly, in order."""


_PAUSE_GROWTH = 1.25
"""From one look to the next while nothing comes back, so that what has come waits for a fraction of its own time."""


class RowState(Enum):
    """What an engine says about one row."""

    PENDING = 0
    LANDED = 1
    FAILED = 2
    """It will say no more about this row; the bytes may still be on their way."""


class RowEngine(Protocol):
    """The engine as the window needs it. Both calls come from the lane's thread only."""

    def start(self, address: str, src: int, dst: int, nbytes: int) -> int | None:
        """Hand over one row; a handle to ask about it, ``None`` when it was refused."""

    def state(self, handle: int) -> RowState:
        """Ask about a row. After LANDED or FAILED its handle is dead."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The limits and the clock of a lane."""

    max_outstanding: int
    """Rows in flight to one peer."""
    max_slice: int
    """Rows handed over between two looks at what has finished."""
    stall_s: float
    """Without any row coming back for so long, the lane's submissions fail."""
    clock: Callable[[], float]
    """By which a stall is judged; it should count no time in which this process stood still."""
    sleep: Callable[[float], None]
    enter_thread: Callable[[], None] | None = None
    """Called first in the lane's thread: makes the memory's device the current one."""


@dataclass(slots=True)
class _Job:
    """One submission in the queue, and how far it has been handed over."""

    rows: Descriptors
    progress: Progress
    next: int = 0


class Lane:
    """All writes of one engine to one peer."""

    def __init__(self, engine: RowEngine, address: str, pace: Pace) -> None:
        self._engine = engine
        self._address = address
        self._pace = pace
        self._queue: deque[_Job] = deque()
        self._window: deque[tuple[int, _Job]] = deque()
        self._watched: set[Progress] = set()
        self._moved_at: float | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-lane-{address}", daemon=True)
        self._thread.start()

    def submit(self, rows: Descriptors, *, descriptors: int) -> Progress:
        """Queue checked rows, which stand for ``descriptors`` of the submitter."""
        progress = Progress(descriptors, rows.total_bytes, rows=rows.count, watch=self._judge)
        with self._changed:
            self._watched = {known for known in self._watched if not known.destination_quiet}
            self._watched.add(progress)
            self._queue.append(_Job(rows, progress))
            # A lane that is stalled already fails it here, with nothing handed over.
            self._judge()
            self._changed.notify()
        return progress

    def stop(self, error: TransportError) -> None:
        """Fail what is pending and let the thread end; it hands over nothing more."""
        with self._changed:
            self._stopping = True
            for progress in self._watched:
                progress.fail(error)
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has left the engine for good."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def fence(self, error: TransportError) -> None:
        """The engine is destroyed: all that was submitted here is quiet, but what has left may still land."""
        for progress in self._watched:
            progress.fence(error, leaves_nothing=False)
        self._watched.clear()
        self._queue.clear()
        self._window.clear()

    def _run(self) -> None:
        if self._pace.enter_thread is not None:
            self._pace.enter_thread()
        pause = 0.0
        while self._wait_for_work():
            if self._top_up() + self._reap():
                pause = 0.0
                continue
            self._judge()
            pause = min(max(pause * _PAUSE_GROWTH, 100e-6), 1e-3)
            self._pace.sleep(pause)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._stopping or self._queue or self._window):
                self._moved_at = None
                self._changed.wait()
            if self._moved_at is None:
                self._moved_at = self._pace.clock()
            return not self._stopping

    def _judge(self) -> None:
        """Fail the lane's submissions when nothing has come back for too long."""
        with self._changed:
            if self._moved_at is None or self._pace.clock() - self._moved_at < self._pace.stall_s:
                return
            for progress in self._watched:
                progress.fail(
                    TransportError(
                        TransportReason.TIMED_OUT,
                        f"peer {self._address} has taken no row for {self._pace.stall_s} s; "
                        f"rows already handed to the engine may still land",
                    )
                )

    def _top_up(self) -> int:
        """Hand over the next slice of the first submission that still wants any; how many rows were tried."""
        while self._queue and (self._queue[0].next == self._queue[0].rows.count or not self._queue[0].progress.wanted):
            self._queue.popleft()
        room = min(self._pace.max_outstanding - len(self._window), self._pace.max_slice)
        if not self._queue or room <= 0:
            return 0
        job = self._queue[0]
        chosen = slice(job.next, min(job.next + room, job.rows.count))
        job.next = chosen.stop
        self._hand_over(job, chosen)
        return int(chosen.stop - chosen.start)

    def _hand_over(self, job: _Job, chosen: slice) -> None:
        columns = (job.rows.src[chosen].tolist(), job.rows.dst[chosen].tolist(), job.rows.nbytes[chosen].tolist())
        count = len(columns[0])
        job.progress.handed(count)
        for index, (src, dst, nbytes) in enumerate(zip(*columns, strict=True)):
            if not job.progress.wanted:
                job.progress.over(count - index)
                return
            handle = self._engine.start(self._address, src, dst, nbytes)
            if handle is None:
                job.progress.fail(self._refused(f"the engine refused {nbytes} bytes for {dst:#x}"))
                job.progress.over(count - index - 1)
                return
            self._window.append((handle, job))

    def _reap(self) -> int:
        """Take finished rows out of the window; how many there were."""
        kept: list[tuple[int, _Job]] = []
        landed: Counter[Progress] = Counter()
        before = len(self._window)
        while self._window and len(kept) < _PENDING_SEEN:
            handle, job = self._window.popleft()
            match self._engine.state(handle):
                case RowState.PENDING:
                    kept.append((handle, job))
                case RowState.LANDED:
                    landed[job.progress] += 1
                case RowState.FAILED:
                    job.progress.fail(self._refused("the engine reported a row as failed"))
        self._window.extendleft(reversed(kept))
        for progress, rows in landed.items():
            progress.landed(rows)
        finished = before - len(self._window)
        if finished:
            self._moved_at = self._pace.clock()
        return finished

    def _refused(self, what: str) -> TransportError:
        return TransportError(
            TransportReason.PEER_UNREACHABLE,
            f"write to {self._address}: {what}; the peer is gone or unreachable, or has unregistered the memory",
        )
