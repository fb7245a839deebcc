"""The misbehaving transport: honest by default, and each misdeed is what it says."""

from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.layout import Region
from kvferry.plan import Descriptors
from kvferry.testing.faulty import (
    Corrupt,
    FailAfter,
    FailAndWriteLater,
    FaultyTransport,
    Hang,
    Misdeed,
    Misdeeds,
    Repeat,
    Slow,
    SwapTargets,
    WrongSource,
)
from kvferry.testing.transport_benches import MemoryBench
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.transport import MemoryHub, Peer, Submission, SubmissionState

ROWS = 10


class TestHonest(TransportConformance):
    """With nothing planned it is the transport inside, to the letter."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> MemoryBench:
        bench = MemoryBench()
        bench.writer = FaultyTransport(bench.writer, Misdeeds())  # type: ignore[assignment]
        return bench


class Pair:
    """A faulty writer and a receiver, ten rows of one byte between them, and a clock."""

    def __init__(self, *planned: Misdeed) -> None:
        self.now = 0.0
        self.misdeeds = Misdeeds(*planned, clock=lambda: self.now)
        self.hub = MemoryHub()
        self.writer = FaultyTransport(self.hub.transport(), self.misdeeds)
        self.receiver = self.hub.transport()
        self.source, self.target = np.arange(1, ROWS + 1, dtype=np.uint8), np.zeros(ROWS, np.uint8)
        self.writer.register([self._region(self.source)])
        self.receiver.register([self._region(self.target)])
        self.peer: Peer = self.writer.open_peer(self.receiver.address(), [self._region(self.target)])

    @staticmethod
    def _region(memory: np.ndarray) -> Region:
        return Region(memory.ctypes.data, memory.nbytes)

    def submit(self) -> Submission:
        index = np.arange(ROWS, dtype=np.int64)
        src, dst = index + self.source.ctypes.data, index + self.target.ctypes.data
        return self.writer.submit(self.peer, Descriptors.of(src, dst, np.ones(ROWS, np.int64)))

    @property
    def landed(self) -> int:
        return int(np.count_nonzero(self.target))


def test_slow_moves_some_rows_and_pauses() -> None:
    pair = Pair(Slow(rows=4, pause=1.0))
    submission = pair.submit()
    seen = []
    for _ in range(3):
        assert submission.poll() is SubmissionState.PENDING
        seen.append(pair.landed)
        pair.now += 1.0
    assert seen == [4, 8, 10]
    assert submission.poll() is SubmissionState.DONE
    assert (pair.target == pair.source).all()
    assert submission.quiet
    assert submission.error is None


def test_slow_stops_when_it_is_cancelled() -> None:
    pair = Pair(Slow(rows=4, pause=1.0))
    submission = pair.submit()
    submission.poll()
    submission.cancel()
    pair.now += 5.0
    assert submission.poll() is SubmissionState.FAILED
    assert (pair.landed, submission.quiet) == (4, True)


def test_fail_after_writes_so_many_rows_and_is_quiet() -> None:
    pair = Pair(FailAfter(rows=3))
    submission = pair.submit()
    assert submission.poll() is SubmissionState.FAILED
    assert (pair.landed, submission.quiet, submission.destination_quiet) == (3, True, True)
    assert submission.error is not None


def test_a_lie_is_not_quiet_until_it_has_written() -> None:
    pair = Pair(FailAndWriteLater(delay=2.0))
    submission = pair.submit()
    assert submission.poll() is SubmissionState.FAILED
    assert (pair.landed, submission.quiet) == (0, False)
    pair.source[:] = 77
    pair.now += 2.0
    assert submission.quiet
    assert (pair.target == 77).all(), "it writes what the source holds then"
    assert submission.poll() is SubmissionState.FAILED


@pytest.mark.parametrize("side", ["writer", "receiver"])
def test_a_fence_on_either_side_stops_a_lie(side: str) -> None:
    pair = Pair(FailAndWriteLater())
    submission = pair.submit()
    assert submission.poll() is SubmissionState.FAILED
    (pair.writer if side == "writer" else pair.receiver).close()
    pair.misdeeds.write_late()
    assert submission.poll() is SubmissionState.FAILED
    assert pair.landed == 0
    pair.writer.close()
    assert submission.quiet


def test_hang_does_not_end_until_the_engine_does() -> None:
    pair = Pair(Hang(rows=2))
    submission = pair.submit()
    submission.cancel()
    pair.now += 1000.0
    assert submission.poll() is SubmissionState.PENDING
    assert (pair.landed, submission.quiet) == (2, False)
    pair.writer.close()
    assert submission.poll() is SubmissionState.FAILED
    assert submission.quiet


def test_repeat_writes_twice_and_ends_after_the_second() -> None:
    pair = Pair(Repeat(delay=1.0))
    submission = pair.submit()
    assert submission.poll() is SubmissionState.PENDING
    assert pair.landed == ROWS
    pair.target[:] = 0
    pair.now += 1.0
    submission.poll()
    assert submission.poll() is SubmissionState.DONE
    assert (pair.target == pair.source).all()


def test_each_submission_takes_the_next_misdeed_and_later_ones_are_honest() -> None:
    pair = Pair(FailAfter(rows=0), Hang())
    states = [pair.submit().poll() for _ in range(3)]
    assert states == [SubmissionState.FAILED, SubmissionState.PENDING, SubmissionState.DONE]
    assert pair.misdeeds.done == [FailAfter(rows=0), Hang()]


def test_a_late_write_to_a_receiver_that_is_gone_is_over() -> None:
    pair = Pair(Slow(rows=4, pause=1.0))
    submission = pair.submit()
    submission.poll()
    pair.hub.kill(pair.receiver.address())
    pair.now += 1.0
    submission.poll()
    pair.now += 1.0
    assert submission.poll() in (SubmissionState.FAILED, SubmissionState.PENDING)
    pair.writer.close()
    assert submission.poll() is SubmissionState.FAILED
    assert isinstance(submission.error, TransportError)
    assert submission.quiet


@pytest.mark.parametrize(
    ("misdeed", "landed"),
    [
        (Corrupt(), [1 ^ 0xFF, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (Corrupt(nbytes=100, row=-1), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10 ^ 0xFF]),
        (SwapTargets(), [2, 1, 3, 4, 5, 6, 7, 8, 9, 10]),
        (WrongSource(), [1, 1, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_untruths_are_told_to_nobody(misdeed: Misdeed, landed: list[int]) -> None:
    pair = Pair(misdeed)
    submission = pair.submit()
    assert submission.poll() is SubmissionState.DONE
    assert submission.error is None
    assert submission.quiet
    assert pair.target.tolist() == landed
    assert pair.source.tolist() == list(range(1, ROWS + 1)), "the source stays as it is"
    assert pair.submit().poll() is SubmissionState.DONE
    assert pair.target.tolist() == list(range(1, ROWS + 1))


def test_two_rows_of_unequal_length_cannot_be_confused() -> None:
    pair = Pair(SwapTargets())
    src, dst = pair.source.ctypes.data, pair.target.ctypes.data
    with pytest.raises(ValueError, match="no two rows"):
        pair.writer.submit(pair.peer, Descriptors.of([src, src + 1], [dst, dst + 1], [1, 2]))
