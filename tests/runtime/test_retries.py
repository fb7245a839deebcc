"""A fetch that fails is tried again elsewhere: only in quiet blocks, in order, each producer once, never silent."""

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import DONE, Fate, FetchEnded, Outcome, Span, Table, Ticket
from kvferry.runtime import Alternative, Fetch
from kvferry.runtime.retrying import Attempt, Retries
from kvferry.testing.faulty import Corrupt, FailAndWriteLater, Misdeeds
from kvferry.testing.ferry_bench import Ferry
from kvferry.testing.ferry_process import Spec
from kvferry.testing.layouts import page, worker
from kvferry.testing.ports import free_port

from .loopback import SOURCE, Joined, fetch, join, next_end, publication
from .paired import wait_until

TABLES = (Table(0, (3, 4, 9)),)
SPAN = Span(0, 40)


def layout() -> object:
    return worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])


def with_others(*transfers: str, ticket: int = 11) -> Fetch:
    others = tuple(Alternative(TransferId(one), SOURCE) for one in transfers)
    return replace(fetch(ticket, "t1", SPAN, *TABLES), alternatives=others)


@pytest.fixture
def joined(request: pytest.FixtureRequest) -> Iterator[Joined]:
    options = getattr(request, "param", {"retries": 2})
    pair = join([layout()], layout(), **options)  # type: ignore[list-item, arg-type]
    pair.source[0].bytes[:] = 7
    yield pair
    pair.close()


def publish(pair: Joined, ticket: int, transfer: str) -> None:
    pair.call(pair.producers[0].publish, publication(ticket, transfer, 40, *TABLES))


def withdraw(pair: Joined, *transfers: str) -> None:
    for transfer in transfers:
        pair.call(pair.producers[0].withdraw, TransferId(transfer))


def test_the_second_producer_serves_and_it_is_said(joined: Joined, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.transfer")
    withdraw(joined, "t1")
    publish(joined, 2, "t2")
    joined.call(joined.consumer.fetch, with_others("t2"))
    end = next_end(joined)
    assert (end.outcome, end.ticket, end.transfer) == (DONE, 11, "t2")
    assert joined.consumer.quiet.get(timeout=5) == 11
    assert joined.consumer.quiet.empty()
    assert joined.consumer.ended.empty()
    assert (joined.target.bytes.reshape(16, -1)[3] == 7).all()
    counted = joined.received.take()
    assert counted.counts == {"retries": 1}
    assert {(one.outcome, count) for one, count in counted.ends.items()} == {("failed", 1), ("done", 1)}
    assert "transfer t1 failed; its request is tried again as t2" in caplog.text
    assert [entry.event for entry in joined.consumer.story.of(TransferId("t1"))][-1] == "to be tried again"


def test_all_are_tried_in_order_then_the_last_failure_is_told(joined: Joined) -> None:
    withdraw(joined, "t1", "t2", "t3")
    joined.call(joined.consumer.fetch, with_others("t2", "t3"))
    end = next_end(joined)
    assert (end.outcome.fate, end.transfer) == (Fate.FAILED, "t3")
    assert joined.consumer.quiet.get(timeout=5) == 11
    assert joined.received.take().counts == {"retries": 2}


def test_no_more_than_the_option_says_and_the_rest_is_released(joined: Joined) -> None:
    withdraw(joined, "t1", "t2", "t3")
    publish(joined, 4, "t4")
    joined.call(joined.consumer.fetch, with_others("t2", "t3", "t4"))
    assert (next_end(joined).transfer, joined.received.take().counts) == ("t3", {"retries": 2})
    assert joined.producers[0].quiet.get(timeout=5) == 4


@pytest.mark.parametrize("joined", [{"retries": 0}], indirect=True)
def test_without_the_option_nothing_is_tried_and_the_others_are_released(joined: Joined) -> None:
    withdraw(joined, "t1")
    publish(joined, 2, "t2")
    joined.call(joined.consumer.fetch, with_others("t2"))
    assert next_end(joined).outcome.fate is Fate.FAILED
    assert joined.producers[0].quiet.get(timeout=5) == 2
    assert not joined.target.bytes.any()


def test_what_was_not_needed_is_released(joined: Joined) -> None:
    publish(joined, 1, "t1")
    publish(joined, 2, "t2")
    joined.call(joined.consumer.fetch, with_others("t2"))
    assert next_end(joined).transfer == "t1"
    assert {joined.producers[0].quiet.get(timeout=5) for _ in range(2)} == {1, 2}


@pytest.mark.parametrize("joined", [{"retries": 1, "verify": "full", "misdeeds": Misdeeds(Corrupt())}], indirect=True)
def test_a_wrong_page_is_fetched_from_another(joined: Joined) -> None:
    publish(joined, 1, "t1")
    publish(joined, 2, "t2")
    joined.call(joined.consumer.fetch, with_others("t2"))
    assert next_end(joined).outcome == DONE
    counts = joined.received.take().counts
    assert (counts["verify_mismatches"], counts["retries"], counts["verified_pages"]) == (1, 1, 3)
    assert (joined.target.bytes.reshape(16, -1)[[3, 4]] == 7).all()


# ------------------------------------------------------------------------------------- between two attempts, by itself


class Bench:
    """The bookkeeping alone, with a loop that only moves when told."""

    def __init__(self, *, limit: int = 2, grace: float = 1000.0) -> None:
        self.loop = asyncio.new_event_loop()
        self.told: list[FetchEnded] = []
        self.retries = Retries(limit, grace=grace, loop=self.loop, clock=time.monotonic, report=self.told.append)
        self.retries.begin(Attempt(with_others("t2"), deadline=float("inf")))

    def close(self) -> None:
        self.loop.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.close()


def ended(transfer: str, outcome: Outcome) -> FetchEnded:
    return FetchEnded(TransferId(transfer), RequestId("d-t1"), Ticket(11), outcome)


FAILED = Outcome(Fate.FAILED, ProtocolReason.PEER_LOST)
ABORTED = Outcome(Fate.ABORTED, ProtocolReason.ABORTED)
EXPIRED = Outcome(Fate.EXPIRED, ProtocolReason.EXPIRED)


def test_the_next_attempt_waits_for_quiet_blocks(bench: Bench) -> None:
    following = bench.retries.next_after(ended("t1", FAILED))
    assert following is not None
    assert following.transfer == "t2"
    again = bench.retries.quiet(Ticket(11))
    assert again is not None
    assert (again.fetch.transfer, again.fetch.ticket, again.fetch.tables) == ("t2", 11, TABLES)
    assert bench.retries.quiet(Ticket(11)) is None
    assert bench.retries.next_after(ended("t2", FAILED)) is None


@pytest.mark.parametrize("outcome", [DONE, ABORTED, EXPIRED])
def test_only_failures_are_tried_again(bench: Bench, outcome: Outcome) -> None:
    assert bench.retries.next_after(ended("t1", outcome)) is None
    assert [one.transfer for one in bench.retries.over(Ticket(11))] == ["t2"]
    assert bench.retries.over(Ticket(11)) == ()


def test_after_the_deadline_nothing_is_tried(bench: Bench) -> None:
    bench.retries.begin(Attempt(with_others("t2", ticket=12), deadline=0.0))
    assert bench.retries.next_after(replace(ended("t1", FAILED), ticket=Ticket(12))) is None


def test_blocks_that_do_not_get_quiet_in_time_are_not_used_again() -> None:
    bench = Bench(grace=0.0)
    failure = ended("t1", FAILED)
    assert bench.retries.next_after(failure) is not None
    bench.loop.run_until_complete(asyncio.sleep(0.01))
    assert bench.told == [failure]
    assert [one.transfer for one in bench.retries.over(Ticket(11))] == ["t2"]
    assert bench.retries.quiet(Ticket(11)) is None
    bench.close()


def test_cancelled_between_two_attempts(bench: Bench) -> None:
    assert bench.retries.cancel(Ticket(11)) is None, "an attempt under way is the machine's to end"
    bench.retries.next_after(ended("t1", FAILED))
    end = bench.retries.cancel(Ticket(11))
    assert end is not None
    assert end.outcome == ABORTED
    bench.retries.over(Ticket(11))
    assert bench.retries.quiet(Ticket(11)) is None


def test_closing_tells_what_was_held_back(bench: Bench) -> None:
    failure = ended("t1", FAILED)
    bench.retries.next_after(failure)
    bench.retries.close()
    assert bench.told == [failure]
    bench.retries.over(Ticket(11))
    bench.retries.begin(Attempt(with_others("t2"), deadline=float("inf")))
    assert bench.retries.next_after(failure) is None


@pytest.mark.parametrize("joined", [{"retries": 1, "misdeeds": Misdeeds(FailAndWriteLater())}], indirect=True)
def test_an_engine_that_cancels_between_attempts_hears_once(joined: Joined) -> None:
    """The write is said to have failed and is in doubt for a while: there is no second attempt before that is over."""
    publish(joined, 1, "t1")
    publish(joined, 2, "t2")
    joined.call(joined.consumer.fetch, with_others("t2"))
    wait_until(lambda: any(one.event == "to be tried again" for one in joined.consumer.story.of(TransferId("t1"))))
    assert joined.consumer.ended.empty()
    joined.call(joined.consumer.cancel, Ticket(11))
    assert next_end(joined).outcome.fate is Fate.ABORTED
    assert joined.consumer.quiet.get(timeout=15) == 11
    assert {joined.producers[0].quiet.get(timeout=15) for _ in range(2)} == {1, 2}
    assert joined.consumer.ended.empty()
    assert joined.received.take().counts["retries"] == 0


@pytest.mark.parametrize("joined", [{"retries": 1, "misdeeds": Misdeeds(FailAndWriteLater())}], indirect=True)
def test_the_second_attempt_begins_when_the_first_ones_blocks_are_quiet(joined: Joined) -> None:
    publish(joined, 1, "t1")
    publish(joined, 2, "t2")
    joined.call(joined.consumer.fetch, with_others("t2"))
    assert joined.consumer.ended.get(timeout=20).outcome == DONE
    events = {name: joined.consumer.story.of(TransferId(name)) for name in ("t1", "t2")}
    assert events["t2"][0].at >= events["t1"][-1].at
    assert "DestinationReleased" in events["t1"][-1].actions


# -------------------------------------------------------------------------------------------- real engines, real deaths

TRANSPORTS = [pytest.param("cma"), pytest.param("mooncake", marks=pytest.mark.mooncake)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_producers_fetch_is_served_by_the_other_one(transport: str) -> None:
    ports = [free_port(), free_port()]
    ferries = []
    try:
        for index, port in enumerate(ports):
            ferries.append(Ferry(Spec(role="producer", transport=transport, engine=f"p{index}", port=port, large=True)))
        first, second = ferries
        first.tell("misdeed", name="Slow", args={"rows": 1, "pause": 1.0})
        spec = Spec(
            role="consumer", transport=transport, engine="d", large=True, retries=1, verify="full",
            limits={"fence_after": 0.5},
        )  # fmt: skip
        consumer = Ferry(spec)
        ferries.append(consumer)
        first.tell("publish", transfer="a", tokens=1600, salt=5)
        second.tell("publish", transfer="b", tokens=1600, salt=5)
        others = [("b", second.engine, second.url)]
        consumer.tell("fetch", transfer="a", tokens=1600, salt=5, source=[first.engine, first.url], others=others)
        consumer.wait("began", "a")
        first.kill()
        end = consumer.wait("ended", "a", seconds=30)
        assert end["fate"] == "done"
        audit = consumer.audit_until(lambda audit: not audit["held"], seconds=10)
        assert (audit["wrong"], audit["stray"], audit["free"]) == (0, 0, audit["total"])
        assert audit["counts"]["retries"] == 1
        assert audit["counts"]["verified_pages"] == 2 * 100
        theirs = second.audit_until(lambda audit: not audit["held"], seconds=10)
        assert (theirs["free"], theirs["stray"]) == (theirs["total"], 0)
    finally:
        for ferry in ferries:
            ferry.close()
