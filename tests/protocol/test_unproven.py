"""A writer that lives and cannot be reached (``cma``, stopped): its blocks stay held, and what may come is bounded."""

import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.protocol import (
    DestinationReleased,
    Fate,
    FenceDone,
    FenceFailed,
    FenceProducer,
    FetchEnded,
    ForgetPull,
    ProducerLost,
    PullKey,
    ReleaseRequested,
    SendPull,
    SourceResolved,
    Target,
    Ticket,
)

from .consumer_driver import LIFE, SOURCE, TICKET, Driver, T

NEW, OTHER = TransferId("new"), Incarnation(EngineId("Q"), "e1")


def stopped(**limits: float) -> Driver:
    """A write was under way when the producer stopped, and no fence proves anything. Each fetch has three blocks."""
    driver = Driver(fence_latest=8, **limits)
    driver.open()
    driver.feed(ProducerLost(LIFE))
    assert driver.kept(FenceProducer)
    driver.feed(FenceFailed(LIFE))
    return driver


def last(driver: Driver) -> FetchEnded:
    return driver.kept(FetchEnded)[-1]


def test_its_blocks_stay_held_however_long_that_takes_and_the_fence_is_tried_again() -> None:
    driver = stopped()
    for _ in range(50):
        driver.wait(8.1)
        driver.feed(FenceFailed(LIFE))
    assert driver.kept(DestinationReleased) == []
    assert len(driver.kept(FenceProducer)) == 51
    assert len(driver.kept(FetchEnded)) == 1
    driver.wait(8.1)
    driver.feed(FenceDone(LIFE))
    assert driver.kept(DestinationReleased) == [DestinationReleased(T, TICKET)]
    assert driver.machine.quarantined_blocks == 0


def test_a_fetch_from_it_is_refused_at_once_and_holds_nothing() -> None:
    driver = stopped()
    driver.fetch(NEW, Ticket(2))
    driver.resolve(transfer=NEW)
    assert last(driver).outcome.reason is ProtocolReason.PEER_LOST
    assert "cannot be proven" in last(driver).outcome.detail
    assert driver.kept(DestinationReleased) == [DestinationReleased(NEW, Ticket(2))]
    assert driver.kept(ForgetPull) == [ForgetPull(PullKey(NEW, 0))]
    assert driver.machine.quarantined_blocks == 3


def test_what_waited_for_the_fence_is_told_when_it_fails() -> None:
    driver = Driver()
    driver.open()
    driver.feed(ProducerLost(LIFE))
    driver.fetch(NEW, Ticket(2), seconds=480)
    driver.resolve(transfer=NEW)
    sent = len(driver.kept(SendPull))
    driver.feed(FenceFailed(LIFE))
    assert last(driver).ticket == 2
    assert last(driver).outcome.fate is Fate.FAILED
    assert len(driver.kept(SendPull)) == sent
    assert driver.kept(ForgetPull) == [ForgetPull(PullKey(NEW, 0))]
    assert driver.kept(DestinationReleased) == [DestinationReleased(NEW, Ticket(2))]


def test_below_the_bound_other_producers_go_on() -> None:
    driver = stopped(quarantined_blocks=4)
    driver.fetch(NEW, Ticket(2))
    driver.feed(SourceResolved(NEW, OTHER, False, (Target(0),)))
    driver.reply(transfer=NEW)
    assert driver.kept(SendPull)[-1].producer == OTHER


@pytest.mark.parametrize("bound", [2, 3])
def test_at_the_bound_every_new_fetch_is_refused_by_name_and_none_goes_back_unproven(bound: int) -> None:
    driver = stopped(quarantined_blocks=bound)
    driver.fetch(NEW, Ticket(2))
    assert last(driver).outcome.reason is ProtocolReason.LIMIT_EXCEEDED
    assert "held for failed fetches" in last(driver).outcome.detail
    assert driver.kept(DestinationReleased) == [DestinationReleased(NEW, Ticket(2))]
    driver.feed(FenceDone(LIFE))
    driver.fetch(TransferId("later"), Ticket(3))
    assert last(driver).ticket == 2


def test_a_full_quarantine_that_a_fence_can_empty_refuses_nobody() -> None:
    driver = Driver(quarantined_blocks=2)
    driver.open()
    driver.feed(ProducerLost(LIFE))
    driver.fetch(NEW, Ticket(2))
    assert last(driver).ticket == TICKET


def test_a_release_holds_no_block_and_is_sent_all_the_same() -> None:
    driver = stopped(quarantined_blocks=2)
    driver.feed(ReleaseRequested(NEW, last(driver).request, SOURCE, driver.now + 60))
    driver.feed(SourceResolved(NEW, OTHER, False, (Target(0),)))
    assert driver.kept(SendPull)[-1].release
