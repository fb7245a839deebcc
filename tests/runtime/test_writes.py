"""A write that ends is heard of when it ends, not when it is next asked; one that tells nobody is asked."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.runtime import writes
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.writes import Writes
from kvferry.transport import SubmissionState
from kvferry.transport.progress import Progress

NEVER_S = 3600.0
SOON_S = 10.0


class Silent(Progress):
    """A submission of an engine that tells nobody."""

    def tell(self, ended: Callable[[], object]) -> None:
        return


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    one = LoopThread("writes")
    yield one
    one.close()


def watch(thread: LoopThread, *submissions: Progress) -> list[threading.Event]:
    """Watch them all in one ``Writes``; an event for each that is set when its end is known."""
    ended = [threading.Event() for _ in submissions]

    async def start() -> None:
        watched: Writes[int] = Writes(thread)
        for key, (one, event) in enumerate(zip(submissions, ended, strict=True)):
            watched.watch(key, one, on_final=lambda _, state, event=event: _done(state, event), on_quiet=event.clear)

    thread.run(start(), timeout=SOON_S)
    return ended


def _done(state: SubmissionState, event: threading.Event) -> None:
    assert state is SubmissionState.DONE
    event.set()


def land(progress: Progress) -> None:
    progress.handed(1)
    progress.landed(1)


def test_a_fault_in_one_end_keeps_nobody_from_hearing_of_the_next(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Silent(1, 1), Silent(1, 1)
    heard = threading.Event()

    def fail(*_: object) -> None:
        raise OSError("no room")

    async def start() -> None:
        watched: Writes[int] = Writes(thread)
        watched.watch(0, first, on_final=fail, on_quiet=fail)
        watched.watch(1, second, on_final=lambda *_: heard.set(), on_quiet=fail)

    thread.run(start(), timeout=SOON_S)
    land(first)
    land(second)
    assert heard.wait(SOON_S)
    assert "the end of a write could not be dealt with" in caplog.text


def test_an_end_is_heard_of_at_once(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "LONGEST_PAUSE", NEVER_S)
    first, second = Progress(1, 1), Progress(1, 1)
    ended = watch(thread, first, second)
    land(second)
    assert ended[1].wait(SOON_S)
    assert not ended[0].is_set()
    land(first)
    assert ended[0].wait(SOON_S)


def test_an_end_before_it_is_watched_is_heard_of(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "LONGEST_PAUSE", NEVER_S)
    progress = Progress(1, 1)
    land(progress)
    assert watch(thread, progress)[0].wait(SOON_S)


def test_a_submission_that_tells_nobody_is_asked(thread: LoopThread) -> None:
    silent = Silent(1, 1)
    (ended,) = watch(thread, silent)
    land(silent)
    assert ended.wait(SOON_S)


class Deaf(Silent):
    """A submission that neither ends nor lets itself be cancelled."""

    def cancel(self) -> None:
        return


def test_a_write_that_never_ends_is_not_quiet_for_that(thread: LoopThread) -> None:
    """It was cancelled and has not failed: only the engine's end proves anything about it."""
    silent, landed = Deaf(1, 1), Progress(1, 1)

    async def main() -> None:
        watched: Writes[int] = Writes(thread)
        for key, one in enumerate((silent, landed)):
            watched.watch(key, one, on_final=lambda *_: None, on_quiet=lambda: None)
        watched.cancel(0)
        assert not watched.are_quiet([0])
        assert not watched.are_quiet([0, 1])
        assert watched.are_quiet([7])
        silent.fail(TransportError(TransportReason.CLOSED, "the engine was destroyed"))
        watched.settle()

    thread.run(main(), timeout=SOON_S)


def test_the_end_of_an_engine_proves_nothing_about_what_had_left_it(thread: LoopThread) -> None:
    gone = TransportError(TransportReason.CLOSED, "the engine was destroyed")
    left, kept, failed = Progress(1, 1), Progress(1, 1), Progress(1, 1)

    async def main() -> None:
        watched: Writes[int] = Writes(thread)
        for key, one in enumerate((left, kept, failed)):
            watched.watch(key, one, on_final=lambda *_: None, on_quiet=lambda: None)
        left.handed(1)
        failed.handed(1)
        failed.fail(gone)
        await asyncio.sleep(0)
        for one in (left, kept, failed):
            one.fence(gone, leaves_nothing=False)
        assert [one.quiet for one in (left, kept, failed)] == [True, True, True]
        assert watched.landing([0, 1, 2, 7]) == (0, 2)

    thread.run(main(), timeout=SOON_S)
