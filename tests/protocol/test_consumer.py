"""The consumer's machine, one story at a time. Field faults are named by their id."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvferry.errors import ProtocolReason
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import (
    DONE,
    DestinationReleased,
    Fate,
    FenceDone,
    FenceFailed,
    FenceProducer,
    FetchAborted,
    FetchEnded,
    ForgetPull,
    Outcome,
    ProducerLost,
    PullFailed,
    PullKey,
    ReleaseRequested,
    Reply,
    ReplyArrived,
    Resolve,
    SendAbort,
    SendPull,
    SourceRefused,
    Status,
    Ticket,
)

from .consumer_driver import LIFE, SOURCE, TICKET, Driver, T, failed, fate, only, say, theirs


def test_resolved_pulled_served_done() -> None:
    driver = Driver()
    assert driver.fetch() == (Resolve(T, RequestId("d-t"), TICKET, SOURCE),)
    assert driver.resolve(0) == (SendPull(PullKey(T, 0), LIFE, release=False),)
    assert driver.reply(status=Status.CONTINUE) == ()
    assert driver.reply(ok=True) == (
        ForgetPull(PullKey(T, 0)),
        FetchEnded(T, RequestId("d-t"), TICKET, DONE),
        DestinationReleased(T, TICKET),
    )
    assert driver.machine.next_deadline is None
    assert driver.reply(ok=True) == ()


def test_parts_are_counted_by_position_not_by_number() -> None:
    driver = Driver()
    driver.open(0)
    for parts in ([(48, 64)], [(16, 32)], [(16, 32)], [(20, 40)]):
        assert driver.reply(status=Status.CONTINUE, parts=parts) == ()
    assert only(driver.reply(ok=True, parts=[(32, 48)]), FetchEnded).outcome == DONE


def test_a_pull_that_is_said_to_be_served_with_positions_missing_has_failed() -> None:
    driver = Driver()
    driver.open(0)
    actions = driver.reply(ok=True, parts=[(16, 48)])
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.PEER_FAILED)
    assert only(actions, DestinationReleased)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_14_done_after_the_last_of_two_producers(order: tuple[int, int]) -> None:
    driver = Driver()
    driver.open(0, 1)
    driver.reply(order[0], ok=True)
    assert not driver.kept(FetchEnded)
    assert only(driver.reply(order[1], ok=True), FetchEnded).outcome == DONE


@pytest.mark.parametrize("upstream", [False, True])
def test_14_one_failure_is_reported_once_and_blocks_wait_for_the_other(upstream: bool) -> None:
    driver = Driver()
    driver.open(0, 1, upstream=upstream)
    driver.feed(PullFailed(PullKey(T, 0), ProtocolReason.PEER_FAILED, quiet=True))
    assert fate(driver.kept(FetchEnded)[0]) == failed(ProtocolReason.PEER_FAILED)
    assert not driver.kept(DestinationReleased)
    assert bool(driver.kept(SendAbort)) != upstream
    ok = theirs(ok=True) if upstream else say(ok=True)
    actions = driver.feed(ReplyArrived(PullKey(T, 1), ok))
    assert only(actions, DestinationReleased).ticket == TICKET
    assert len(driver.kept(FetchEnded)) == 1


def test_15_an_id_that_is_alive_is_refused_and_the_first_is_not_disturbed() -> None:
    driver = Driver()
    driver.open(0)
    second = Ticket(2)
    actions = driver.fetch(ticket=second)
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.DUPLICATE_TRANSFER, ticket=second)
    assert only(actions, DestinationReleased).ticket == second
    assert driver.feed(FetchAborted(second)) == ()
    assert driver.fetch() == ()
    assert fate(only(driver.reply(ok=True), FetchEnded))[:3] == (T, TICKET, Fate.DONE)


def test_15_cancelling_what_was_never_seen_is_no_error() -> None:
    driver = Driver()
    assert driver.feed(FetchAborted(Ticket(77))) == ()
    driver.open(0)
    driver.reply(ok=True)
    assert driver.feed(FetchAborted(TICKET)) == ()


@pytest.mark.parametrize(
    "reason", [ProtocolReason.PEER_LOST, ProtocolReason.INCOMPATIBLE_PEER, ProtocolReason.PLAN_REFUSED]
)
def test_f01_a_producer_that_cannot_be_used_fails_the_request_at_once(reason: ProtocolReason) -> None:
    driver = Driver()
    driver.fetch()
    actions = driver.feed(SourceRefused(T, reason, "why"))
    assert fate(only(actions, FetchEnded)) == failed(reason)
    assert only(actions, DestinationReleased)


def test_f01_an_error_reply_fails_the_request_at_once_and_frees_its_blocks() -> None:
    """A kvferry producer refuses a whole pull only before it did anything for it."""
    driver = Driver()
    driver.open(0)
    actions = driver.reply(status=Status.ERROR, reason=ProtocolReason.PLAN_REFUSED)
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.PLAN_REFUSED)
    assert only(actions, SendAbort).key == PullKey(T, 0)
    assert only(actions, DestinationReleased)


def test_c03_a_client_that_leaves_does_not_free_blocks_under_a_write() -> None:
    driver = Driver()
    driver.open(0)
    actions = driver.feed(FetchAborted(TICKET))
    assert fate(only(actions, FetchEnded)) == (T, TICKET, Fate.ABORTED, ProtocolReason.ABORTED)
    assert only(actions, SendAbort) == SendAbort(PullKey(T, 0), LIFE, failed=False)
    assert driver.machine.held == (TICKET,)
    driver.reply(status=Status.CONTINUE)
    assert not driver.kept(DestinationReleased)
    actions = driver.reply(failed=ProtocolReason.ABORTED)
    assert only(actions, DestinationReleased).ticket == TICKET


def test_a_producer_that_is_found_too_late_is_not_pulled_from_and_its_pulls_are_forgotten() -> None:
    driver = Driver()
    driver.fetch(seconds=1)
    driver.wait(2)
    assert driver.resolve(0, 1) == (ForgetPull(PullKey(T, 0)), ForgetPull(PullKey(T, 1)))


def test_a_producer_that_is_found_twice_is_pulled_from_once() -> None:
    driver = Driver()
    driver.open(0, 1)
    driver.reply(0, ok=True)
    assert driver.resolve(0, 1) == (ForgetPull(PullKey(T, 0)),)
    assert only(driver.reply(1, ok=True), FetchEnded).outcome == DONE


@pytest.mark.parametrize("reply", [theirs(err=True), theirs(Status.ERROR), theirs(Status.LAYOUT_MISS)])
def test_a_failure_that_upstream_names_is_reported_at_once_and_is_not_quiet(reply: Reply) -> None:
    driver = Driver()
    driver.open(0, upstream=True)
    actions = driver.feed(ReplyArrived(PullKey(T, 0), reply))
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.PEER_FAILED)
    assert not driver.kept(DestinationReleased)
    for later in (theirs(ok=True), theirs(Status.FINISH), theirs(Status.CONTINUE)):
        assert driver.feed(ReplyArrived(PullKey(T, 0), later)) == ()
    assert not driver.kept(SendAbort)


def test_what_upstream_leaves_out_of_its_finish_has_expired() -> None:
    driver = Driver()
    driver.open(0, upstream=True)
    actions = driver.feed(ReplyArrived(PullKey(T, 0), theirs()))
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.EXPIRED)
    assert only(actions, DestinationReleased)


def test_one_pull_for_each_transfer_and_rank_ever_reaches_an_upstream_producer() -> None:
    driver = Driver()
    driver.open(0, upstream=True)
    driver.feed(FetchAborted(TICKET))
    driver.feed(ReplyArrived(PullKey(T, 0), theirs(ok=True)))
    driver.fetch(ticket=Ticket(2))
    actions = driver.resolve(0, upstream=True)
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.DUPLICATE_TRANSFER, ticket=Ticket(2))
    assert len(driver.kept(SendPull)) == 1
    assert not driver.kept(SendAbort)


def test_an_aborted_pull_to_upstream_may_take_as_long_as_the_fetch_would_have() -> None:
    """It cannot be told, and fencing it would cost every other request of that producer."""
    driver = Driver(abort_timeout=5, fence_after=2)
    driver.open(0, upstream=True)
    driver.feed(FetchAborted(TICKET))
    assert driver.wait(59) == []
    assert only(driver.wait(4), FenceProducer)


def test_a_fetch_that_expires_is_told_at_its_deadline() -> None:
    driver = Driver()
    driver.open(0)
    for _ in range(6):
        driver.wait(10)
        driver.reply(status=Status.CONTINUE)
    (ended,) = driver.kept(FetchEnded)
    assert ended.outcome == Outcome(Fate.EXPIRED, ProtocolReason.EXPIRED)
    assert driver.kept(SendAbort)[0].failed


def test_a_silent_kvferry_producer_is_lost_and_a_silent_upstream_one_is_computing() -> None:
    driver = Driver(silence=30)
    driver.open(0)
    driver.wait(29)
    driver.reply(status=Status.CONTINUE)
    driver.wait(29)
    assert not driver.kept(FetchEnded)
    assert fate(only(driver.wait(2), FetchEnded)) == failed(ProtocolReason.PEER_LOST)
    calm = Driver(silence=30)
    calm.open(0, upstream=True)
    assert calm.wait(59) == []


def test_a_failure_that_is_not_quiet_yet_is_reported_and_its_blocks_wait() -> None:
    driver = Driver()
    driver.open(0)
    actions = driver.reply(status=Status.CONTINUE, failed=ProtocolReason.TRANSPORT_FAILED, quiet=False)
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.TRANSPORT_FAILED)
    assert not driver.kept(DestinationReleased)
    assert only(driver.reply(failed=ProtocolReason.TRANSPORT_FAILED), DestinationReleased)


def test_a_missing_layout_is_sent_once() -> None:
    driver = Driver()
    driver.open(0)
    actions = driver.reply(status=Status.ERROR, reason=ProtocolReason.LAYOUT_MISS)
    assert only(actions, SendPull) == SendPull(PullKey(T, 0), LIFE, release=False, inline_layouts=True)
    actions = driver.reply(status=Status.ERROR, reason=ProtocolReason.LAYOUT_MISS)
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.LAYOUT_MISS)
    assert only(actions, DestinationReleased)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(Status.FINISH, ("d-t",)),
        Reply(Status.FINISH, ("d-t",), ("d-t",), kvferry=say(ok=True).kvferry),
        say(),
        say(ok=True, parts=[(0, 64)]),
        say(status=Status.CONTINUE, parts=[(16, 65)]),
    ],
    ids=["no key", "named twice", "not named", "too early", "too far"],
)
def test_a_kvferry_producer_that_contradicts_itself_is_in_doubt(reply: Reply) -> None:
    driver = Driver()
    driver.open(0)
    actions = driver.feed(ReplyArrived(PullKey(T, 0), reply))
    assert fate(only(actions, FetchEnded)) == failed(ProtocolReason.MALFORMED)
    assert not driver.kept(DestinationReleased)


def test_a_release_is_told_to_every_rank_and_reports_nothing() -> None:
    driver = Driver()
    driver.feed(ReleaseRequested(T, RequestId("d-t"), SOURCE, 60))
    actions = driver.resolve(0, 1)
    assert [action.release for action in actions if isinstance(action, SendPull)] == [True, True]
    driver.reply(0, ok=True)
    driver.feed(PullFailed(PullKey(T, 1), ProtocolReason.PEER_LOST, quiet=False))
    assert not driver.kept(FetchEnded)
    assert not driver.kept(DestinationReleased)
    assert driver.machine.next_deadline is None


@pytest.mark.parametrize("upstream", [False, True])
def test_a_fetch_aborted_before_its_pull_goes_on_as_a_release(upstream: bool) -> None:
    """Otherwise the producer would hold the prompt until it expires."""
    driver = Driver()
    driver.fetch()
    actions = driver.feed(FetchAborted(TICKET))
    assert only(actions, FetchEnded).outcome.fate is Fate.ABORTED
    assert only(actions, DestinationReleased)
    assert only(actions, Resolve)
    actions = driver.resolve(0, upstream=upstream)
    assert only(actions, SendPull).release
    driver.feed(ReplyArrived(PullKey(T, 0), theirs(ok=True) if upstream else say(ok=True)))
    assert driver.machine.next_deadline is None


def test_everything_is_bounded() -> None:
    driver = Driver(fetches=3, remembered_pulls=4)
    for index in range(5):
        driver.fetch(TransferId(f"a{index}"), Ticket(index))
    reasons = [ended.outcome.reason for ended in driver.kept(FetchEnded)]
    assert reasons == [ProtocolReason.LIMIT_EXCEEDED] * 2
    for index in range(3):
        driver.resolve(0, 1, 2, transfer=TransferId(f"a{index}"), upstream=True)


class AnyReply(RuleBasedStateMachine):
    """Whatever producers of both kinds say, in any order, the promises hold."""

    @initialize()
    def begin(self) -> None:
        self.driver = Driver(quarantined_blocks=9)
        self.tickets: list[Ticket] = []
        self.unfenced: dict[Ticket, bool] = {}

    @rule(name=st.sampled_from("abc"), ranks=st.integers(1, 3), upstream=st.booleans(), resolved=st.booleans())
    def fetch(self, name: str, ranks: int, upstream: bool, resolved: bool) -> None:
        ticket = Ticket(len(self.tickets))
        self.tickets.append(ticket)
        self.driver.fetch(TransferId(name), ticket)
        if resolved:
            self.driver.resolve(*range(ranks), transfer=TransferId(name), upstream=upstream)

    @rule(
        name=st.sampled_from("abc"),
        rank=st.integers(0, 2),
        status=st.sampled_from(Status),
        ok=st.booleans(),
        failure=st.none() | st.sampled_from(ProtocolReason),
        quiet=st.booleans(),
        epoch=st.sampled_from(["e1", "e1", "e2"]),
        ours=st.booleans(),
    )
    def reply(
        self,
        name: str,
        rank: int,
        status: Status,
        ok: bool,
        failure: ProtocolReason | None,
        quiet: bool,
        epoch: str,
        ours: bool,
    ) -> None:
        reply = say(TransferId(name), status=status, ok=ok, failed=failure, quiet=quiet, epoch=epoch, reason=failure)
        if not ours:
            reply = Reply(reply.status, reply.ok_reqs, reply.err_reqs)
        self.driver.feed(ReplyArrived(PullKey(TransferId(name), rank), reply))

    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        self.driver.feed(FetchAborted(Ticket(pick % (len(self.tickets) + 1))))

    @rule()
    def lose(self) -> None:
        self.driver.feed(ProducerLost(LIFE))

    @rule(done=st.booleans())
    def fence(self, done: bool) -> None:
        self.driver.feed(FenceDone(LIFE) if done else FenceFailed(LIFE))

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.driver.wait(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for _ in range(100):
            self.driver.wait(10)
            self.driver.feed(FenceDone(LIFE))
        ended = [action.ticket for action in self.driver.kept(FetchEnded)]
        released = [action.ticket for action in self.driver.kept(DestinationReleased)]
        assert sorted(ended) == sorted(released) == self.tickets
        sent = [action.key for action in self.driver.kept(SendPull)]
        assert len(sent) < 20 * len(self.tickets) + 1


AnyReply.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyReply = AnyReply.TestCase
