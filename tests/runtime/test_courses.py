"""What is pulled for a transfer is what the fetch that is under way for it wants, and nothing is kept of any other."""

import asyncio
import logging
import queue
from collections.abc import Iterator

import pytest

from kvferry.errors import ProtocolReason, TransportError, TransportReason
from kvferry.ids import RequestId, TransferId
from kvferry.layout import Layout
from kvferry.protocol import ConsumerLimits, Fate, Source, Span, Table, Ticket
from kvferry.runtime import Timing, fencing
from kvferry.runtime.producers import RemoteEngine
from kvferry.testing.layouts import page, worker
from kvferry.transport import MemoryHub, MemoryTransport

from . import loopback
from .loopback import SOURCE, Joined, Loopback, fetch, join, next_end, publication
from .paired import wait_until

TABLES, OTHERS = (Table(0, (3, 4, 9)),), (Table(0, (10, 11, 12)),)
SPAN = Span(0, 40)
T1, T2 = TransferId("t1"), TransferId("t2")


def layout() -> Layout:
    return worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])


@pytest.fixture
def joined(request: pytest.FixtureRequest) -> Iterator[Joined]:
    pair = join([layout()], layout(), **getattr(request, "param", {}))
    pair.source[0].bytes[:] = 7
    yield pair
    pair.close()


def written(pair: Joined) -> list[int]:
    """Blocks of the consumer in which there is anything."""
    return [index for index, block in enumerate(pair.target.bytes.reshape(16, -1)) if block.any()]


@pytest.mark.parametrize("joined", [{"consumer_limits": ConsumerLimits(fetches=1)}], indirect=True)
def test_a_transfer_that_was_refused_and_comes_again_fills_the_blocks_of_its_second_fetch(joined: Joined) -> None:
    joined.call(joined.producers[0].expect, T1)
    joined.call(joined.consumer.fetch, fetch(11, "t1", SPAN, *TABLES))
    joined.call(joined.consumer.fetch, fetch(12, "t2", SPAN, *TABLES))
    assert next_end(joined).outcome.reason is ProtocolReason.LIMIT_EXCEEDED
    assert joined.consumer.quiet.get(timeout=5) == 12
    assert joined.consumer._courses.get(T2) is None
    joined.call(joined.producers[0].publish, publication(1, "t1", 40, *TABLES))
    assert (next_end(joined).ticket, joined.consumer.quiet.get(timeout=5)) == (11, 11)
    joined.target.bytes[:] = 0
    joined.call(joined.producers[0].publish, publication(2, "t2", 40, *TABLES))
    joined.call(joined.consumer.fetch, fetch(13, "t2", SPAN, *OTHERS))
    end = next_end(joined)
    assert (end.ticket, end.outcome.fate) == (13, Fate.DONE)
    assert written(joined) == [10, 11, 12]


def test_a_second_fetch_of_a_transfer_does_not_touch_the_first_ones_blocks(joined: Joined) -> None:
    joined.call(joined.producers[0].expect, T1)
    joined.call(joined.consumer.fetch, fetch(11, "t1", SPAN, *TABLES))
    joined.call(joined.consumer.fetch, fetch(12, "t1", SPAN, *OTHERS))
    end = next_end(joined)
    assert (end.ticket, end.outcome.reason) == (12, ProtocolReason.DUPLICATE_TRANSFER)
    joined.call(joined.producers[0].publish, publication(1, "t1", 40, *TABLES))
    assert (next_end(joined).ticket, written(joined)) == (11, [3, 4, 9])


def test_a_fetch_that_is_given_up_while_its_producer_is_looked_for_leaves_nothing(joined: Joined) -> None:
    joined.call(joined.producers[0].publish, publication(1, "t1", 40, *TABLES))

    async def given_up() -> None:
        joined.consumer.fetch(fetch(11, "t1", SPAN, *TABLES))
        joined.consumer.cancel(Ticket(11))

    joined.thread.run(given_up(), timeout=5)
    assert next_end(joined).outcome.fate is Fate.ABORTED
    assert joined.producers[0].quiet.get(timeout=5) == 1
    wait_until(lambda: joined.consumer._courses.get(T1) is None)
    assert not joined.target.bytes.any()


@pytest.mark.parametrize("ticket", [None, 11])
def test_a_fetch_that_expires_while_its_producer_is_looked_for_leaves_nothing(ticket: int | None) -> None:
    pair = join([layout()], layout(), timing=Timing(pull=0.05, orphan=0.05))
    found: queue.SimpleQueue[None] = queue.SimpleQueue()

    async def find(source: Source) -> RemoteEngine:
        await asyncio.sleep(0.2)
        found.put(None)
        return await Loopback.find(pair.wire, source)

    pair.wire.find = find  # type: ignore[method-assign]
    try:
        if ticket is None:
            pair.call(pair.consumer.release, T1, RequestId("r"), SOURCE)
        else:
            pair.call(pair.consumer.fetch, fetch(ticket, "t1", SPAN, *TABLES))
            assert next_end(pair).outcome.fate is Fate.EXPIRED
        found.get(timeout=5)
        wait_until(lambda: pair.consumer._courses.get(T1) is None)
    finally:
        pair.close()


def test_a_fault_in_looking_for_a_producer_ends_the_fetch_at_once(
    joined: Joined, caplog: pytest.LogCaptureFixture
) -> None:
    async def find(source: Source) -> RemoteEngine:
        raise OSError("no more files")

    joined.wire.find = find  # type: ignore[method-assign]
    joined.call(joined.consumer.fetch, fetch(11, "t1", SPAN, *TABLES))
    assert next_end(joined).outcome.reason is ProtocolReason.TRANSPORT_FAILED
    assert joined.consumer.quiet.get(timeout=5) == 11
    assert [one.message for one in caplog.records if one.levelno >= logging.ERROR] == [
        "transfer t1: looking for its producer failed"
    ]


class Stubborn(MemoryTransport):
    """Closed, but not proven to be, until it is told that it may end."""

    may_end = False

    def close(self) -> None:
        self._closed = not self.may_end
        if not self.may_end:
            raise TransportError(TransportReason.TIMED_OUT, "an engine call has not returned")
        super().close()


def test_a_fetch_is_told_of_its_end_while_the_engine_that_receives_for_it_cannot_be_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Stubborn] = []

    def receive(hub: MemoryHub, *, rows_per_poll: int | None = None) -> MemoryTransport:
        place = hub.transport().address()
        made.append(Stubborn(hub, place, rows_per_poll=rows_per_poll))
        return made[-1]

    monkeypatch.setattr(fencing, "FENCE_PAUSE", 0.0)
    limits = ConsumerLimits(fence_after=0.05, fence_latest=0.2)
    pair = join([layout()], layout(), consumer_limits=limits, rows_per_poll=1)
    monkeypatch.setattr(loopback, "_memory", receive)
    try:
        pair.call(pair.producers[0].expect, T1)
        pair.call(pair.consumer.fetch, fetch(11, "t1", SPAN, *TABLES))
        wait_until(lambda: pair.consumer.open_pulls != ())
        (key,) = pair.consumer.open_pulls
        pair.wire.cut = True
        pair.call(pair.consumer.on_lost, key)
        assert next_end(pair).ticket == 11
        pair.wire.cut = False
        pair.call(pair.consumer.fetch, fetch(12, "t2", SPAN, *OTHERS))
        end = next_end(pair)
        assert (end.ticket, end.outcome.reason) == (12, ProtocolReason.PEER_LOST)
        assert pair.consumer.quiet.get(timeout=5) == 12
        assert pair.consumer._courses.get(T2) is None
        assert pair.consumer.quiet.empty()
        made[0].may_end = True
        assert pair.consumer.quiet.get(timeout=10) == 11
    finally:
        pair.close()
