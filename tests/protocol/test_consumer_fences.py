"""Doubt, fences and lives that are over, one story at a time. Field faults are named by their id."""

from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.protocol import (
    DONE,
    ConsumerClosing,
    DestinationReleased,
    Fate,
    FenceDone,
    FenceFailed,
    FenceProducer,
    FetchAborted,
    FetchEnded,
    ForgetProducer,
    ProducerLost,
    PullFailed,
    PullKey,
    ReplyArrived,
    SendPull,
    SourceResolved,
    Status,
    Target,
    Ticket,
)

from .consumer_driver import LIFE, TICKET, Driver, T, failed, fate, only, say, theirs


def test_c03_a_producer_that_does_not_answer_an_abort_is_fenced() -> None:
    driver = Driver(abort_timeout=5, fence_after=2)
    driver.open(0)
    driver.feed(FetchAborted(TICKET))
    driver.wait(6.9)
    assert not driver.kept(FenceProducer)
    assert only(driver.wait(0.2), FenceProducer).producer == LIFE
    assert not driver.kept(DestinationReleased)
    assert only(driver.feed(FenceDone(LIFE)), DestinationReleased).ticket == TICKET


def test_c17_another_life_that_answers_is_believed_in_nothing() -> None:
    driver = Driver()
    driver.open(0)
    actions = driver.reply(ok=True, epoch="e2")
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.STALE_INCARNATION)
    assert only(actions, ForgetProducer).producer == LIFE
    assert not driver.kept(DestinationReleased)


def test_f15_what_was_learnt_is_dropped_when_the_same_life_refuses_it_too() -> None:
    driver = Driver()
    driver.open(0)
    actions = driver.reply(status=Status.ERROR, reason=ProtocolReason.STALE_INCARNATION)
    assert only(actions, ForgetProducer).producer == LIFE
    assert only(actions, DestinationReleased).ticket == TICKET


def test_f15_a_restart_drops_exactly_that_life() -> None:
    driver = Driver()
    driver.open(0)
    other = Incarnation(EngineId("P"), "e2")
    driver.fetch(TransferId("u"), Ticket(2))
    driver.feed(SourceResolved(TransferId("u"), other, False, (Target(0),)))
    actions = driver.feed(ProducerLost(LIFE, ProtocolReason.STALE_INCARNATION))
    assert only(actions, ForgetProducer).producer == LIFE
    assert only(actions, FenceProducer).producer == LIFE
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.STALE_INCARNATION)
    assert driver.machine.held == (TICKET, Ticket(2))
    actions = driver.feed(FenceDone(LIFE))
    assert only(actions, DestinationReleased).ticket == TICKET
    reply = say(TransferId("u"), ok=True, epoch="e2")
    actions = driver.feed(ReplyArrived(PullKey(TransferId("u"), 0), reply))
    assert only(actions, FetchEnded).outcome == DONE


def test_a_lost_producer_fails_its_requests_at_once_and_its_blocks_wait_for_the_fence() -> None:
    driver = Driver()
    driver.open(0, 1)
    actions = driver.feed(ProducerLost(LIFE))
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.PEER_LOST)
    assert only(actions, FenceProducer)
    assert not driver.kept(DestinationReleased)
    assert driver.feed(ProducerLost(LIFE)) == (ForgetProducer(LIFE),)
    assert only(driver.feed(FenceDone(LIFE)), DestinationReleased)
    assert driver.feed(FenceDone(LIFE)) == ()


def test_pulls_wait_while_a_fence_is_under_way() -> None:
    """A pull sent now would name the engine that is being destroyed."""
    driver = Driver()
    driver.open(0)
    driver.feed(ProducerLost(LIFE))
    driver.fetch(TransferId("u"), Ticket(2))
    assert driver.resolve(0, transfer=TransferId("u")) == ()
    actions = driver.feed(FenceDone(LIFE))
    assert only(actions, SendPull).key == PullKey(TransferId("u"), 0)
    assert only(actions, DestinationReleased).ticket == TICKET


def test_a_fence_that_fails_is_asked_for_again_and_nothing_is_given_back_unproven() -> None:
    driver = Driver(fence_latest=8)
    driver.open(0)
    driver.feed(ProducerLost(LIFE))
    driver.feed(FenceFailed(LIFE))
    assert driver.wait(7.9) == []
    assert only(driver.wait(0.2), FenceProducer)
    assert driver.machine.held == (TICKET,)
    assert only(driver.feed(FenceDone(LIFE)), DestinationReleased)


def test_doubt_waits_for_the_other_pulls_of_that_producer_but_not_for_ever() -> None:
    driver = Driver(fence_after=2, fence_latest=8)
    driver.open(0, upstream=True)
    driver.open(0, transfer=TransferId("u"), ticket=Ticket(2), upstream=True)
    driver.feed(ReplyArrived(PullKey(T, 0), theirs(err=True)))
    assert driver.wait(7.9) == []
    actions = driver.wait(0.2)
    assert only(actions, FenceProducer)
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.TRANSPORT_FAILED, TransferId("u"), Ticket(2))
    released = [action for action in driver.feed(FenceDone(LIFE)) if isinstance(action, DestinationReleased)]
    assert {action.ticket for action in released} == {TICKET, Ticket(2)}


def test_doubt_is_fenced_as_soon_as_nothing_else_is_open() -> None:
    driver = Driver(fence_after=2, fence_latest=8)
    driver.open(0, upstream=True)
    driver.feed(ReplyArrived(PullKey(T, 0), theirs(err=True)))
    assert only(driver.wait(2.1), FenceProducer)


def test_too_many_blocks_in_doubt_are_fenced_at_once_and_not_given_back() -> None:
    driver = Driver(quarantined_blocks=5)
    for index in range(3):
        driver.open(0, transfer=TransferId(f"a{index}"), ticket=Ticket(index))
    driver.feed(PullFailed(PullKey(TransferId("a0"), 0), ProtocolReason.PEER_FAILED, quiet=False))
    assert (driver.machine.quarantined_blocks, driver.kept(FenceProducer)) == (3, [])
    actions = driver.feed(FetchAborted(Ticket(1)))
    assert only(actions, FenceProducer)
    assert not driver.kept(DestinationReleased)
    driver.feed(FenceDone(LIFE))
    assert (driver.machine.quarantined_blocks, driver.machine.held) == (0, ())


def test_clients_who_leave_cost_others_nothing_where_the_producer_says_in_time_that_it_is_quiet() -> None:
    driver = Driver(quarantined_blocks=5, abort_timeout=100)
    for index in range(3):
        driver.open(0, transfer=TransferId(f"a{index}"), ticket=Ticket(index))
    for index in range(2):
        driver.feed(FetchAborted(Ticket(index)))
    driver.wait(1.9)
    assert (driver.machine.quarantined_blocks, driver.kept(FenceProducer)) == (6, [])
    for index in range(2):
        driver.reply(transfer=TransferId(f"a{index}"), failed=ProtocolReason.ABORTED)
    assert [released.ticket for released in driver.kept(DestinationReleased)] == [Ticket(0), Ticket(1)]
    driver.wait(10)
    driver.reply(transfer=TransferId("a2"), ok=True)
    assert driver.kept(FetchEnded)[-1].outcome.fate is Fate.DONE
    assert driver.kept(FenceProducer) == []


def test_too_many_blocks_of_clients_who_left_are_fenced_soon_and_not_given_back() -> None:
    driver = Driver(quarantined_blocks=5, abort_timeout=100)
    for index in range(2):
        driver.open(0, transfer=TransferId(f"a{index}"), ticket=Ticket(index))
    for index in range(2):
        driver.feed(FetchAborted(Ticket(index)))
    driver.wait(2.1)
    assert len(driver.kept(FenceProducer)) == 1
    assert not driver.kept(DestinationReleased)
    driver.feed(FenceDone(LIFE))
    assert (driver.machine.quarantined_blocks, driver.machine.held) == (0, ())


def test_closing_ends_everything_once_fenced() -> None:
    driver = Driver()
    driver.open(0)
    driver.fetch(TransferId("u"), Ticket(2))
    actions = driver.feed(ConsumerClosing())
    assert {action.ticket for action in actions if isinstance(action, FetchEnded)} == {TICKET, Ticket(2)}
    assert only(actions, FenceProducer)
    assert only(driver.feed(FenceDone(LIFE)), DestinationReleased).ticket == TICKET
    actions = driver.fetch(TransferId("v"), Ticket(3))
    assert only(actions, FetchEnded).outcome.reason is ProtocolReason.ABORTED
