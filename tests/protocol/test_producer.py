"""The producer's machine, one story at a time. Field faults are named by their id."""

import itertools
from collections.abc import Sequence
from typing import TypeVar

import pytest

from kvferry.errors import LocalProtocolError, ProtocolReason
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import (
    DONE,
    MAX_NAME,
    Announced,
    Answer,
    CancelWrite,
    ConsumerLost,
    Failure,
    Fate,
    LeaseEnded,
    Outcome,
    PeerAborted,
    Producer,
    ProducerAction,
    ProducerClosing,
    ProducerEvent,
    ProducerLimits,
    ProducerTick,
    ProveQuiet,
    Published,
    PullArrived,
    PulledRequest,
    Puller,
    PullId,
    Quieted,
    ReleaseOrdered,
    SourceReleased,
    Span,
    StartWrite,
    Table,
    Ticket,
    Withdrawn,
    WriteDone,
    WriteFailed,
    WriteId,
    render,
)

T = TransferId("t")
TICKET = Ticket(1)
TABLES = (Table(0, (5, 6)),)
D0, D1 = Puller("D", "0"), Puller("D", "1")
QUIET_FAILURE = ProtocolReason.TRANSPORT_FAILED
A = TypeVar("A")


class Driver:
    """A machine with a clock; checks its invariants after every event."""

    def __init__(self, **limits: float) -> None:
        self.machine = Producer(ProducerLimits(**limits))  # type: ignore[arg-type]
        self.now = 0.0
        self.all: list[ProducerAction] = []
        self._pulls = itertools.count(1)

    def feed(self, event: ProducerEvent) -> tuple[ProducerAction, ...]:
        actions = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        self.all += actions
        return actions

    def wait(self, seconds: float) -> list[ProducerAction]:
        """Let time pass, with every timer that falls due."""
        until, actions = self.now + seconds, []
        while (due := self.machine.next_deadline) is not None and due <= until:
            self.now = due
            actions += self.feed(ProducerTick())
        self.now = until
        return actions

    def publish(
        self, transfer: TransferId = T, ticket: Ticket = TICKET, seconds: float = 100.0
    ) -> Sequence[ProducerAction]:
        return self.feed(Published(transfer, ticket, Span(0, 32), TABLES, self.now + seconds))

    def pull(
        self, *transfers: TransferId, puller: Puller = D0, expected: int = 1, release: bool = False
    ) -> tuple[PullId, tuple[ProducerAction, ...]]:
        pull = PullId(next(self._pulls))
        wanted = [
            PulledRequest(RequestId(f"d-{one}"), one, Span(0, 32), () if release else TABLES, release)
            for one in transfers or (T,)
        ]
        return pull, self.feed(PullArrived(pull, puller, tuple(wanted), expected))

    def kept(self, kind: type[A]) -> list[A]:
        return [action for action in self.all if isinstance(action, kind)]


def write(pull: PullId, transfer: TransferId = T) -> WriteId:
    return WriteId(pull, RequestId(f"d-{transfer}"))


def only(actions: Sequence[ProducerAction], kind: type[A]) -> A:
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def err(reason: ProtocolReason, transfer: TransferId = T) -> tuple[Failure, ...]:
    return (Failure(RequestId(f"d-{transfer}"), reason),)


@pytest.mark.parametrize("pull_first", [False, True])
def test_published_pulled_written_done(pull_first: bool) -> None:
    driver = Driver()
    if pull_first:
        pull, actions = driver.pull()
        assert actions == ()
        actions = driver.publish()
    else:
        assert driver.publish() == ()
        pull, actions = driver.pull()
    start = only(actions, StartWrite)
    assert (start.write, start.source, start.tokens) == (write(pull), TABLES, Span(0, 32))
    assert driver.feed(WriteDone(start.write)) == (
        Answer(pull, ok=(start.write.request,), finish=True),
        LeaseEnded(T, TICKET, DONE),
        SourceReleased(T, TICKET),
    )
    assert driver.machine.next_deadline is None
    assert driver.feed(WriteDone(start.write)) == ()


def test_p19_the_blocks_are_kept_until_every_rank_that_is_expected_was_served() -> None:
    """Two consumer stages pull; one of the pulls is empty, and counts."""
    driver = Driver()
    driver.publish()
    _, actions = driver.pull(puller=D0, expected=2, release=True)
    assert not driver.kept(LeaseEnded)
    assert only(actions, Answer).ok
    pull, _ = driver.pull(puller=D1, expected=2)
    actions = driver.feed(WriteDone(write(pull)))
    assert only(actions, LeaseEnded).outcome == DONE
    assert only(actions, SourceReleased).ticket == TICKET


def test_what_waits_beside_a_pull_that_completes_the_lease_is_refused() -> None:
    """Two consumers wait; the first wants nothing of the prompt, which is over with that."""
    driver = Driver()
    driver.pull(release=True)
    other, _ = driver.pull(puller=Puller("E", "0"))
    actions = driver.publish()
    assert only(actions, LeaseEnded).outcome == DONE
    assert Answer(other, err=err(ProtocolReason.UNKNOWN_TRANSFER), finish=True) in actions
    assert not driver.kept(StartWrite)


def test_errors_do_not_count_as_served() -> None:
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull()
    actions = driver.feed(WriteFailed(write(pull), QUIET_FAILURE, quiet=True))
    assert actions == (Answer(pull, err=err(QUIET_FAILURE), finish=True),)
    assert driver.machine.held == (TICKET,)
    other, _ = driver.pull(puller=Puller("E", "0"))
    assert only(driver.feed(WriteDone(write(other))), LeaseEnded).outcome == DONE


def test_c03_blocks_of_a_failed_write_are_held_until_it_is_quiet() -> None:
    """The engine says -1 and goes on: no release order, no release, until its engine is gone."""
    driver = Driver(fence_after=5.0, keep_alive=2.0)
    driver.publish()
    pull, _ = driver.pull()
    actions = driver.feed(WriteFailed(write(pull), QUIET_FAILURE, quiet=False))
    assert actions == (Answer(pull, failed=err(QUIET_FAILURE)),)
    actions = driver.feed(Withdrawn(T))
    assert only(actions, LeaseEnded).outcome == Outcome(Fate.ABORTED, ProtocolReason.ABORTED)
    actions = driver.wait(4.9)
    assert set(actions) == {Answer(pull)}
    assert only(driver.wait(0.2), ProveQuiet).writes == (write(pull),)
    assert not driver.kept(SourceReleased)
    actions = driver.feed(Quieted((write(pull),)))
    assert actions == (Answer(pull, err=err(QUIET_FAILURE), finish=True), SourceReleased(T, TICKET))


def test_the_end_of_the_writers_engine_frees_what_it_read_and_not_what_it_wrote() -> None:
    """Bytes that had left land all the same, so the consumer is told to see to that itself; so is a repeated pull."""
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull()
    again, _ = driver.pull()
    driver.feed(WriteFailed(write(pull), QUIET_FAILURE, quiet=False))
    actions = driver.feed(Quieted((write(pull),), landing=True))
    answers = [(one.pull, [failure.landing for failure in one.err]) for one in actions if isinstance(one, Answer)]
    assert answers == [(pull, [True]), (again, [True])]
    driver.feed(Withdrawn(T))
    assert driver.kept(SourceReleased) == [SourceReleased(T, TICKET)]


def test_a_write_cut_off_by_the_end_of_its_engine_may_still_land() -> None:
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull()
    actions = driver.feed(WriteFailed(write(pull), QUIET_FAILURE, quiet=True, landing=True))
    (failure,) = only(actions, Answer).err
    assert failure == Failure(RequestId("d-t"), QUIET_FAILURE, landing=True)


def test_proof_is_asked_for_again_while_nobody_answers() -> None:
    driver = Driver(fence_after=5.0)
    driver.publish()
    pull, _ = driver.pull()
    driver.feed(WriteFailed(write(pull), QUIET_FAILURE, quiet=False))
    driver.wait(16)
    assert len(driver.kept(ProveQuiet)) == 3


def test_a_late_completion_is_a_proof() -> None:
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull()
    driver.feed(WriteFailed(write(pull), QUIET_FAILURE, quiet=False))
    actions = driver.feed(WriteDone(write(pull)))
    assert actions == (Answer(pull, err=err(QUIET_FAILURE), finish=True),)
    assert driver.machine.in_doubt == ()


def test_a_write_that_never_ends_is_stopped_then_in_doubt_then_fenced() -> None:
    driver = Driver(write_timeout=60, stop_timeout=2, fence_after=5)
    driver.publish(seconds=30)
    pull, _ = driver.pull()
    actions = driver.wait(59)
    assert not driver.kept(CancelWrite)
    actions = driver.wait(2)
    assert only(actions, CancelWrite).write == write(pull)
    assert driver.machine.in_doubt == ()
    driver.wait(2)
    assert driver.machine.in_doubt == (write(pull),)
    actions = driver.wait(5)
    assert only(actions, ProveQuiet).writes == (write(pull),)
    actions = driver.feed(Quieted((write(pull),)))
    assert only(actions, LeaseEnded).outcome == Outcome(Fate.EXPIRED, ProtocolReason.EXPIRED)
    assert only(actions, SourceReleased)


def test_c10_a_lease_that_is_over_is_never_read_again() -> None:
    driver = Driver()
    driver.publish(seconds=0.2)
    actions = driver.wait(0.3)
    assert actions == [LeaseEnded(T, TICKET, Outcome(Fate.EXPIRED, ProtocolReason.EXPIRED)), SourceReleased(T, TICKET)]
    pull, actions = driver.pull()
    assert actions == (Answer(pull, err=err(ProtocolReason.EXPIRED), finish=True),)


def test_c10_a_lease_does_not_end_under_a_write_that_is_under_way() -> None:
    driver = Driver()
    driver.publish(seconds=1)
    pull, _ = driver.pull()
    driver.wait(5)
    assert not driver.kept(LeaseEnded)
    assert only(driver.feed(WriteDone(write(pull))), LeaseEnded).outcome == DONE


def test_f09_pulls_for_unknown_ids_hinder_nobody_and_expire() -> None:
    driver = Driver(stranger_wait=60, strangers=20, strangers_per_peer=20)
    strangers = [driver.pull(TransferId(f"x{index}"))[0] for index in range(20)]
    pull, actions = driver.pull(TransferId("x20"))
    assert actions == (Answer(pull, err=err(ProtocolReason.LIMIT_EXCEEDED, TransferId("x20")), finish=True),)
    driver.publish()
    pull, actions = driver.pull()
    assert only(actions, StartWrite).write == write(pull)
    driver.feed(WriteDone(write(pull)))
    ended = [action.pull for action in driver.wait(61) if isinstance(action, Answer) and action.finish]
    assert sorted(ended) == strangers
    assert driver.machine.next_deadline is None


def test_f09_one_peer_cannot_use_up_what_is_for_all() -> None:
    driver = Driver(strangers=100, strangers_per_peer=10)
    for index in range(50):
        driver.pull(TransferId(f"x{index}"))
    assert driver.machine.open_pulls == 10
    _, actions = driver.pull(TransferId("y"), puller=D1)
    assert actions == ()


def test_an_id_that_is_too_long_fails_its_request_and_is_not_remembered() -> None:
    driver, long = Driver(), TransferId("t" * (MAX_NAME + 1))
    pull, actions = driver.pull(long)
    assert actions == (Answer(pull, err=err(ProtocolReason.MALFORMED, long), finish=True),)
    assert driver.machine.ticket_of(long) is None
    assert (driver.machine.open_pulls, driver.machine.next_deadline) == (0, None)


def test_f10_an_abort_tells_the_consumer_that_waits() -> None:
    driver = Driver()
    driver.feed(Announced(T, 100))
    pull, _ = driver.pull()
    assert driver.feed(Withdrawn(T)) == (Answer(pull, err=err(ProtocolReason.ABORTED), finish=True),)
    late, actions = driver.pull(puller=D1)
    assert actions == (Answer(late, err=err(ProtocolReason.ABORTED), finish=True),)


def test_15_what_was_never_seen_may_be_given_up_and_costs_its_batch_nothing() -> None:
    driver = Driver()
    assert driver.feed(Withdrawn(TransferId("never"))) == ()
    assert driver.feed(ReleaseOrdered((TransferId("neither"), TransferId("nor")))) == ()
    assert driver.feed(ConsumerLost((PullId(99),))) == ()
    assert driver.feed(Quieted((write(PullId(99)),))) == ()
    driver.publish()
    pull, _ = driver.pull(TransferId("never"), T)
    assert only(driver.feed(WriteDone(write(pull))), LeaseEnded).outcome == DONE


def test_15_an_id_that_is_alive_is_not_published_twice_and_the_first_is_not_disturbed() -> None:
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull()
    second = Ticket(2)
    refused = Outcome(Fate.FAILED, ProtocolReason.DUPLICATE_TRANSFER)
    assert driver.publish(ticket=second) == (LeaseEnded(T, second, refused), SourceReleased(T, second))
    assert driver.publish() == ()
    actions = driver.feed(WriteDone(write(pull)))
    assert only(actions, LeaseEnded) == LeaseEnded(T, TICKET, DONE)
    third = Ticket(3)
    assert driver.publish(ticket=third) == (LeaseEnded(T, third, refused), SourceReleased(T, third))


@pytest.mark.parametrize("before_publish", [True, False])
def test_a_repeated_pull_is_refused_but_not_before_the_first_is_quiet(before_publish: bool) -> None:
    """An upstream consumer frees its blocks on the refusal."""
    driver = Driver()
    if not before_publish:
        driver.publish()
    first, _ = driver.pull()
    second, actions = driver.pull()
    assert actions == ()
    if before_publish:
        driver.publish()
    assert len(driver.kept(StartWrite)) == 1
    actions = driver.feed(WriteDone(write(first)))
    answers = [action for action in actions if isinstance(action, Answer)]
    assert answers == [
        Answer(first, ok=(write(first).request,), finish=True),
        Answer(second, err=err(ProtocolReason.DUPLICATE_TRANSFER), finish=True),
    ]


def test_a_rank_whose_write_failed_is_not_written_to_again() -> None:
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull()
    driver.feed(WriteFailed(write(pull), QUIET_FAILURE, quiet=True))
    again, actions = driver.pull()
    assert actions == (Answer(again, err=err(ProtocolReason.DUPLICATE_TRANSFER), finish=True),)


def test_each_request_of_a_pull_is_named_once_and_the_last_one_finishes_it() -> None:
    driver = Driver(keep_alive=2)
    a, b, c = (TransferId(name) for name in "abc")
    driver.publish(a, Ticket(1))
    pull, _ = driver.pull(a, b, c)
    assert driver.feed(WriteDone(write(pull, a))) == (
        Answer(pull, ok=(RequestId("d-a"),)),
        LeaseEnded(a, Ticket(1), DONE),
        SourceReleased(a, Ticket(1)),
    )
    assert driver.wait(2) == [Answer(pull)]
    driver.feed(Withdrawn(c))
    driver.publish(b, Ticket(2))
    driver.feed(WriteDone(write(pull, b)))
    named = [
        name for answer in driver.kept(Answer) for name in [*answer.ok, *(failure.request for failure in answer.err)]
    ]
    assert sorted(named) == ["d-a", "d-b", "d-c"]
    assert [answer.finish for answer in driver.kept(Answer)].count(True) == 1
    assert driver.kept(Answer)[-1].finish


def test_an_open_pull_is_kept_alive_every_two_seconds() -> None:
    driver = Driver()
    pull, _ = driver.pull()
    assert driver.wait(7) == [Answer(pull)] * 3


def test_a_consumer_that_gives_up_is_answered_when_quiet_and_frees_the_producer() -> None:
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull()
    actions = driver.feed(PeerAborted(D0, T, 1))
    assert only(actions, CancelWrite).write == write(pull)
    assert only(actions, LeaseEnded).outcome == Outcome(Fate.ABORTED, ProtocolReason.ABORTED)
    assert not driver.kept(SourceReleased)
    actions = driver.feed(WriteFailed(write(pull), ProtocolReason.ABORTED, quiet=True))
    assert actions == (Answer(pull, err=err(ProtocolReason.ABORTED), finish=True), SourceReleased(T, TICKET))


def test_a_consumer_that_gives_up_early_is_remembered_until_the_prompt_is_there() -> None:
    driver = Driver()
    driver.feed(Announced(T, 100))
    driver.feed(PeerAborted(D0, T, 2, failed=True))
    driver.feed(PeerAborted(D1, T, 2))
    actions = driver.publish()
    assert actions == (
        LeaseEnded(T, TICKET, Outcome(Fate.FAILED, ProtocolReason.PEER_FAILED)),
        SourceReleased(T, TICKET),
    )


def test_one_rank_that_gives_up_does_not_end_it_for_the_others() -> None:
    driver = Driver()
    driver.publish()
    driver.feed(PeerAborted(D0, T, 2))
    late, actions = driver.pull(puller=D0, expected=2)
    assert actions == (Answer(late, err=err(ProtocolReason.ABORTED), finish=True),)
    pull, _ = driver.pull(puller=D1, expected=2)
    actions = driver.feed(WriteDone(write(pull)))
    assert only(actions, LeaseEnded).outcome.fate is Fate.ABORTED


def test_a_lost_consumer_gives_the_blocks_back_in_seconds() -> None:
    driver = Driver(lost_grace=10, stop_timeout=2, fence_after=5)
    driver.publish(seconds=480)
    pull, _ = driver.pull()
    actions = driver.feed(ConsumerLost((pull,)))
    assert only(actions, CancelWrite)
    actions = driver.wait(8)
    driver.feed(Quieted(only(actions, ProveQuiet).writes))
    driver.wait(3)
    assert driver.kept(LeaseEnded)[0].outcome.fate is Fate.EXPIRED
    assert driver.kept(SourceReleased)


def test_a_consumer_lost_before_the_prompt_is_there_keeps_no_blocks_for_long() -> None:
    driver = Driver(lost_grace=10)
    driver.feed(Announced(T, driver.now + 480))
    pull, _ = driver.pull()
    driver.feed(ConsumerLost((pull,)))
    driver.publish(seconds=480)
    assert not driver.kept(LeaseEnded)
    driver.wait(11)
    assert driver.kept(LeaseEnded)[0].outcome.fate is Fate.EXPIRED
    assert driver.kept(SourceReleased)


def test_another_consumer_may_still_come_for_what_a_lost_one_left() -> None:
    driver = Driver(lost_grace=10)
    driver.publish(seconds=480)
    pull, _ = driver.pull()
    driver.feed(ConsumerLost((pull,)))
    driver.feed(WriteFailed(write(pull), QUIET_FAILURE, quiet=True))
    driver.wait(5)
    other, actions = driver.pull(puller=Puller("E", "0"))
    assert only(actions, StartWrite)
    driver.wait(50)
    assert only(driver.feed(WriteDone(write(other))), LeaseEnded).outcome == DONE


def test_a_routers_release_lets_writes_finish_and_bars_what_comes_later() -> None:
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull(expected=2)
    assert driver.feed(ReleaseOrdered((T,))) == ()
    _, actions = driver.pull(puller=D1, expected=2)
    assert only(actions, Answer).err
    actions = driver.feed(WriteDone(write(pull)))
    assert only(actions, Answer).ok
    assert only(actions, LeaseEnded).outcome.fate is Fate.ABORTED
    assert only(actions, SourceReleased)
    later = TransferId("later")
    driver.feed(ReleaseOrdered((later,)))
    assert driver.publish(later, Ticket(9)) == (
        LeaseEnded(later, Ticket(9), Outcome(Fate.ABORTED, ProtocolReason.ABORTED)),
        SourceReleased(later, Ticket(9)),
    )


def test_closing_ends_everything_once_quiet_and_starts_nothing() -> None:
    driver = Driver()
    driver.publish()
    pull, _ = driver.pull()
    waiting, _ = driver.pull(TransferId("u"))
    actions = driver.feed(ProducerClosing())
    assert only(actions, LeaseEnded).outcome == Outcome(Fate.FAILED, ProtocolReason.ABORTED)
    assert Answer(waiting, err=err(ProtocolReason.ABORTED, TransferId("u")), finish=True) in actions
    refused, actions = driver.pull(TransferId("v"))
    assert actions == (Answer(refused, err=err(ProtocolReason.ABORTED, TransferId("v")), finish=True),)
    assert driver.publish(TransferId("w"), Ticket(5))[-1] == SourceReleased(TransferId("w"), Ticket(5))
    driver.feed(Quieted((write(pull),)))
    assert driver.machine.held == ()
    assert driver.machine.open_pulls == 0


def test_everything_is_bounded() -> None:
    driver = Driver(leases=4, pulls=3, remembered=2)
    for index in range(6):
        driver.publish(TransferId(f"p{index}"), Ticket(index))
    assert [one.outcome.reason for one in driver.kept(LeaseEnded)] == [ProtocolReason.LIMIT_EXCEEDED] * 2
    for index in range(5):
        driver.pull(TransferId("p0"), puller=Puller("D", str(index)), expected=9)
    assert driver.machine.open_pulls == 3
    refused = [answer for answer in driver.kept(Answer) if answer.err]
    assert {failure.reason for answer in refused for failure in answer.err} == {ProtocolReason.LIMIT_EXCEEDED}


def test_ranks_of_one_side_that_expect_different_numbers_are_refused() -> None:
    driver = Driver()
    driver.publish()
    driver.pull(puller=D0, expected=2)
    pull, actions = driver.pull(puller=D1, expected=1)
    assert actions == (Answer(pull, err=err(ProtocolReason.INCOMPATIBLE_PEER), finish=True),)


def test_a_driver_that_gives_a_pull_twice_or_empty_is_told_of_its_bug() -> None:
    driver = Driver()
    pull, _ = driver.pull()
    wanted = PulledRequest(RequestId("r"), T, None, ())
    for event in (
        PullArrived(pull, D0, (wanted,), 1),
        PullArrived(PullId(50), D0, (), 1),
        PullArrived(PullId(51), D0, (wanted, wanted), 1),
        PullArrived(PullId(52), D0, (wanted,), 0),
    ):
        with pytest.raises(LocalProtocolError):
            driver.feed(event)
    driver.machine.check_invariants()


def test_the_story_of_a_transfer_can_be_told() -> None:
    driver = Driver()
    driver.feed(Announced(T, 50))
    driver.now = 1.5
    driver.publish()
    pull, _ = driver.pull()
    driver.feed(WriteDone(write(pull)))
    told = render(driver.machine.story.of(T))
    assert [line.split()[1] for line in told.splitlines()] == ["Announced", "Published", "PullArrived", "WriteDone"]
    assert "+1.500s" in told
    assert "ended done" in told
