"""A submitter that asked to be told is told once, when the submission is final, by whoever finds that."""

from collections.abc import Callable

import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.transport.progress import Progress

FAULT = TransportError(TransportReason.ENGINE_FAULT, "as told")


def land(progress: Progress) -> None:
    progress.handed(2)
    progress.landed(2)


def fail(progress: Progress) -> None:
    progress.fail(FAULT)


def fence(progress: Progress) -> None:
    progress.fence(FAULT, leaves_nothing=True)


ENDS = pytest.mark.parametrize("end", [land, fail, fence, Progress.cancel])


@ENDS
def test_the_end_is_told_once(end: Callable[[Progress], None]) -> None:
    told: list[str] = []
    progress = Progress(2, 100)
    progress.tell(lambda: told.append("ended"))
    assert told == []
    end(progress)
    progress.cancel()
    progress.fence(FAULT, leaves_nothing=False)
    assert told == ["ended"]


@ENDS
def test_an_end_that_was_before_is_told_at_once(end: Callable[[Progress], None]) -> None:
    told: list[str] = []
    progress = Progress(2, 100)
    end(progress)
    progress.tell(lambda: told.append("ended"))
    assert told == ["ended"]


def test_a_part_is_no_end() -> None:
    told: list[str] = []
    progress = Progress(2, 100)
    progress.tell(lambda: told.append("ended"))
    progress.handed(1)
    progress.landed(1)
    assert told == []


def test_the_submitter_may_ask_back_while_it_is_told() -> None:
    states = []
    progress = Progress(1, 1)
    progress.tell(lambda: states.append(progress.poll().value))
    progress.handed(1)
    progress.landed(1)
    assert states == ["done"]
