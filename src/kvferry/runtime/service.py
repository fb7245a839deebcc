"""``ProducerRuntime`` and ``ConsumerRuntime``: what an embedding engine holds, one of each role for each rank.

Every method may be called from any thread and returns at once, but for the constructor and ``close``. A runtime is
up when its constructor returns: the socket is bound and, for a producer, the rank is registered.

>>> producer = ProducerRuntime(local, options)                                       # doctest: +SKIP
>>> producer.expect(transfer)                                                        # doctest: +SKIP
>>> producer.publish(Publication(ticket, request, transfer, 300, tables))            # doctest: +SKIP
>>> consumer.fetch(Fetch(ticket, request, transfer, source, Span(0, 300), tables))   # doctest: +SKIP
>>> consumer.take_ended(), producer.take_quiet()                                     # doctest: +SKIP
"""

import logging
import queue
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import FetchEnded, Source, Ticket
from kvferry.runtime.consumer import ConsumerCore
from kvferry.runtime.fetches import Fetch
from kvferry.runtime.gate import Gate, Ready
from kvferry.runtime.journal import ConsumerJournal, ProducerJournal
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.network import ConsumerNetwork, ProducerNetwork
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.producer import ProducerCore
from kvferry.runtime.publications import Publication
from kvferry.runtime.report import Report
from kvferry.runtime.sides import Local
from kvferry.runtime.stories import StoryDoor
from kvferry.runtime.tally import Interval, Tally

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
CLOSE_TIMEOUT = 4.0
"""For what lives on a runtime's thread."""
THREAD_TIMEOUT = 0.5
"""For the thread itself, beside what is left of the time before."""

_T = TypeVar("_T")


class ProducerRuntime:
    """The producer side of one rank."""

    def __init__(self, local: Local, options: RuntimeOptions) -> None:
        self._report = Report(options.report) if options.report else None
        self._tally = Tally()
        self._thread = LoopThread("kvferry-producer")
        self._gate = Gate(self._thread)
        self._core, self._network = _started(self._thread, self._start(local, options))

    def expect(self, transfer: TransferId) -> None:
        """The prompt of this transfer is being computed; a pull for it may wait."""
        self._thread.post(self._core.expect, transfer)

    def publish(self, publication: Publication, *, ready: Ready | None = None) -> None:
        """The prompt is computed, or will be when ``ready`` says so; its blocks are ours until the ticket is quiet.

        Where ``ready`` raises, the device has failed: nothing of it is sent, and the ticket is quiet.
        """
        core = self._core
        publish, spoiled = partial(core.publish, publication), partial(core.spoiled, publication)
        self._thread.post(partial(self._gate.take, ready, publish, otherwise=spoiled))

    def withdraw(self, transfer: TransferId) -> None:
        """The transfer will not be served."""
        self._thread.post(self._gate.take, None, partial(self._core.withdraw, transfer))

    def take_quiet(self) -> list[Ticket]:
        """Tickets whose blocks may be used again; each once."""
        return _drain(self._core.quiet)

    def take_interval(self) -> Interval:
        """What was counted since this was last called."""
        for name, count in self._network.take_refused().items():
            self._tally.count(name, count)
        return self._tally.take()

    @property
    def address(self) -> str:
        """Of the message socket."""
        return self._network.address

    def close(self) -> None:
        """Stop serving, destroy the engine, end the thread; safe to call twice."""
        if _closed(self._thread, self._closing, self._stop) and self._report is not None:
            self._report.close()

    def _closing(self) -> None:
        self._core.closing()
        self._gate.open()

    async def _start(self, local: Local, options: RuntimeOptions) -> tuple[ProducerCore, ProducerNetwork]:
        if options.enter_thread is not None:
            self._thread.belong(options.enter_thread)
        core = ProducerCore(local, self._thread, options, journal=ProducerJournal(local, self._report, self._tally))
        self._door = StoryDoor(local, "producer", core.story, clock=core.clock)
        try:
            await self._door.open(options.debug_dir)
            return core, await ProducerNetwork.serve(core, local, options)
        except BaseException:
            await self._door.close()
            await core.close()
            raise

    async def _stop(self) -> None:
        await self._door.close()
        await self._network.close()
        await self._core.close()


class ConsumerRuntime:
    """The consumer side of one rank."""

    def __init__(self, local: Local, options: RuntimeOptions) -> None:
        self._report = Report(options.report) if options.report else None
        self._tally = Tally()
        self._thread = LoopThread("kvferry-consumer")
        self._gate = Gate(self._thread)
        self._core, self._network = _started(self._thread, self._start(local, options))

    def fetch(self, fetch: Fetch, *, ready: Ready | None = None) -> None:
        """Fetch positions into blocks, which are ours until the ticket is quiet.

        ``ready``: says when the device no longer touches what these blocks held before; nothing is asked for sooner.
        Where it raises, the device has failed, and so has the fetch.
        """
        begin, spoiled = partial(self._core.fetch, fetch), partial(self._core.spoiled, fetch)
        self._thread.post(partial(self._gate.take, ready, begin, otherwise=spoiled))

    def release(self, transfer: TransferId, request: RequestId, source: Source) -> None:
        """Nothing is wanted of this transfer; its producer is told."""
        self._thread.post(self._core.release, transfer, request, source)

    def cancel(self, ticket: Ticket) -> None:
        """The request of this fetch is gone; it ends as aborted unless it has ended."""
        self._thread.post(self._gate.take, None, partial(self._core.cancel, ticket))

    def take_ended(self) -> list[FetchEnded]:
        """Fetches that ended; each once. Their blocks may still be in doubt."""
        return _drain(self._core.ended)

    def take_quiet(self) -> list[Ticket]:
        """Tickets whose blocks nothing writes into any more; each once."""
        return _drain(self._core.quiet)

    def take_upstream(self) -> list[EngineId]:
        """Producers that were found to run vLLM's own connector; each life of one once."""
        return _drain(self._core.met_upstream)

    def take_interval(self) -> Interval:
        """What was counted since this was last called."""
        return self._tally.take()

    def close(self) -> None:
        """End all fetches, destroy the receive engines, end the thread; safe to call twice."""
        if _closed(self._thread, self._closing, self._stop) and self._report is not None:
            self._report.close()

    def _closing(self) -> None:
        self._core.closing()
        self._gate.open()

    async def _start(self, local: Local, options: RuntimeOptions) -> tuple[ConsumerCore, ConsumerNetwork]:
        if options.enter_thread is not None:
            self._thread.belong(options.enter_thread)
        network = ConsumerNetwork(options)
        journal = ConsumerJournal(local, self._report, self._tally)
        core = ConsumerCore(local, self._thread, options, finder=network, journal=journal)
        self._door = StoryDoor(local, "consumer", core.story, clock=core.clock)
        try:
            await self._door.open(options.debug_dir)
        except BaseException:
            await network.close()
            raise
        network.attach(core)
        return core, network

    async def _stop(self) -> None:
        await self._door.close()
        await self._network.close()
        await self._core.close()


def _started(thread: LoopThread, start: Coroutine[Any, Any, _T]) -> _T:
    try:
        return thread.run(start, timeout=START_TIMEOUT)
    except BaseException:
        thread.close()
        raise


def _closed(thread: LoopThread, closing: Callable[[], None], stop: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Close what lives on the thread, then the thread; says whether it was open."""
    if not thread.post(closing):
        return False
    deadline = time.monotonic() + CLOSE_TIMEOUT
    try:
        thread.run(stop(), timeout=CLOSE_TIMEOUT)
    except TimeoutError:
        logger.warning("not closed within %.0f s; what is left ends with the process", CLOSE_TIMEOUT)
    finally:
        thread.close(timeout=max(0.0, deadline - time.monotonic()) + THREAD_TIMEOUT)
    return True


def _drain(source: "queue.SimpleQueue[_T]") -> list[_T]:
    """All that is in it. Only the embedding engine's thread takes out of it."""
    found: list[_T] = []
    while not source.empty():
        found.append(source.get_nowait())
    return found
