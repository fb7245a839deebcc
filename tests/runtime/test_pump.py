"""Driving a machine: every action once and in order, whatever becomes of the others."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvferry.runtime.pump import Pump


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
