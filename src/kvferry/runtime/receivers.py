"""One receive engine for each life of each producer.

A producer writes into this process through an engine that nobody else's writes come by. So when a producer is
suspected, its engine alone is destroyed, which proves that nothing of its writes can land any more, and all others go
on. Closing sockets or taking registrations back would prove nothing. Where a peer writes without an engine of ours
(``cma``), only the end of the writer's process proves it, or the writer's own word. Making and destroying an engine
blocks, so both run off the loop; and the first one is made while its producer is still looked for.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvferry.errors import TransportError, TransportReason
from kvferry.ids import Incarnation
from kvferry.layout import Region
from kvferry.runtime.options import TransportFactory
from kvferry.runtime.producers import RemoteRank
from kvferry.transport import Transport

logger = logging.getLogger(__name__)


Proof = Callable[[Sequence[str]], Awaitable[bool]]
"""Whether the writers at these addresses have said that they write nothing more of what they were asked for."""


class Receivers:
    """The receive engines of one consumer rank, all over the same memory."""

    def __init__(self, make: TransportFactory, regions: Sequence[Region]) -> None:
        self._make = make
        self._regions = tuple(regions)
        self._engines: dict[Incarnation, Transport] = {}
        self._writers: dict[Incarnation, set[str]] = {}
        """The producers' own engines that were let in, by producer."""
        self._locks: dict[Incarnation, asyncio.Lock] = {}
        self._first: asyncio.Task[Transport] | None = None
        """An engine for whoever comes first; no address of it has been told to anybody."""

    def prepare(self) -> None:
        """A producer is being looked for: unless there are engines already, begin to make one for it."""
        if not self._engines and self._first is None:
            self._first = asyncio.get_running_loop().create_task(asyncio.to_thread(self._fresh))

    async def of(self, producer: Incarnation, writer: str) -> Transport:
        """The engine through which this life of a producer writes; ``writer`` is the producer's own, let in here."""
        async with self._lock(producer):
            engine = self._engines.get(producer)
            if engine is None:
                engine = self._engines[producer] = await self._new()
            admitted = self._writers.setdefault(producer, set())
            if writer not in admitted:
                await asyncio.to_thread(engine.admit, writer)
                admitted.add(writer)
            return engine

    def receive(self, producer: Incarnation, rank: RemoteRank) -> bool:
        """Whether :meth:`of` would have nothing to do or to wait for, and the rank sends what its engine receives."""
        engine = self._engines.get(producer)
        if engine is None or engine.name != rank.transport or self._lock(producer).locked():
            return False
        return rank.transport_address in self._writers.get(producer, ())

    def now_of(self, producer: Incarnation) -> Transport | None:
        """The same, if there is one now."""
        return self._engines.get(producer)

    async def fence(self, producer: Incarnation, proof: Proof) -> None:
        """See to it that nothing this producer sent can land any more. Raises ``TransportError`` when it may.

        ``proof`` is asked about writers that live and cannot be stopped from here.

        A successor is made when the producer is next heard of; its address is always another, so that a late write,
        which knows only the old one, finds nobody.
        """
        async with self._lock(producer):
            engine = self._engines.get(producer)
            if engine is None:
                return
            if engine.close_stops_peers:
                engine.retire()
            elif alive := [one for one in self._writers[producer] if not engine.peer_is_gone(one)]:
                if not await proof(alive):
                    raise TransportError(TransportReason.TIMED_OUT, f"{producer} may still write: {alive} lives")
                return  # its writers live and have stopped: the engine here goes on
            await asyncio.to_thread(engine.close)
            # Whoever closes all of them does not wait for this.
            self._engines.pop(producer, None)
            self._writers.pop(producer, None)

    def outlived_by(self, producer: Incarnation) -> list[Incarnation]:
        """Earlier lives of the same engine that still have a receive engine here."""
        return [one for one in self._engines if one.engine_id == producer.engine_id and one != producer]

    async def retire(self, producer: Incarnation) -> None:
        """Destroy the engine of a life that is over and of which nothing is under way.

        All that was asked of it is proven quiet by now, by its own word or by a fence of an earlier engine, so nobody
        will write to this one's address: it may be taken again.
        """
        async with self._lock(producer):
            self._locks.pop(producer, None)
            engine = self._engines.pop(producer, None)
            self._writers.pop(producer, None)
            if engine is not None:
                await asyncio.to_thread(engine.close)

    async def close(self) -> None:
        """Destroy all."""
        if (first := self._take_first()) is not None:
            with contextlib.suppress(TransportError):  # it could not be made
                await asyncio.to_thread((await first).close)
        while self._engines:
            producer, engine = self._engines.popitem()
            try:
                await asyncio.to_thread(engine.close)
            except TransportError as error:
                logger.warning("the receive engine for %s is not proven closed: %s", producer, error)

    async def _new(self) -> Transport:
        first = self._take_first()
        if first is None or (first.done() and first.exception() is not None):  # it may be possible now
            return await asyncio.to_thread(self._fresh)
        return await first

    def _take_first(self) -> "asyncio.Task[Transport] | None":
        first, self._first = self._first, None
        return first

    def _fresh(self) -> Transport:
        engine = self._make()
        engine.register(self._regions)
        return engine

    def _lock(self, producer: Incarnation) -> asyncio.Lock:
        return self._locks.setdefault(producer, asyncio.Lock())
