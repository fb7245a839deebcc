"""Driving a machine: every action once and in order, whatever becomes of the others; deadlines by waking time."""

import asyncio
import heapq
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.runtime.pump import Pump
from kvferry.transport.awake import AwakeClock


class Echo:
    """A machine that asks for each letter of a word."""

    next_deadline = None

    def handle(self, event: str, now: float) -> Iterator[str]:
        return iter(event)


def pump(perform: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> Pump[str, str]:
    return Pump(Echo(), perform, tick="", loop=loop)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    one = asyncio.new_event_loop()
    yield one
    one.close()


def test_what_arises_meanwhile_waits_for_its_turn(loop: asyncio.AbstractEventLoop) -> None:
    done: list[str] = []

    def perform(letter: str) -> None:
        done.append(letter)
        if letter == "a":
            driven.feed("xy")

    driven = pump(perform, loop)
    driven.feed("abc")
    assert "".join(done) == "abcxy"


def test_a_fault_in_one_action_keeps_no_other_from_being_carried_out(loop: asyncio.AbstractEventLoop) -> None:
    done: list[str] = []

    def perform(letter: str) -> None:
        if letter == "a":
            driven.feed("xy")
        if letter in "ay":
            raise OSError(f"no more files for {letter}")
        done.append(letter)

    driven = pump(perform, loop)
    with pytest.raises(OSError, match="for a"):
        driven.feed("abc")
    assert "".join(done) == "bcx"
    driven.feed("d")
    assert done[-1] == "d"


# -------------------------------------------------------------------------------------------------------- deadlines


class Watch:
    """A machine that is to hear of a peer every ``patience`` seconds, and says when it gives it up."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.next_deadline: float | None = None
        self.ticks = 0

    def handle(self, event: str, now: float) -> Iterator[str]:
        if event == "tick":
            self.ticks += 1
            if self.next_deadline is None or now < self.next_deadline:
                return iter(())
            self.next_deadline = None
            return iter(["lost"])
        self.next_deadline = now + self._patience
        return iter(())


class TimedLoop:
    """What a pump needs of a loop, in a time that is moved by hand."""

    def __init__(self) -> None:
        self.now = 50.0
        self._timers: list[tuple[float, int, Callable[[], None], asyncio.TimerHandle]] = []
        self._made = 0

    def get_debug(self) -> bool:
        """Asked by every handle that is made."""
        return False

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        loop: Any = self
        handle = asyncio.TimerHandle(self.now + delay, call, (), loop)
        self._made += 1
        heapq.heappush(self._timers, (handle.when(), self._made, call, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asked by every handle that is cancelled."""

    def run_until(self, end: float) -> None:
        """Time goes by; timers are called when they are due."""
        while self._timers and self._timers[0][0] <= end:
            self.now = max(self.now, self._timers[0][0])
            self.run_due()
        self.now = end

    def run_due(self) -> None:
        """What is due now, and what that makes due."""
        while self._timers and self._timers[0][0] <= self.now:
            _, _, call, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                call()


def watched(patience: float) -> tuple[TimedLoop, Pump[str, str], list[str], Watch]:
    loop, said, machine = TimedLoop(), list[str](), Watch(patience)
    fake: Any = loop
    return loop, Pump(machine, said.append, tick="tick", loop=fake, clock=AwakeClock(loop.time)), said, machine


def test_a_silent_peer_is_given_up_in_time_and_no_tick_is_wasted() -> None:
    loop, pump, said, machine = watched(4.0)
    pump.feed("heard")
    loop.run_until(53.99)
    assert (said, machine.ticks) == ([], 0)
    loop.run_until(54.01)
    assert (said, machine.ticks) == (["lost"], 1)


def test_a_peer_is_not_given_up_for_what_this_process_slept_through() -> None:
    loop, pump, said, _ = watched(4.0)
    pump.feed("heard")
    loop.run_until(51.0)
    loop.now += 30.0  # stopped; its timers are all late, and come before what the peer has sent
    loop.run_due()
    assert said == []
    pump.feed("heard")
    loop.run_until(84.9)
    assert said == []
    loop.run_until(85.1)
    assert said == ["lost"]


def test_a_peer_that_stays_silent_after_the_sleep_has_the_rest_of_its_time() -> None:
    loop, pump, said, _ = watched(4.0)
    pump.feed("heard")
    loop.run_until(51.0)
    loop.now += 30.0
    loop.run_until(83.4)
    assert said == []
    loop.run_until(84.1)
    assert said == ["lost"]


def test_what_happened_before_an_idle_hour_is_an_hour_ago() -> None:
    loop, pump, said, _ = watched(4.0)
    pump.feed("heard")
    loop.run_until(55.0)
    assert said == ["lost"]
    then = pump.now()
    loop.now += 3600.0
    assert pump.now() - then == pytest.approx(3600.0)
    pump.feed("heard")
    loop.run_until(loop.now + 3.9)
    assert said == ["lost"]
    loop.run_until(loop.now + 0.2)
    assert said == ["lost", "lost"]
