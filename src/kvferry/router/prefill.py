"""Have a prompt computed by some prefill engine.

Each attempt draws its own transfer id from the system's randomness: whoever knows one can pull the prompt's
cache or have it dropped. A prefill that was abandoned may still have finished, so its id is never used again
and is released.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.ids import EngineId, TransferId
from kvferry.router import events
from kvferry.router.config import Prefill
from kvferry.router.directory import Directory, Registered
from kvferry.router.engines import Engines
from kvferry.router.faults import Answer, FaultReason, Headers, UpstreamError, aborted
from kvferry.router.headers import for_rank
from kvferry.router.metrics import Metrics, counted
from kvferry.router.pieces import Handoff, Piece, prefill_body
from kvferry.router.pool import Pool
from kvferry.router.release import Releaser

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """What all pieces of a client's request share."""

    path: str
    headers: Callable[[Piece], Headers]
    """The headers of the engine requests of a piece."""


@dataclass(frozen=True, slots=True)
class NoHandoff:
    """No prefill engine did it."""

    last: UpstreamError | None


class Prefiller:
    """Asks the prefill engines of a pool, one after the other."""

    def __init__(  # what it asks, tells and counts with
        self,
        pool: Pool[Prefill],
        *,
        directory: Directory,
        engines: Engines,
        releaser: Releaser,
        metrics: Metrics,
        copies: int = 1,
    ) -> None:
        self.pool = pool
        self._directory = directory
        self._engines = engines
        self._releaser = releaser
        self._metrics = metrics
        self._copies = copies

    async def hand_off(self, piece: Piece, call: Call, *, avoid: set[str]) -> Handoff | NoHandoff:
        """The first handoff to be had, with the copies that were asked for and could be had.

        Engines that fail are added to ``avoid``; a RefusedError is raised at once.
        """
        ranked = iter(self.pool.ranked(avoid=avoid))
        if self._copies == 1:
            return await self._first(ranked, piece, call, avoid)
        tasks = [asyncio.create_task(self._first(ranked, piece, call, avoid)) for _ in range(self._copies)]
        try:
            results = await asyncio.gather(*tasks)
        except BaseException:
            await self._undo(tasks)
            raise
        found = [one for one in results if isinstance(one, Handoff)]
        return replace(found[0], copies=tuple(found[1:])) if found else results[0]

    async def _undo(self, tasks: Sequence["asyncio.Task[Handoff | NoHandoff]"]) -> None:
        """One copy was refused, or the client has left: nobody will come for the others."""
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Handoff):
                self._releaser.release(ended, reason="prefill-failed")

    async def _first(self, ranked: Iterator[Prefill], piece: Piece, call: Call, avoid: set[str]) -> Handoff | NoHandoff:
        last: UpstreamError | None = None
        for prefill in ranked:
            try:
                with counted(self._metrics, "prefill", prefill.url), self.pool.using(prefill):
                    return await self._attempt(prefill, piece, call)
            except UpstreamError as fault:
                logger.warning("prefill at %s failed: %s", prefill.url, fault)
                self._directory.forget(prefill)
                avoid.add(prefill.url)
                last = fault
        return NoHandoff(last)

    def doubt(self, handoff: Handoff) -> None:
        """Decode failed on this handoff: its engine id may be out of date."""
        self._directory.forget(handoff.prefill)

    async def _attempt(self, prefill: Prefill, piece: Piece, call: Call) -> Handoff:
        registered = await self._directory.choose(prefill)
        transfer = TransferId(secrets.token_hex(16))
        handoff = Handoff(transfer, prefill, registered.engine_id, registered.releasable)
        try:
            began = time.perf_counter()
            completed = _completed(handoff, await self._ask(handoff, registered, piece, call))
            self._metrics.prefill_seconds.observe(time.perf_counter() - began)
            return completed
        except UpstreamError as fault:
            if fault.reached:
                self._releaser.release(handoff, reason="prefill-failed")
            raise
        except asyncio.CancelledError:
            self._releaser.release(handoff, reason="client-left")
            raise

    async def _ask(self, handoff: Handoff, registered: Registered, piece: Piece, call: Call) -> Answer:
        return await self._engines.prefill(
            handoff.prefill.url + call.path,
            headers=for_rank(call.headers(piece), registered.rank),
            body=prefill_body(piece, handoff.transfer),
        )


def _completed(handoff: Handoff, answer: Answer) -> Handoff:
    """What the prefill engine says of itself is newer than what its directory said."""
    body = events.object_of(answer.body)
    if body is None:
        # Whatever answers there has computed no prompt, and decode would wait for it.
        raise UpstreamError(FaultReason.MALFORMED, "the answer is not a JSON object", reached=True)
    if events.is_aborted(body):
        raise aborted()
    params = body.get("kv_transfer_params")
    if not isinstance(params, Mapping):
        return handoff
    engine_id = params.get("remote_engine_id")
    return replace(
        handoff,
        engine_id=EngineId(engine_id) if isinstance(engine_id, str) else handoff.engine_id,
        extra=dict(params),
    )
