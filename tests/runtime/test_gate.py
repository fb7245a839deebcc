"""No byte moves before the device has got there: in order, off the caller's thread, and over real sockets."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import Fate, FetchEnded, Span, Table, Ticket
from kvferry.runtime import ConsumerRuntime, Fetch, Publication
from kvferry.runtime.gate import Gate
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.tally import End

from .paired import Pair, paired, wait_until
from .worlds import BLOCK, World, local_side, options_for

TOKENS = 2 * BLOCK
P_TABLES = (Table(0, (3, 4)), Table(0, (5,)))
D_TABLES = (Table(0, (8, 2)), Table(0, (7,)))


@dataclass
class Device:
    """A device whose work is done when the test says so."""

    done: bool = False
    asked: int = 0
    asked_in: set[str] = field(default_factory=set)

    def __call__(self) -> bool:
        self.asked += 1
        self.asked_in.add(threading.current_thread().name)
        return self.done


@dataclass
class Broken:
    """A device that works for a while, and then is gone."""

    after: Device

    def __call__(self) -> bool:
        if self.after():
            raise RuntimeError("the device is gone")
        return False


# ------------------------------------------------------------------------------------------------ the gate alone


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    one = LoopThread("gate")
    yield one
    one.close()


def test_calls_pass_in_their_order_and_never_before_the_device(thread: LoopThread) -> None:
    gate, passed = Gate(thread), list[str]()
    first, second = Device(), Device(done=True)
    thread.post(gate.take, None, lambda: passed.append("nothing to wait for"))
    thread.post(gate.take, first, lambda: passed.append("fetch"))
    thread.post(gate.take, second, lambda: passed.append("later fetch"))
    thread.post(gate.take, None, lambda: passed.append("cancel"))
    wait_until(lambda: first.asked > 20)
    assert passed == ["nothing to wait for"]
    first.done = True
    wait_until(lambda: len(passed) == 4)
    assert passed == ["nothing to wait for", "fetch", "later fetch", "cancel"]
    assert first.asked_in | second.asked_in == {"gate"}
    asked = first.asked
    thread.post(gate.take, None, lambda: passed.append("the gate is open again"))
    wait_until(lambda: len(passed) == 5)
    assert (len(gate), first.asked) == (0, asked)


def test_a_device_that_fails_drops_what_waits_for_it_and_nothing_else(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    gate, passed, device = Gate(thread), list[str](), Device()

    def broken() -> None:
        raise ValueError("a bug")

    thread.post(gate.take, Broken(after=device), lambda: passed.append("never"))
    thread.post(gate.take, None, broken)
    thread.post(gate.take, None, lambda: passed.append("next"))
    device.done = True
    wait_until(lambda: passed == ["next"])
    assert "the device is gone" in caplog.text
    assert "a bug" in caplog.text


def test_whoever_waits_for_a_device_that_fails_is_told_in_turn_and_the_log_once(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    gate, passed, device = Gate(thread), list[str](), Device()
    waits = Broken(after=device)
    take = partial(thread.post, gate.take)
    take_or = lambda call, told: thread.post(partial(gate.take, waits, call, otherwise=told))  # noqa: E731
    take_or(lambda: passed.append("never"), lambda: passed.append("first is told"))
    take(None, lambda: passed.append("cancel"))
    take_or(lambda: passed.append("never"), lambda: passed.append("second is told"))
    wait_until(lambda: device.asked > 20)
    device.done = True
    wait_until(lambda: len(passed) == 3)
    take_or(lambda: passed.append("never"), lambda: passed.append("third is told, at once"))
    wait_until(lambda: len(passed) == 4)
    assert passed == ["first is told", "cancel", "second is told", "third is told, at once"]
    assert caplog.text.count("RuntimeError: the device is gone") == 1


def test_threads_of_a_loop_enter_first(thread: LoopThread) -> None:
    entered: list[str] = []

    async def belong() -> None:
        thread.belong(lambda: entered.append(threading.current_thread().name))

    async def elsewhere() -> str:
        return await thread.loop.run_in_executor(None, lambda: threading.current_thread().name)

    thread.run(belong(), timeout=5)
    assert entered == ["gate"]
    assert entered == ["gate", thread.run(elsewhere(), timeout=5)]


# ------------------------------------------------------------------------------------------- the runtimes' doors


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired() as one:
        yield one


def publish(pair: Pair, ticket: int, *, ready: Device | Broken) -> None:
    published = Publication(Ticket(ticket), RequestId("p"), TransferId(f"t{ticket}"), TOKENS, P_TABLES)
    pair.producer.publish(published, ready=ready)


def fetch(pair: Pair, ticket: int, *, ready: Device | Broken | None = None) -> None:
    wanted = (RequestId("d"), TransferId(f"t{ticket}"), pair.at, Span(0, TOKENS), D_TABLES)
    pair.consumer.fetch(Fetch(Ticket(ticket), *wanted), ready=ready)


def next_end(pair: Pair) -> FetchEnded:
    return pair.ends(1)[0]


def test_what_the_device_wrote_after_the_word_and_before_the_mark_is_what_arrives(pair: Pair) -> None:
    computing = Device()
    publish(pair, 1, ready=computing)
    fetch(pair, 1)
    wait_until(lambda: computing.asked > 20)
    assert pair.consumer.take_ended() == []
    pair.source.page(0, 4)[:] = 77
    computing.done = True
    assert next_end(pair).outcome.fate is Fate.DONE
    assert np.array_equal(pair.target.page(0, 8), pair.source.page(0, 3))
    assert (pair.target.page(0, 2) == 77).all()


def test_nothing_is_fetched_into_blocks_that_the_device_still_writes(pair: Pair) -> None:
    zeroing = Device()
    publish(pair, 1, ready=Device(done=True))
    fetch(pair, 1, ready=zeroing)
    wait_until(lambda: zeroing.asked > 20)
    assert pair.producer.take_quiet() == [], "nobody has asked for it"
    pair.target.page(0, 8)[:] = 99  # the last write of whoever had the block before
    zeroing.done = True
    assert next_end(pair).outcome.fate is Fate.DONE
    assert np.array_equal(pair.target.page(0, 8), pair.source.page(0, 3))


def test_a_fetch_that_is_cancelled_while_it_waits_ends_once_and_gives_its_blocks_back(pair: Pair) -> None:
    device = Device()
    publish(pair, 1, ready=Device(done=True))
    fetch(pair, 1, ready=device)
    pair.consumer.cancel(Ticket(1))
    wait_until(lambda: device.asked > 20)
    device.done = True
    assert next_end(pair).outcome.fate is Fate.ABORTED
    wait_until(lambda: pair.consumer.take_quiet() == [Ticket(1)])
    wait_until(lambda: pair.producer.take_quiet() == [Ticket(1)])  # it was told that nobody will come
    assert not pair.target.bytes.any()


def test_a_device_that_fails_before_the_fetch_fails_the_fetch_and_its_blocks_are_quiet(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    publish(pair, 1, ready=Device(done=True))
    fetch(pair, 1, ready=Broken(after=device))
    wait_until(lambda: device.asked > 20)
    assert pair.consumer.take_ended() == []
    device.done = True
    end = next_end(pair)
    assert (end.ticket, end.outcome.fate, end.outcome.reason) == (1, Fate.FAILED, ProtocolReason.DEVICE_FAILED)
    wait_until(lambda: pair.consumer.take_quiet() == [Ticket(1)])
    wait_until(lambda: pair.producer.take_quiet() == [Ticket(1)])  # it was told that nobody will come
    assert not pair.target.bytes.any()
    assert caplog.text.count("RuntimeError: the device is gone") == 1
    assert pair.consumer.take_interval().ends == {End("consumer", "failed", "device-failed"): 1}


def test_a_device_that_fails_before_the_prompt_is_computed_withdraws_it(pair: Pair) -> None:
    device = Device()
    publish(pair, 1, ready=Broken(after=device))
    fetch(pair, 1)
    wait_until(lambda: device.asked > 20)
    device.done = True
    end = next_end(pair)
    assert (end.outcome.fate, end.outcome.reason) == (Fate.FAILED, ProtocolReason.ABORTED)
    wait_until(lambda: pair.producer.take_quiet() == [Ticket(1)])
    wait_until(lambda: pair.consumer.take_quiet() == [Ticket(1)])
    assert not pair.target.bytes.any()


def test_a_second_publication_of_a_failing_device_takes_nothing_from_the_first(pair: Pair) -> None:
    publish(pair, 1, ready=Device(done=True))
    again = Publication(Ticket(2), RequestId("p"), TransferId("t1"), TOKENS, P_TABLES)
    pair.producer.publish(again, ready=Broken(after=Device(done=True)))
    wait_until(lambda: pair.producer.take_quiet() == [Ticket(2)])
    fetch(pair, 1)
    assert next_end(pair).outcome.fate is Fate.DONE


def test_a_runtime_that_closes_while_the_device_works_gives_all_blocks_back(pair: Pair) -> None:
    never = Device()
    publish(pair, 1, ready=never)
    fetch(pair, 2, ready=never)
    wait_until(lambda: never.asked > 20)
    pair.consumer.close()
    pair.producer.close()
    assert [end.outcome.fate for end in pair.consumer.take_ended()] == [Fate.FAILED]
    assert (pair.consumer.take_quiet(), pair.producer.take_quiet()) == ([Ticket(2)], [Ticket(1)])
    assert not pair.target.bytes.any()


def test_a_device_that_cannot_be_chosen_is_an_error_of_the_constructor() -> None:
    def enter() -> None:
        raise RuntimeError("no such device")

    before = set(threading.enumerate())
    side = local_side(World.build("small"), engine="d", epoch="e")
    with pytest.raises(RuntimeError, match="no such device"):
        ConsumerRuntime(side, replace(options_for("cma"), enter_thread=enter))
    assert set(threading.enumerate()) == before
