"""What the reference transport stages for tests of others."""

import numpy as np
import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors
from kvferry.transport import MemoryHub, MemoryTransport, Peer, SubmissionState


class Pair:
    def __init__(self, *, rows_per_poll: int | None) -> None:
        self.hub = MemoryHub()
        self.writer = self.hub.transport(rows_per_poll=rows_per_poll)
        self.receiver = self.hub.transport()
        self.source, self.sink = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
        self.writer.register([self.region(self.source)])
        self.peer: Peer = self.writer.open_peer(self.receiver.address(), [self.region(self.sink)])

    @staticmethod
    def region(memory: np.ndarray) -> Region:
        return Region(address=memory.ctypes.data, nbytes=memory.nbytes)

    def rows(self, count: int) -> Descriptors:
        offsets = np.arange(count) * 4
        return Descriptors.of(offsets + self.source.ctypes.data, offsets + self.sink.ctypes.data, np.full(count, 4))


def test_without_steps_a_write_is_done_when_submitted() -> None:
    pair = Pair(rows_per_poll=None)
    submission = pair.writer.submit(pair.peer, pair.rows(16))
    assert (pair.sink == 7).all()
    assert submission.poll() is SubmissionState.DONE


def test_each_poll_moves_the_next_rows() -> None:
    pair = Pair(rows_per_poll=3)
    submission = pair.writer.submit(pair.peer, pair.rows(8))
    landed = [int((pair.sink == 7).sum())]
    for _ in range(3):
        state = submission.poll()
        landed.append(int((pair.sink == 7).sum()))
    assert landed == [0, 12, 24, 32]
    assert state is SubmissionState.DONE


def test_a_stopped_peer_keeps_a_write_pending() -> None:
    pair = Pair(rows_per_poll=None)
    pair.hub.stop(pair.peer.address)
    submission = pair.writer.submit(pair.peer, pair.rows(16))
    assert submission.poll() is SubmissionState.PENDING
    assert not submission.quiet
    pair.hub.resume(pair.peer.address)
    assert submission.poll() is SubmissionState.DONE


def late_pair() -> Pair:
    pair = Pair(rows_per_poll=2)
    pair.hub.fail_late(pair.peer.address)
    submission = pair.writer.submit(pair.peer, pair.rows(16))
    assert submission.poll() is SubmissionState.FAILED
    assert not submission.quiet
    pair.source[:] = 9
    return pair


def test_a_failed_write_lands_later_with_what_the_source_holds_then() -> None:
    pair = late_pair()
    assert not pair.sink.any()
    pair.hub.land_late(pair.peer.address)
    assert (pair.sink == 9).all()


@pytest.mark.parametrize("closed", ["writer", "receiver"])
def test_a_fence_on_either_side_keeps_late_bytes_out(closed: str) -> None:
    pair = late_pair()
    transport: MemoryTransport = getattr(pair, closed)
    transport.close()
    pair.hub.land_late(pair.peer.address)
    assert not pair.sink.any()


def test_nobody_at_an_address() -> None:
    hub = MemoryHub()
    with pytest.raises(TransportError) as refusal:
        hub.transport().open_peer("memory:99", [])
    assert refusal.value.reason is TransportReason.PEER_UNREACHABLE
