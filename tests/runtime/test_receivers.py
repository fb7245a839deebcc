"""Receive engines: what a producer in doubt knows is kept from all others, and nothing more is."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.ids import EngineId, Incarnation
from kvferry.runtime.receivers import Receivers

from .over_sockets import OverSockets

LIFE = Incarnation(EngineId("p"), "e1")


class Engine(OverSockets):
    """Says in which order it was retired and closed; may take two attempts to be destroyed."""

    def __init__(self, *, stubborn: bool = False) -> None:
        super().__init__()
        self.ended: list[str] = []
        self._stubborn = stubborn

    def retire(self) -> None:
        super().retire()
        self.ended.append("retire")

    def close(self) -> None:
        super().close()
        if self._stubborn:
            self._stubborn = False
            raise TransportError(TransportReason.TIMED_OUT, "an engine call has not returned")
        self.ended.append("close")


async def nobody_says(writers: Sequence[str]) -> bool:
    raise AssertionError("the end of the engine is proof enough")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_an_engine_in_doubt_is_retired_before_it_is_destroyed_and_has_a_successor() -> None:
    async def work() -> None:
        made: list[Engine] = []
        receivers = Receivers(lambda: made.append(Engine()) or made[-1], [])
        first = await receivers.of(LIFE, "writer")
        await receivers.fence(LIFE, nobody_says)
        assert (made[0].ended, receivers.now_of(LIFE)) == (["retire", "close"], None)
        assert await receivers.of(LIFE, "writer") is made[1] is not first

    run(work())


def test_an_engine_of_a_life_that_is_over_and_quiet_leaves_its_ports_to_others() -> None:
    async def work() -> None:
        made: list[Engine] = []
        receivers = Receivers(lambda: made.append(Engine()) or made[-1], [])
        await receivers.of(LIFE, "writer")
        next_life = Incarnation(EngineId("p"), "e2")
        assert receivers.outlived_by(next_life) == [LIFE]
        await receivers.retire(LIFE)
        assert made[0].ended == ["close"]

    run(work())


class Slow(Engine):
    """Ends when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def close(self) -> None:
        self.begun.set()
        assert self.may_end.wait(10)
        super().close()


def test_closing_all_while_some_are_being_fenced_closes_all_and_fails_nobody() -> None:
    async def work() -> None:
        made: list[Slow] = []
        receivers = Receivers(lambda: made.append(Slow()) or made[-1], [])
        lives = [Incarnation(EngineId(name), "e1") for name in "abc"]
        for life in lives:
            await receivers.of(life, "writer")
        fences = [asyncio.create_task(receivers.fence(life, nobody_says)) for life in lives[:2]]
        for engine in made[:2]:
            await asyncio.to_thread(engine.begun.wait, 10)
        closing = asyncio.create_task(receivers.close())
        await asyncio.to_thread(made[2].begun.wait, 10)
        for engine in made:
            engine.may_end.set()
            await asyncio.sleep(0)
        await asyncio.gather(closing, *fences)
        assert ["close" in engine.ended for engine in made] == [True] * 3
        assert [receivers.now_of(life) for life in lives] == [None] * 3

    run(work())


def test_a_fence_that_was_not_proven_can_be_tried_again() -> None:
    async def work() -> None:
        engine = Engine(stubborn=True)
        receivers = Receivers(lambda: engine, [])
        await receivers.of(LIFE, "writer")
        with pytest.raises(TransportError, match="has not returned"):
            await receivers.fence(LIFE, nobody_says)
        assert receivers.now_of(LIFE) is engine
        await receivers.fence(LIFE, nobody_says)
        assert (engine.ended, receivers.now_of(LIFE)) == (["retire", "retire", "close"], None)

    run(work())


def test_the_first_engine_is_made_while_its_producer_is_looked_for() -> None:
    async def work() -> None:
        made: list[Engine] = []
        receivers, before = Receivers(lambda: made.append(Engine()) or made[-1], []), asyncio.all_tasks()
        receivers.prepare()
        receivers.prepare()
        await asyncio.wait(asyncio.all_tasks() - before)
        assert len(made) == 1
        assert await receivers.of(LIFE, "writer") is made[0]
        receivers.prepare()
        other = Incarnation(EngineId("q"), "e1")
        assert await receivers.of(other, "writer") is made[1]
        await receivers.close()
        assert [engine.ended for engine in made] == [["close"], ["close"]]

    run(work())


def test_an_engine_that_nobody_came_for_is_destroyed_too() -> None:
    async def work() -> None:
        made: list[Engine] = []
        receivers = Receivers(lambda: made.append(Engine()) or made[-1], [])
        receivers.prepare()
        await receivers.close()
        assert [engine.ended for engine in made] == [["close"]]

    run(work())


@pytest.mark.parametrize("is_late", [False, True], ids=["before it is asked for", "while it is waited for"])
def test_an_engine_that_could_not_be_made_is_tried_again(is_late: bool) -> None:
    async def work() -> None:
        full = TransportError(TransportReason.UNAVAILABLE, "no port is free")
        may_fail, failures, made = threading.Event(), [full], list[Engine]()

        def make() -> Engine:
            if failures:
                assert may_fail.wait(10)
                raise failures.pop()
            made.append(Engine())
            return made[-1]

        receivers, before = Receivers(make, []), asyncio.all_tasks()
        receivers.prepare()
        if is_late:
            waiting = asyncio.create_task(receivers.of(LIFE, "writer"))
            await asyncio.sleep(0)
            may_fail.set()
            with pytest.raises(TransportError, match="no port"):
                await waiting
        else:
            may_fail.set()
            await asyncio.wait(asyncio.all_tasks() - before)
        assert await receivers.of(LIFE, "writer") is made[0]
        await receivers.close()

    run(work())
