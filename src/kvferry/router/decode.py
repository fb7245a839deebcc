"""Have a prompt decoded, up to the first output; from there on the answer belongs to the caller.

A handoff is offered to decode engines in turn until one may have seen it; then it is spent, whatever happens (see
``faults``). Unless that engine delivers, the producer is told that nobody will come.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from kvferry.router import events
from kvferry.router.config import Decode
from kvferry.router.engines import Engines, EngineStream, verdict
from kvferry.router.faults import Answer, FaultReason, Headers, UpstreamError, aborted
from kvferry.router.metrics import Metrics, counted
from kvferry.router.pieces import Handoff, Piece, decode_body
from kvferry.router.pool import Pool
from kvferry.router.prefill import Call
from kvferry.router.release import Releaser

logger = logging.getLogger(__name__)
T = TypeVar("T")
Reader: TypeAlias = Callable[[EngineStream], Awaitable[T]]
"""Reads an answer as far as another engine could still take over."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A streamed answer whose first output has come."""

    headers: Headers
    held: tuple[bytes, ...]
    """Events that were held back until the first output, that one included."""
    rest: AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class DecodeJob(Generic[T]):
    """One piece to be decoded."""

    piece: Piece
    call: Call
    handoff: Handoff | None
    read: Reader[T]


class Decoder:
    """Asks the decode engines of a pool, one after the other."""

    def __init__(self, pool: Pool[Decode], *, engines: Engines, releaser: Releaser, metrics: Metrics) -> None:
        self.pool = pool
        self._engines = engines
        self._releaser = releaser
        self._metrics = metrics

    async def open(self, job: DecodeJob[T], stack: AsyncExitStack, *, avoid: set[str]) -> T:
        """What the reader made of the first answer; the engine is let go when ``stack`` closes.

        Engines that fail are added to ``avoid``; the last fault is raised when no engine is left, or the
        handoff is spent.
        """
        delivered = False
        try:
            result = await self._first(job, stack, avoid)
            delivered = True
            return result
        finally:
            if job.handoff is not None:
                self._let_go(job.handoff, delivered=delivered)

    def _let_go(self, handoff: Handoff, *, delivered: bool) -> None:
        """After the first output no copy is needed; a decode engine that reads the list has said so already."""
        if not delivered:
            self._releaser.release(handoff, reason="decode-failed")
        for one in handoff.copies:
            self._releaser.release(one, reason="not-needed" if delivered else "decode-failed")

    async def _first(self, job: DecodeJob[T], stack: AsyncExitStack, avoid: set[str]) -> T:
        last: UpstreamError | None = None
        for decode in self.pool.ranked(avoid=avoid):
            try:
                return await stack.enter_async_context(self._attempt(decode, job))
            except UpstreamError as fault:
                logger.warning("decode at %s failed: %s", decode.url, fault)
                avoid.add(decode.url)
                last = fault
                if fault.reached and job.handoff is not None:
                    break
        raise last or UpstreamError(FaultReason.UNREACHABLE, "no decode engine", reached=False)

    @asynccontextmanager
    async def _attempt(self, decode: Decode, job: DecodeJob[T]) -> AsyncIterator[T]:
        """In flight until the caller is done; a fault in the caller's reading counts against the engine too."""
        with counted(self._metrics, "decode", decode.url), self.pool.using(decode):
            stream = await self._engines.decode(
                decode.url + job.call.path,
                headers=job.call.headers(job.piece),
                body=decode_body(job.piece, job.handoff),
            )
            try:
                yield await job.read(stream)
            finally:
                await stream.aclose()


async def read_whole(stream: EngineStream) -> Answer:
    """The whole answer, which must be a JSON object."""
    body = await stream.read()
    whole = events.object_of(body)
    if whole is None:
        raise UpstreamError(FaultReason.MALFORMED, "the answer is not a JSON object", reached=True)
    if events.is_aborted(whole):
        raise aborted()
    return Answer(200, body, stream.headers)


async def read_opening(stream: EngineStream) -> Opening:
    """A streamed answer up to its first output.

    vLLM answers 200 before it has computed anything, and tells of a failed transfer in the first event: such an error
    counts as the status that it names.
    """
    if not stream.is_events:
        raise UpstreamError(FaultReason.MALFORMED, "the answer is not a stream of events", reached=True)
    held: list[bytes] = []
    rest = stream.events()
    async for event in rest:
        held.append(event)
        if (error := events.error_of(event)) is not None:
            raise verdict(error)
        if events.is_done(event) or events.is_aborted(events.parse(event)):
            raise aborted()
        if not events.is_preamble(event):
            break
    return Opening(stream.headers, tuple(held), rest)
