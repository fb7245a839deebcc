"""What runtimes count, of real transfers between them."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import TransferId
from kvferry.layout import Group, Layout
from kvferry.protocol import DONE, Fate, Outcome, Span, Table, Ticket
from kvferry.runtime.tally import End, Interval, Tally
from kvferry.testing.layouts import page, side_by_side, worker

from .loopback import Joined, fetch, join, next_end, publication

BLOCK, NBYTES = 16, 8
PAGE = 2 * BLOCK * NBYTES


def one_layer() -> Layout:
    components = side_by_side([page("l0", heads=(0, 2, 2), tokens=BLOCK, nbytes=NBYTES, num_blocks=8)], base=0)
    return worker(components, groups=[Group("attention", BLOCK)])


@pytest.fixture
def joined() -> Iterator[Joined]:
    pair = join([one_layer()], one_layer())
    yield pair
    pair.close()


def taken(tally: Tally) -> Interval:
    """What comes within a second; a producer counts an end after its consumer has seen it."""
    deadline = time.monotonic() + 1
    writes, receives, ends = [], [], Counter[End]()
    while time.monotonic() < deadline and not ends:
        one = tally.take()
        writes += one.writes
        receives += one.receives
        ends += one.ends
        time.sleep(0.005)
    return Interval(tuple(writes), tuple(receives), ends)


def test_a_transfer_counts_its_bytes_copies_and_times_once(joined: Joined) -> None:
    began = time.perf_counter()
    joined.call(joined.producers[0].publish, publication(1, "t1", 2 * BLOCK, Table(0, (3, 5))))
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, 2 * BLOCK), Table(0, (7, 1))))
    assert next_end(joined).outcome == DONE
    took = time.perf_counter() - began
    sent, received = taken(joined.sent), taken(joined.received)
    (write,) = sent.writes
    assert (write.nbytes, write.descriptors) == (2 * PAGE, 2)
    assert 0 < write.bind < took
    assert 0 < write.write < took
    (receive,) = received.receives
    assert receive.tokens == 2 * BLOCK
    assert 0 < receive.resolve < took
    assert 0 < receive.wait < took
    assert sent.ends == {End("producer", "done", ""): 1}
    assert received.ends == {End("consumer", "done", ""): 1}
    assert not joined.sent.take()
    assert not joined.received.take()


def test_ends_other_than_done_are_counted_by_reason_and_move_nothing(joined: Joined) -> None:
    joined.call(joined.producers[0].expect, TransferId("t1"))
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, BLOCK), Table(0, (7,))))
    joined.call(joined.consumer.cancel, Ticket(11))
    assert next_end(joined).outcome.fate is Fate.ABORTED
    received = taken(joined.received)
    assert received.ends == {End("consumer", "aborted", ProtocolReason.ABORTED.value): 1}
    assert received.receives == ()
    assert joined.sent.take().writes == ()


def test_what_was_counted_is_handed_out_once() -> None:
    tally = Tally()
    tally.ended("consumer", Outcome(Fate.FAILED, ProtocolReason.PEER_LOST, "gone"))
    tally.ended("consumer", Outcome(Fate.FAILED, ProtocolReason.PEER_LOST, "again"))
    assert tally.take().ends == {End("consumer", "failed", "peer-lost"): 2}
    assert not tally.take()
