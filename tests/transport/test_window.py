"""The window's limits and its stall, on an engine whose rows finish when the test says so."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.plan.descriptors import Descriptors
from kvferry.transport.awake import LOOK_EVERY, AwakeClock
from kvferry.transport.base import SubmissionState
from kvferry.transport.progress import Progress
from kvferry.transport.window import Lane, Pace, RowState

DEADLINE_S = 10.0


class ScriptedEngine:
    """An engine that keeps rows until told to finish them; it counts like the real one, from one thread."""

    def __init__(self) -> None:
        self.states: dict[int, RowState] = {}
        self.rows: list[tuple[int, int, int]] = []
        self.most_pending = 0
        self.threads: set[int] = set()
        self.refuse_from: int | None = None
        self.automatic = False
        self._lock = threading.Lock()
        """The lane's thread asks while the test's thread finishes."""

    def start(self, address: str, src: int, dst: int, nbytes: int) -> int | None:
        self.threads.add(threading.get_ident())
        if self.refuse_from is not None and len(self.rows) >= self.refuse_from:
            return None
        with self._lock:
            self.rows.append((src, dst, nbytes))
            handle = len(self.rows)
            self.states[handle] = RowState.LANDED if self.automatic else RowState.PENDING
            self.most_pending = max(self.most_pending, len(self.states))
            return handle

    def state(self, handle: int) -> RowState:
        self.threads.add(threading.get_ident())
        # A final answer frees the handle, as the real engine does: asking twice is a KeyError here, a crash there.
        with self._lock:
            return self.states[handle] if self.states[handle] is RowState.PENDING else self.states.pop(handle)

    def finish(self, state: RowState, *handles: int) -> None:
        with self._lock:
            for handle in handles or tuple(self.states):
                self.states[handle] = state


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stage:
    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.clock = ManualClock()
        awake = AwakeClock(self.clock)
        self.entered: list[int] = []
        pace = Pace(
            max_outstanding=10,
            max_slice=4,
            stall_s=5.0,
            clock=awake,
            sleep=time.sleep,
            enter_thread=lambda: self.entered.append(threading.get_ident()),
        )
        self.lane = Lane(self.engine, "peer:1", pace)

    def wait(self, seconds: float, watched: Progress) -> None:
        """Time goes by, and somebody looks now and then."""
        for _ in range(round(seconds / LOOK_EVERY)):
            self.clock.now += LOOK_EVERY
            watched.poll()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the lane did not get there"
            time.sleep(0.001)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.lane.stop(TransportError(TransportReason.CLOSED, "the test is over"))
    assert stage.lane.join(DEADLINE_S)


def rows(count: int, *, first: int = 0) -> Descriptors:
    places = np.arange(first, first + count)
    return Descriptors.of(places * 10, places * 100, np.full(count, 7))


def test_the_window_is_never_exceeded_over_all_submissions(stage: Stage) -> None:
    submissions = [stage.lane.submit(rows(25, first=25 * index), descriptors=25) for index in range(3)]
    stage.until(lambda: len(stage.engine.states) == 10)
    while any(submission.poll() is SubmissionState.PENDING for submission in submissions):
        stage.until(lambda: bool(stage.engine.states) or submissions[-1].poll() is SubmissionState.DONE)
        stage.engine.finish(RowState.LANDED)
    assert stage.engine.most_pending == 10
    assert stage.engine.rows == [(10 * place, 100 * place, 7) for place in range(75)]
    assert len(stage.engine.threads) == 1
    assert stage.entered == list(stage.engine.threads), "the thread that hands over has made its device current first"
    assert all(submission.quiet and submission.destination_quiet for submission in submissions)


def test_rows_that_finish_out_of_order_are_counted(stage: Stage) -> None:
    submission = stage.lane.submit(rows(6), descriptors=6)
    stage.until(lambda: len(stage.engine.states) == 6)
    stage.engine.finish(RowState.LANDED, 2, 4, 5)
    stage.until(lambda: len(stage.engine.states) == 3)
    assert submission.poll() is SubmissionState.PENDING
    stage.engine.finish(RowState.LANDED)
    stage.until(lambda: submission.poll() is SubmissionState.DONE)


def test_a_failed_row_fails_the_submission_and_stays_in_doubt(stage: Stage) -> None:
    submission = stage.lane.submit(rows(30), descriptors=30)
    stage.until(lambda: len(stage.engine.states) == 10)
    stage.engine.finish(RowState.FAILED, 3)
    stage.until(lambda: submission.poll() is SubmissionState.FAILED)
    handed = len(stage.engine.rows)
    stage.engine.finish(RowState.LANDED)
    stage.until(lambda: not stage.engine.states)
    assert not submission.quiet
    assert handed <= 14
    assert len(stage.engine.rows) <= handed
    assert submission.error is not None
    assert submission.error.reason is TransportReason.PEER_UNREACHABLE


def test_a_refused_row_fails_the_submission_and_the_next_one_goes_on(stage: Stage) -> None:
    stage.engine.automatic = True
    stage.engine.refuse_from = 2
    failed = stage.lane.submit(rows(9), descriptors=9)
    stage.until(lambda: failed.poll() is SubmissionState.FAILED)
    assert not failed.quiet
    stage.engine.refuse_from = None
    served = stage.lane.submit(rows(9), descriptors=9)
    stage.until(lambda: served.poll() is SubmissionState.DONE)


def test_a_stall_fails_everything_and_a_late_completion_makes_it_quiet(stage: Stage) -> None:
    stuck = stage.lane.submit(rows(30), descriptors=30)
    waiting = stage.lane.submit(rows(5), descriptors=5)
    stage.until(lambda: len(stage.engine.states) == 10)
    stage.wait(4.75, stuck)
    assert stuck.poll() is SubmissionState.PENDING
    stage.wait(0.25, stuck)
    assert stuck.poll() is SubmissionState.FAILED
    assert waiting.poll() is SubmissionState.FAILED
    assert stuck.error is not None
    assert stuck.error.reason is TransportReason.TIMED_OUT
    assert not stuck.quiet
    assert waiting.destination_quiet
    late = stage.lane.submit(rows(5), descriptors=5)
    assert late.poll() is SubmissionState.FAILED
    assert late.destination_quiet
    stage.engine.automatic = True
    stage.engine.finish(RowState.LANDED)
    stage.until(lambda: stuck.quiet and stuck.destination_quiet)
    assert stuck.poll() is SubmissionState.FAILED
    assert len(stage.engine.rows) == 10
    served = stage.lane.submit(rows(20), descriptors=20)
    stage.until(lambda: served.poll() is SubmissionState.DONE)


def test_a_writer_that_stood_still_does_not_blame_its_peer(stage: Stage) -> None:
    """What has come back meanwhile has not been looked at yet."""
    submission = stage.lane.submit(rows(10), descriptors=10)
    stage.until(lambda: len(stage.engine.states) == 10)
    stage.wait(4.25, submission)
    stage.clock.now += 30.0
    assert submission.poll() is SubmissionState.PENDING
    stage.engine.finish(RowState.LANDED)
    stage.until(lambda: submission.poll() is SubmissionState.DONE)


def test_a_cancelled_submission_is_quiet_when_its_rows_are_back(stage: Stage) -> None:
    submission = stage.lane.submit(rows(30), descriptors=30)
    stage.until(lambda: len(stage.engine.states) == 10)
    submission.cancel()
    assert submission.poll() is SubmissionState.FAILED
    assert not submission.quiet
    stage.engine.finish(RowState.LANDED)
    stage.until(lambda: submission.destination_quiet)
    assert len(stage.engine.rows) == 10


def test_a_fence_is_quiet_here_and_proves_nothing_there(stage: Stage) -> None:
    submission = stage.lane.submit(rows(3), descriptors=3)
    stage.until(lambda: len(stage.engine.states) == 3)
    error = TransportError(TransportReason.CLOSED, "closed")
    stage.lane.stop(error)
    assert stage.lane.join(DEADLINE_S)
    assert not submission.quiet
    stage.lane.fence(error)
    assert submission.quiet
    assert not submission.destination_quiet
    assert submission.error is error
