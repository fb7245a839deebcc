"""Proving that a producer in doubt writes nothing more here.

The proof is the end of the engine that it writes through (:mod:`kvferry.runtime.receivers`); a few attempts belong to
one fence, since a process that was killed takes a moment to be gone. Where nothing here can stop a writer that lives
(``cma``), it is asked, by a fresh connection, to give up what it has of ours, and whether it has.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from kvferry.errors import FerryError, TransportError
from kvferry.ids import Incarnation
from kvferry.runtime.courses import Courses
from kvferry.runtime.producers import Finder, RemoteRank
from kvferry.runtime.pulling import PullMaker
from kvferry.runtime.receivers import Receivers

logger = logging.getLogger(__name__)

FENCES: Final = 3
FENCE_PAUSE: Final = 0.3
"""So often, at this pace, a fence is tried before it has failed."""

QUIET_ASKS: Final = 20
QUIET_PAUSE: Final = 0.1
"""So often, at this pace, a writer is asked in one go whether it is quiet."""


class Fences:
    """The fences of one consumer rank."""

    def __init__(self, receivers: Receivers, courses: Courses, *, finder: Finder, maker: PullMaker) -> None:
        self._receivers = receivers
        self._courses = courses
        self._finder = finder
        self._maker = maker
        self._asks = 0

    async def prove(self, producer: Incarnation) -> bool:
        """Whether nothing that this producer had under way can land any more."""
        for left in reversed(range(FENCES)):
            try:
                await self._receivers.fence(producer, lambda writers: self._writers_are_quiet(producer, writers))
            except TransportError as error:
                if left:
                    await asyncio.sleep(FENCE_PAUSE)
                    continue
                logger.warning("no fence for %s yet, its blocks stay held: %s", producer, error)
                return False
            return True
        return False

    async def _writers_are_quiet(self, producer: Incarnation, writers: Sequence[str]) -> bool:
        engine = self._courses.engine_of(producer)
        if engine is None:
            return True  # all that was asked of them has had its last word meanwhile
        asked = [rank for rank in engine.ranks if rank.transport_address in writers]
        if {rank.transport_address for rank in asked} != set(writers):
            asked = [*engine.ranks]  # one of them has a new engine since, and another address
        for rank in asked:
            if not await self._is_quiet(rank):
                return False
        return True

    async def _is_quiet(self, rank: RemoteRank) -> bool:
        for _ in range(QUIET_ASKS):
            self._asks += 1
            try:
                quiet = await self._finder.is_quiet(rank, self._maker.quiet_ask(self._asks), ask=self._asks)
            except FerryError as error:
                logger.debug("%s does not say whether it is quiet: %s", rank.address, error)
                return False
            if quiet:
                return True
            await asyncio.sleep(QUIET_PAUSE)
        return False
