"""Both machines, joined over a network that loses, repeats and reorders: whatever happens, nothing is reused early.

The promises themselves are asserted in ``kvferry.testing.joined`` after every event; this file decides what happens.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvferry.errors import ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol import Announced, Fate, FetchAborted, ReleaseOrdered, SourceRefused, Withdrawn
from kvferry.testing.joined import Joined

TRANSFERS = [TransferId(f"t{index}") for index in range(3)]
transfers = st.sampled_from(TRANSFERS)
ranks = st.integers(0, 1)
picks = st.integers(0, 10_000)


class Bad(RuleBasedStateMachine):
    """Any order of anything."""

    world: Joined

    @initialize(producers=st.integers(1, 2), consumers=st.integers(1, 2))
    def begin(self, producers: int, consumers: int) -> None:
        self.world = Joined(producers, consumers)

    def producer(self, rank: int) -> int:
        return rank % len(self.world.producers)

    def consumer(self, rank: int) -> int:
        return rank % len(self.world.consumers)

    @rule(transfer=transfers)
    def announce(self, transfer: TransferId) -> None:
        self.world.announce(transfer)

    @rule(transfer=transfers, rank=ranks)
    def publish(self, transfer: TransferId, rank: int) -> None:
        self.world.publish(transfer, self.producer(rank))

    @rule(transfer=transfers, rank=ranks)
    def withdraw(self, transfer: TransferId, rank: int) -> None:
        self.world.tell_producer(self.producer(rank), Withdrawn(transfer))

    @rule(transfer=transfers, rank=ranks)
    def release_order(self, transfer: TransferId, rank: int) -> None:
        self.world.tell_producer(self.producer(rank), ReleaseOrdered((transfer,)))

    @rule(transfer=transfers, rank=ranks)
    def fetch(self, transfer: TransferId, rank: int) -> None:
        self.world.fetch(transfer, self.consumer(rank))

    @rule(rank=ranks, pick=picks)
    def abort(self, rank: int, pick: int) -> None:
        known = sorted(self.world.consumers[self.consumer(rank)].fetched)
        ticket = known[pick % len(known)] if known else self.world.ticket()
        self.world.tell_consumer(self.consumer(rank), FetchAborted(ticket))

    @rule(rank=ranks, pick=picks, found=st.booleans())
    def resolve(self, rank: int, pick: int, found: bool) -> None:
        consumer = self.world.consumers[self.consumer(rank)]
        if not consumer.asked:
            return
        transfer = sorted(consumer.asked)[pick % len(consumer.asked)]
        if found or pick % 4:
            self.world.resolve(self.consumer(rank), transfer)
        else:
            del consumer.asked[transfer]
            refused = SourceRefused(transfer, ProtocolReason.INCOMPATIBLE_PEER)
            self.world.tell_consumer(self.consumer(rank), refused)

    @precondition(lambda self: self.world.network)
    @rule(pick=picks)
    def deliver(self, pick: int) -> None:
        self.world.deliver(pick % len(self.world.network))

    @precondition(lambda self: self.world.network)
    @rule(pick=picks)
    def deliver_twice(self, pick: int) -> None:
        self.world.deliver(pick % len(self.world.network), keep=True)

    @precondition(lambda self: self.world.network)
    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        del self.world.network[pick % len(self.world.network)]

    @precondition(lambda self: self.world.network)
    @rule(pick=picks)
    def refuse(self, pick: int) -> None:
        self.world.refuse(pick % len(self.world.network))

    @rule(rank=ranks, sure=st.integers(0, 3))
    def kill_consumer(self, rank: int, sure: int) -> None:
        if not sure:
            self.world.kill_consumer(self.consumer(rank))

    @rule(rank=ranks, pick=picks, how=st.sampled_from(["done", "quiet", "doubt"]))
    def settle_write(self, rank: int, pick: int, how: str) -> None:
        rank = self.producer(rank)
        writes = sorted(self.world.producers[rank].writes, key=str)
        if not writes:
            return
        write = writes[pick % len(writes)]
        if how == "done":
            self.world.end_write(rank, write)
        else:
            self.world.fail_write(rank, write, quiet=how == "quiet")

    @rule(rank=ranks, landing=st.booleans())
    def prove(self, rank: int, landing: bool) -> None:
        if self.world.producers[self.producer(rank)].proofs:
            self.world.prove(self.producer(rank), landing=landing)

    @rule(rank=ranks, pick=picks, works=st.booleans())
    def fence(self, rank: int, pick: int, works: bool) -> None:
        fences = self.world.consumers[self.consumer(rank)].fences
        if fences:
            self.world.fence(self.consumer(rank), pick % len(fences), works=works)

    @rule(producer=ranks, consumer=ranks)
    def cut(self, producer: int, consumer: int) -> None:
        self.world.cut(self.producer(producer), self.consumer(consumer))

    @rule()
    def restart(self) -> None:
        self.world.restart_producers()

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 31.0, 130.0]))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.settle()
        for producer in self.world.producers:
            assert set(producer.ended) == producer.published == set(producer.released)
            assert not producer.pulls
            assert not producer.machine.held
        for consumer in self.world.consumers:
            if consumer.dead:
                continue
            assert set(consumer.ended) == consumer.fetched == set(consumer.released)
            assert not consumer.machine.held


Bad.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestBad = Bad.TestCase


@pytest.mark.parametrize("landing", [True, False])
def test_what_may_still_land_when_the_writers_engine_is_gone_is_fenced_by_the_consumer(landing: bool) -> None:
    """The model holds that no block is given back while a byte may still land in it."""
    world = Joined(1, 1)
    world.publish(TRANSFERS[0], 0)
    ticket = world.fetch(TRANSFERS[0], 0)
    world.resolve(0, TRANSFERS[0])
    while world.network:
        world.deliver(0)
    producer, consumer = world.producers[0], world.consumers[0]
    world.fail_write(0, next(iter(producer.writes)), quiet=False)
    world.prove(0, landing=landing)
    while world.network:
        world.deliver(0)
    assert consumer.released[ticket] == (0 if landing else 1)
    world.settle()
    assert (consumer.released[ticket], consumer.generations.total()) == (1, int(landing))
    assert set(producer.released) == producer.published


@pytest.mark.parametrize("pull_first", [True, False])
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_good_day(producers: int, consumers: int, pull_first: bool) -> None:
    """Any shape, in either order: everybody is done, and everything is given back."""
    world = Joined(producers, consumers)
    transfer = TRANSFERS[0]

    def pull() -> None:
        for rank in range(consumers):
            world.fetch(transfer, rank)
            world.resolve(rank, transfer)
        while world.network:
            world.deliver(0)

    if pull_first:
        pull()
    for rank in range(producers):
        world.tell_producer(rank, Announced(transfer, world.now + 60))
        world.publish(transfer, rank)
    if not pull_first:
        pull()
    world.settle()
    for consumer in world.consumers:
        assert [one.outcome.fate for one in consumer.outcomes.values()] == [Fate.DONE]
        assert set(consumer.released) == consumer.fetched
    for producer in world.producers:
        assert set(producer.released) == producer.published
    assert world.now < 5
