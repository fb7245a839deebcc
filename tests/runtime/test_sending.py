"""What the end of a producer's engine proves: its sources are free; what had left may still land, and is fenced."""

import time
from collections.abc import Iterator, Sequence

import pytest

from kvferry.errors import ProtocolReason, TransportError, TransportReason
from kvferry.layout import Region
from kvferry.protocol import ConsumerLimits, Fate, ProducerLimits, Span, Table, Ticket
from kvferry.testing.layouts import page, worker
from kvferry.transport import MemoryHub, Peer, Transport

from .loopback import Joined, fetch, join, next_end, publication
from .over_sockets import OverSockets
from .paired import wait_until

TABLES = (Table(0, (3, 4, 9)),)


@pytest.fixture
def joined() -> Iterator[Joined]:
    layout = worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])
    pair = join(
        [layout],
        layout,
        producer_limits=ProducerLimits(write_timeout=0.5, stop_timeout=0.1, fence_after=0.1),
        consumer_limits=ConsumerLimits(abort_timeout=3600, fence_after=0.1),
        make_writer=lambda _: OverSockets(),
    )
    yield pair
    pair.close()


def test_the_blocks_of_a_write_whose_engine_is_gone_come_back_by_a_fence_of_the_consumers(joined: Joined) -> None:
    joined.call(joined.producers[0].publish, publication(1, "t1", 40, *TABLES))
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, 40), *TABLES))
    assert next_end(joined).outcome.reason is ProtocolReason.TRANSPORT_FAILED
    assert joined.consumer.quiet.get(timeout=10) == Ticket(11)
    assert joined.received.take().counts["fences"] == 1
    assert joined.sent.take().counts["engines_renewed"] == 1


class Unforeseen(OverSockets):
    """Fails in a way that no transport should."""

    def open_peer(self, address: str, regions: Sequence[Region]) -> Peer:
        raise OSError("no more files")


def test_a_fault_before_the_first_byte_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    layout = worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])
    pair = join([layout], layout, make_writer=lambda _: Unforeseen())
    try:
        pair.call(pair.producers[0].publish, publication(1, "t1", 40, *TABLES))
        pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), *TABLES))
        end = next_end(pair)
        assert (end.outcome.reason, pair.consumer.quiet.get(timeout=5)) == (ProtocolReason.TRANSPORT_FAILED, 11)
        assert "no more files" not in end.outcome.detail
        assert "transfer t1: its consumer cannot be written to" in caplog.text
    finally:
        pair.close()


class Slow(OverSockets):
    """Takes a while to end."""

    def __init__(self, made: "list[Slow]") -> None:
        super().__init__()
        self.closed = False
        made.append(self)

    def close(self) -> None:
        time.sleep(0.05)
        super().close()
        self.closed = True


def test_closing_while_a_write_is_being_proven_quiet_leaves_no_engine_behind() -> None:
    layout = worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])
    made: list[Slow] = []
    pair = join([layout], layout, make_writer=lambda _: Slow(made))
    producer = pair.producers[0]
    try:
        pair.call(producer.publish, publication(1, "t1", 40, *TABLES))
        pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), *TABLES))
        wait_until(lambda: made[0]._writes)
        pair.call(producer.closing)
        pair.thread.run(producer.close(), timeout=5)
        assert producer.quiet.get(timeout=5) == 1
        assert [one.closed for one in made] == [True], "none is made in its place"
        assert producer.sender.address == "memory:1", "who asks for it still gets an answer"
    finally:
        pair.close()


def test_an_engine_that_could_not_be_made_anew_is_made_with_the_next_write(caplog: pytest.LogCaptureFixture) -> None:
    layout = worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])
    made: list[str] = []

    def make(hub: MemoryHub) -> Transport:
        made.append("engine")
        if len(made) == 2:
            raise TransportError(TransportReason.ENGINE_FAULT, "no ports left")
        return OverSockets() if len(made) == 1 else hub.transport()

    pair = join(
        [layout],
        layout,
        producer_limits=ProducerLimits(write_timeout=0.5, stop_timeout=0.1, fence_after=0.1),
        consumer_limits=ConsumerLimits(abort_timeout=3600, fence_after=0.1),
        make_writer=make,
    )
    try:
        pair.call(pair.producers[0].publish, publication(1, "t1", 40, *TABLES))
        pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), *TABLES))
        assert next_end(pair).outcome.reason is ProtocolReason.TRANSPORT_FAILED
        assert pair.consumer.quiet.get(timeout=10) == Ticket(11)
        assert "no new engine can be made, writes fail until one can: engine-fault: no ports left" in caplog.text
        pair.call(pair.producers[0].publish, publication(2, "t2", 40, *TABLES))
        pair.call(pair.consumer.fetch, fetch(12, "t2", Span(0, 40), *TABLES))
        assert next_end(pair).outcome.fate is Fate.DONE
        assert len(made) == 3
    finally:
        pair.close()
