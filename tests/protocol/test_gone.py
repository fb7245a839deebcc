"""Peers that vanish: a producer keeps nothing for somebody who is known not to come, at whatever moment that was."""

import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol import (
    Announced,
    ConsumerLost,
    Fate,
    LeaseEnded,
    PeerAborted,
    ProducerTick,
    Published,
    PullRefused,
    Quieted,
    SourceReleased,
    Ticket,
    WriteDone,
    WriteFailed,
)
from kvferry.testing.joined import SPAN, Joined

from .test_producer import D0, D1, TABLES, TICKET, Driver, T, only, write

FAILED = ProtocolReason.TRANSPORT_FAILED


def driver() -> Driver:
    return Driver(lost_grace=5, side_wait=60)


def ended(one: Driver) -> list[float]:
    """When the lease ended and when its blocks were released, of a driver that stamps nothing: by waiting."""
    return [len(one.kept(LeaseEnded)), len(one.kept(SourceReleased))]


@pytest.mark.parametrize("quiet", [True, False])
def test_a_write_that_fails_because_its_consumer_died_keeps_the_blocks_for_seconds(quiet: bool) -> None:
    """Its pull is answered by then, so the loss of the connection finds no open pull: nobody says a word any more."""
    one = driver()
    one.publish(seconds=480)
    pull, _ = one.pull()
    one.feed(WriteFailed(write(pull), FAILED, quiet=quiet))
    if not quiet:
        one.wait(4)
        one.feed(WriteFailed(write(pull), FAILED, quiet=True))
    one.feed(ConsumerLost((pull,)))
    one.wait(5.1)
    assert only(one.kept(LeaseEnded), LeaseEnded).outcome.fate is Fate.EXPIRED
    assert one.kept(SourceReleased) == [SourceReleased(T, TICKET)]


def test_a_rank_that_gives_up_after_the_deadline_changes_nothing_for_a_write_in_doubt() -> None:
    """The lease is overdue, and ends when the write is proven quiet; there is no other deadline to set."""
    one = driver()
    one.publish(seconds=20)
    pull, _ = one.pull(expected=2)
    one.feed(WriteFailed(write(pull), FAILED, quiet=False))
    one.wait(25)
    one.feed(PeerAborted(D0, T, expected=2))
    assert ended(one) == [0, 0]
    one.feed(Quieted((write(pull),)))
    assert ended(one) == [1, 1]


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("published_first", [True, False])
def test_a_pull_that_the_driver_refused_is_remembered(published_first: bool, announced: bool) -> None:
    one = driver()
    if announced or not published_first:
        one.feed(Announced(T, 480))
    if published_first:
        one.publish(seconds=480)
    one.feed(PullRefused(D0, (T, TransferId("never heard of"))))
    if not published_first:
        one.wait(30)
        one.publish(seconds=480)
    one.wait(4.9)
    assert ended(one) == [0, 0]
    one.wait(0.2)
    assert ended(one) == [1, 1]


def test_a_refused_rank_that_comes_again_has_all_the_time_there_is() -> None:
    """The layout that the producer lacked is sent with the second pull."""
    one = driver()
    one.feed(Announced(T, 480))
    one.feed(PullRefused(D0, (T,)))
    pull, _ = one.pull()
    one.publish(seconds=480)
    one.wait(100)
    assert ended(one) == [0, 0]
    assert only(one.feed(WriteDone(write(pull))), LeaseEnded).outcome.fate is Fate.DONE


def test_a_refusal_does_not_shorten_what_others_have() -> None:
    one = driver()
    one.publish(seconds=480)
    pull, _ = one.pull(expected=2)
    one.feed(PullRefused(D0, (T,)))
    one.feed(WriteDone(write(pull)))
    one.feed(PullRefused(D0, (T,)))
    one.wait(20)
    assert ended(one) == [0, 0]
    pull, _ = one.pull(puller=D1, expected=2)
    assert only(one.feed(WriteDone(write(pull))), LeaseEnded).outcome.fate is Fate.DONE


def test_one_rank_gave_up_and_the_other_is_never_heard_of() -> None:
    one = driver()
    one.publish(seconds=480)
    one.feed(PeerAborted(D0, T, 2))
    one.wait(5.1)
    assert ended(one) == [1, 1]


def test_a_side_that_was_served_in_part_is_waited_for_a_while() -> None:
    """The engine died between the pulls of its ranks; the rank that was served has nothing to say any more."""
    one = driver()
    one.publish(seconds=480)
    pull, _ = one.pull(expected=2)
    one.wait(100)
    one.feed(WriteDone(write(pull)))
    one.wait(59)
    assert ended(one) == [0, 0]
    one.wait(2)
    assert ended(one) == [1, 1]


def test_a_rank_that_is_being_served_is_waited_for_as_long_as_it_takes() -> None:
    one = Driver(side_wait=60, write_timeout=400)
    one.publish(seconds=480)
    first, _ = one.pull(expected=2)
    second, _ = one.pull(puller=D1, expected=2)
    one.feed(WriteDone(write(first)))
    one.wait(300)
    assert ended(one) == [0, 0]
    assert only(one.feed(WriteDone(write(second))), LeaseEnded).outcome.fate is Fate.DONE


def test_losing_one_after_the_other_does_not_add_up() -> None:
    """The grace counts from the moment when nobody was left, and no further word of the dead prolongs it."""
    one = driver()
    one.publish(seconds=480)
    pull, _ = one.pull()
    one.feed(WriteFailed(write(pull), FAILED, quiet=True))
    for _ in range(4):
        one.wait(1)
        one.feed(PullRefused(D0, (T,)))
        one.pull()
    one.wait(1.1)
    assert ended(one) == [1, 1]


STEPS = 9


@pytest.mark.parametrize("pull_first", [True, False])
@pytest.mark.parametrize("lies", [False, True])
@pytest.mark.parametrize("step", range(STEPS))
def test_a_consumer_that_dies_at_any_step_costs_seconds(step: int, lies: bool, pull_first: bool) -> None:
    """A transfer step by step over the joined machines, cut off after each of them. The deadline is 480 s away."""
    world = Joined(1, 1)
    world.tell_producer(0, Announced(T, world.now + 480))

    def publish() -> None:
        world.producers[0].published.add(Ticket(1))
        world.tell_producer(0, Published(T, Ticket(1), SPAN, TABLES, world.now + 480))

    def deliver() -> None:
        if world.network:
            world.deliver(0)

    def write_on() -> None:
        for one in list(world.producers[0].writes):
            if lies:
                world.fail_write(0, one, quiet=False)
            else:
                world.end_write(0, one)

    asked = [lambda: world.fetch(T, 0), lambda: world.resolve(0, T), deliver]
    steps = [*asked, publish] if pull_first else [publish, *asked]
    steps += [deliver, write_on, deliver, deliver, deliver]
    assert len(steps) == STEPS
    for one in steps[:step]:
        one()
    pulled = any(one is deliver for one in steps[:step])
    world.kill_consumer(0)
    if publish in steps[step:]:
        publish()
    died = world.now
    while world.producers[0].machine.held and world.now < died + 481:
        for one in list(world.producers[0].writes):
            if not world.producers[0].writes[one].told:
                world.fail_write(0, one, quiet=True)  # its peer is gone
        if world.producers[0].proofs:
            world.prove(0)
        world.pass_time(0.5)
    assert not world.producers[0].machine.held
    assert world.now < died + (20 if pulled else 481)


def test_time_alone_ends_what_nobody_ever_came_for() -> None:
    one = driver()
    one.publish(seconds=480)
    one.wait(479)
    assert ended(one) == [0, 0]
    one.wait(2)
    assert ended(one) == [1, 1]
    assert one.feed(ProducerTick()) == ()
