"""Fences: one at a time for each producer, and a writer of whom nothing is wanted any more needs none."""

import asyncio
import threading

import pytest

from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.protocol import ConsumerLimits, Note, Source, Span, Table
from kvferry.runtime import fencing
from kvferry.runtime.courses import Courses
from kvferry.runtime.fencing import Fences
from kvferry.runtime.producers import RemoteEngine, RemoteRank
from kvferry.runtime.pulling import Pulled, PullMaker
from kvferry.runtime.receivers import Receivers
from kvferry.testing.layouts import page, worker
from kvferry.transport import MemoryHub, MemoryTransport

from . import loopback
from .loopback import fetch, join, next_end
from .over_sockets import OverSockets
from .paired import wait_until
from .worlds import World, local_side

LIFE = Incarnation(EngineId("p"), "e1")


class Slow(MemoryTransport):
    """An engine that is destroyed when it may be."""

    may_end = threading.Event()

    def close(self) -> None:
        assert self.may_end.wait(10)
        super().close()


def test_a_fence_that_takes_long_is_not_begun_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(hub: MemoryHub, *, rows_per_poll: int | None = None) -> MemoryTransport:
        return Slow(hub, hub.transport().address(), rows_per_poll=rows_per_poll)

    layout = worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])
    pair = join([layout], layout, consumer_limits=ConsumerLimits(fence_latest=0.02))
    monkeypatch.setattr(loopback, "_memory", receive)
    try:
        pair.call(pair.producers[0].expect, TransferId("t1"))
        pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), Table(0, (3, 4, 9))))
        wait_until(lambda: pair.consumer.open_pulls != ())
        (key,) = pair.consumer.open_pulls
        pair.wire.cut = True
        pair.call(pair.consumer.on_lost, key)
        assert next_end(pair).ticket == 11
        story = pair.consumer.story
        asked = lambda: [one for one in story.of(TransferId("t1")) if "fence asked for" in one.actions]  # noqa: E731
        wait_until(lambda: len(asked()) > 3)
        Slow.may_end.set()
        assert pair.consumer.quiet.get(timeout=5) == 11
        pair.thread.run(asyncio.sleep(0.05), timeout=5)
        assert pair.received.take().counts["fences"] == 1
    finally:
        Slow.may_end.set()
        pair.close()


class Kernel(OverSockets):
    """An engine whose end stops nobody who writes here."""

    close_stops_peers = False

    def peer_is_gone(self, address: str) -> bool:
        return False


class Asked:
    """A finder that keeps whom it asked; nobody is quiet."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def find(self, source: Source) -> RemoteEngine:
        raise AssertionError

    async def placements(self, rank: RemoteRank, fingerprints: tuple[str, ...]) -> dict[str, bytes]:
        raise AssertionError

    async def is_quiet(self, rank: RemoteRank, note: Note, *, ask: int) -> bool:
        self.asked.append(rank.address)
        return False


def fences_over(receivers: Receivers, courses: Courses, finder: Asked) -> Fences:
    maker = PullMaker(local_side(World.build("small"), engine="d", epoch="e2"), "host")
    return Fences(receivers, courses, finder=finder, maker=maker)


def test_a_living_writer_of_whom_nothing_is_wanted_any_more_is_quiet() -> None:
    async def work() -> None:
        receivers = Receivers(Kernel, [])
        engine, finder = await receivers.of(LIFE, "writer"), Asked()
        assert await fences_over(receivers, Courses(lambda: 0.0), finder).prove(LIFE)
        assert (receivers.now_of(LIFE), finder.asked) == (engine, [])

    asyncio.run(asyncio.wait_for(work(), 10))


@pytest.mark.parametrize(("writer", "asked"), [("w1", ["rank1"]), ("before", ["rank0"])])
def test_a_living_writer_is_asked_also_where_its_engine_has_another_address_now(
    writer: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "FENCES", 1)
    monkeypatch.setattr(fencing, "QUIET_ASKS", 1)

    async def work() -> None:
        receivers, courses, finder = Receivers(Kernel, []), Courses(lambda: 0.0), Asked()
        await receivers.of(LIFE, writer)
        course = courses.begin_release(Pulled(RequestId("r"), TransferId("t"), Span(0, 0), ()))
        ranks = tuple(RemoteRank(f"rank{index}", "", "memory", f"w{index}") for index in range(2))
        course.engine = RemoteEngine(LIFE, "m", ranks)
        assert not await fences_over(receivers, courses, finder).prove(LIFE)
        assert finder.asked == asked

    asyncio.run(asyncio.wait_for(work(), 10))
