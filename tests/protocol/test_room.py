"""Pulls that a producer has no room for: what it may say of them, and what it then may not do any more."""

import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import (
    Answer,
    Failure,
    ProducerClosing,
    Published,
    PullArrived,
    PulledRequest,
    PullId,
    PullIgnored,
    Quieted,
    Span,
    StartWrite,
    Ticket,
    WriteDone,
)

from .test_producer import D0, D1, TABLES, Driver, T, err, write

U = TransferId("u")
FULL, OVER = ProtocolReason.LIMIT_EXCEEDED, ProtocolReason.ABORTED


def without_room(*, closing: bool) -> tuple[Driver, PullId]:
    """A producer that writes for a pull and takes no more."""
    driver = Driver(pulls=8 if closing else 1)
    driver.publish()
    first, actions = driver.pull()
    assert [type(one) for one in actions] == [StartWrite]
    if closing:
        driver.feed(ProducerClosing())
    return driver, first


@pytest.mark.parametrize("closing", [False, True])
def test_a_repeat_of_what_is_being_written_is_not_answered_and_the_first_is(closing: bool) -> None:
    """An answer would free the blocks that the first is writing into."""
    driver, first = without_room(closing=closing)
    again, actions = driver.pull()
    assert actions == (PullIgnored(again),)
    last = driver.feed(Quieted((write(first),)) if closing else WriteDone(write(first)))
    answers = [one for one in last if isinstance(one, Answer)]
    if closing:
        assert answers == [Answer(first, err=err(OVER), finish=True)]
    else:
        assert answers == [Answer(first, ok=(RequestId("d-t"),), finish=True)]
    assert driver.machine.open_pulls == 0


@pytest.mark.parametrize("closing", [False, True])
def test_a_repeat_of_another_rank_is_none(closing: bool) -> None:
    driver, _ = without_room(closing=closing)
    pull, actions = driver.pull(puller=D1)
    assert actions == (Answer(pull, err=err(OVER if closing else FULL), finish=True),)


def test_of_a_pull_that_repeats_in_part_only_the_rest_is_named() -> None:
    driver, _ = without_room(closing=False)
    both = tuple(PulledRequest(RequestId(f"again-{one}"), one, Span(0, 32), TABLES) for one in (T, U))
    pull = PullId(70)
    actions = driver.feed(PullArrived(pull, D0, both, 1))
    assert actions == (Answer(pull, err=(Failure(RequestId("again-u"), FULL),)), PullIgnored(pull))


def test_a_repeat_of_what_waits_for_its_prompt_is_not_answered_either() -> None:
    driver = Driver(pulls=1)
    driver.pull()
    again, actions = driver.pull()
    assert actions == (PullIgnored(again),)
    assert [type(one) for one in driver.publish()] == [StartWrite]


@pytest.mark.parametrize("published_first", [False, True])
def test_what_was_refused_for_want_of_room_is_not_written_when_there_is_some(published_first: bool) -> None:
    """The refusal has freed the blocks of the rank that asked; the same message may arrive once more."""
    driver, first = without_room(closing=False)
    publication = Published(U, Ticket(2), Span(0, 32), TABLES, 100.0)
    if published_first:
        driver.feed(publication)
    driver.pull(U)
    driver.feed(WriteDone(write(first)))
    again, actions = driver.pull(U)
    assert actions == (Answer(again, err=err(FULL, U), finish=True),)
    if not published_first:
        assert driver.feed(publication) == ()
    other, actions = driver.pull(U, puller=D1)
    assert [one.write.pull for one in actions if isinstance(one, StartWrite)] == [other]


def test_a_transfer_refused_as_one_stranger_too_many_stays_refused_to_that_rank() -> None:
    driver = Driver(strangers=1)
    driver.pull(U)
    refused, actions = driver.pull()
    assert actions == (Answer(refused, err=err(FULL), finish=True),)
    driver.publish()
    again, actions = driver.pull()
    assert actions == (Answer(again, err=err(FULL), finish=True),)
