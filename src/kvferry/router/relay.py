"""One piece's way: prefill somewhere, hand off, decode somewhere else.

round:  prefill P ---- fault --------> next prefill engine, new transfer id
          | handoff (transfer id, engine id, bootstrap address)
        decode D  ---- not reached --> next decode engine, same handoff
          |       ---- reached, then failed before its first output
          |                            -> release the handoff, next round
        first output: committed; from here on a failure is told to the client
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from kvferry.router.config import RouterConfig
from kvferry.router.decode import DecodeJob, Decoder, Opening, Reader, read_opening, read_whole
from kvferry.router.directory import Directory
from kvferry.router.engines import Engines
from kvferry.router.faults import Answer, UpstreamError, gave_up
from kvferry.router.metrics import Metrics
from kvferry.router.pieces import Handoff, Piece
from kvferry.router.pool import Clock, Pool
from kvferry.router.prefill import Call, NoHandoff, Prefiller
from kvferry.router.release import Releaser

T = TypeVar("T")


class Relay:
    """Serves pieces over the engines of a configuration."""

    def __init__(self, config: RouterConfig, *, engines: Engines, metrics: Metrics, clock: Clock) -> None:
        self._config = config
        self._metrics = metrics
        self._releaser = Releaser(engines, metrics=metrics)
        self.prefiller = Prefiller(
            Pool(config.prefills, cooldown=config.cooldown, clock=clock),
            directory=Directory(engines, ttl=config.directory_ttl, clock=clock),
            engines=engines,
            releaser=self._releaser,
            metrics=metrics,
            copies=config.copies,
        )
        self.decoder = Decoder(
            Pool(config.decodes, cooldown=config.cooldown, clock=clock),
            engines=engines,
            releaser=self._releaser,
            metrics=metrics,
        )

    async def whole(self, piece: Piece, call: Call) -> Answer:
        """The answer of a piece that is not streamed; RefusedError when there is none."""
        async with self._open(piece, call, read_whole) as answer:
            return answer

    @asynccontextmanager
    async def streamed(self, piece: Piece, call: Call) -> AsyncIterator[Opening]:
        """A streamed answer from its first output on; RefusedError when there is none."""
        async with self._open(piece, call, read_opening) as opening:
            yield opening

    async def drain(self) -> None:
        """Let what was begun behind the clients' backs finish."""
        await self._releaser.drain()

    @asynccontextmanager
    async def _open(self, piece: Piece, call: Call, read: Reader[T]) -> AsyncIterator[T]:
        async with AsyncExitStack() as stack:
            began = time.perf_counter()
            result = await self._rounds(piece, call, read, stack)
            self._metrics.first_output_seconds.observe(time.perf_counter() - began)
            yield result

    async def _rounds(self, piece: Piece, call: Call, read: Reader[T], stack: AsyncExitStack) -> T:
        avoid_prefills: set[str] = set()
        avoid_decodes: set[str] = set()
        last: UpstreamError | None = None
        for _ in range(self._config.rounds):
            handoff = await self._hand_off(piece, call, avoid_prefills)
            try:
                job = DecodeJob(piece, call, handoff, read)
                return await self.decoder.open(job, stack, avoid=avoid_decodes)
            except UpstreamError as fault:
                last = fault
                if not fault.reached or handoff is None:
                    break
                for one in (handoff, *handoff.copies):
                    avoid_prefills.add(one.prefill.url)
                    self.prefiller.doubt(one)
        raise gave_up("decode", last)

    async def _hand_off(self, piece: Piece, call: Call, avoid: set[str]) -> Handoff | None:
        """A computed prompt, or None when decode shall compute it."""
        if piece.decode_only:
            return None
        found = await self.prefiller.hand_off(piece, call, avoid=avoid)
        if not isinstance(found, NoHandoff):
            return found
        if self._config.decode_alone:
            return None
        raise gave_up("prefill", found.last)
