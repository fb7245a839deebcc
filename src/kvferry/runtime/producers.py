"""What a consumer knows of producers: found through their bootstrap service, kept for as long as they live.

Facts are tied to one life of an engine and dropped with it, and with nothing else: a restarted producer is asked
again, its neighbours are not. A service that does not answer, or does not list the engine yet, is asked again for a
short while, since engines start in any order; then the transfer is refused.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvferry.errors import FerryError, ProtocolReason, RemoteProtocolError, TransportError
from kvferry.ids import Incarnation
from kvferry.protocol import Note, Source
from kvferry.runtime.options import Timing

RETRY_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """One rank of a producer."""

    address: str
    """Of its message socket."""
    fingerprint: str
    transport: str
    transport_address: str
    """Of the engine that it writes with: who is to be admitted, and whose end proves quiet over ``cma``."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How many tensor ranks and pipeline stages an engine has."""

    tp_size: int
    pp_size: int


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """One life of a producer, all its ranks in rank order."""

    incarnation: Incarnation
    model: str
    ranks: tuple[RemoteRank, ...]
    features: tuple[str, ...] = ()
    """What every rank of it can do."""
    grid: Grid | None = None
    """Of an engine of vLLM's own connector, which tells nothing else; ``None``: it is kvferry."""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the placements of its ranks."""
        return tuple(rank.fingerprint for rank in self.ranks)


class Finder(Protocol):
    """Asks the network about producers."""

    async def find(self, source: Source) -> RemoteEngine:
        """One attempt; raises a :class:`FerryError`."""

    async def placements(self, rank: RemoteRank, fingerprints: tuple[str, ...]) -> Mapping[str, bytes]:
        """Placements by fingerprint, as this rank knows them; raises a :class:`FerryError`."""

    async def is_quiet(self, rank: RemoteRank, note: Note, *, ask: int) -> bool:
        """Whether this rank says that nothing moves any more of what ``note`` asks about; raises one too."""


class Producers:
    """The producers that this consumer rank has met."""

    def __init__(self, finder: Finder, timing: Timing) -> None:
        self._finder = finder
        self._timing = timing
        self._known: dict[Source, RemoteEngine] = {}
        self._asking: dict[Source, asyncio.Task[RemoteEngine]] = {}

    async def find(self, source: Source, *, still: Callable[[RemoteEngine], bool]) -> RemoteEngine:
        """The engine that a router's parameters name; many requests for one ask once.

        ``still``: whether what is known of it may be used unasked. It may have been started anew since.
        """
        known = self.known(source, still=still)
        if known is not None:
            return known
        if source not in self._asking:
            task = asyncio.get_running_loop().create_task(self._ask(source))
            self._asking[source] = task
            task.add_done_callback(lambda _: self._asking.pop(source, None))
        return await asyncio.shield(self._asking[source])

    def known(self, source: Source, *, still: Callable[[RemoteEngine], bool]) -> RemoteEngine | None:
        """The same, where nobody has to be asked."""
        known = self._known.get(source)
        return known if known is not None and still(known) else None

    def of(self, incarnation: Incarnation) -> RemoteEngine | None:
        """The facts of one life of an engine."""
        return next((engine for engine in self._known.values() if engine.incarnation == incarnation), None)

    def forget(self, incarnation: Incarnation) -> None:
        """Drop the facts of exactly this life."""
        for source in [one for one, engine in self._known.items() if engine.incarnation == incarnation]:
            del self._known[source]

    async def _ask(self, source: Source) -> RemoteEngine:
        deadline = asyncio.get_running_loop().time() + self._timing.resolve
        while True:
            try:
                engine = await self._finder.find(source)
            except RemoteProtocolError as error:
                if error.reason is not ProtocolReason.PEER_LOST or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RETRY_PAUSE)
            else:
                self._known[source] = engine
                return engine


def refusal_of(error: FerryError) -> ProtocolReason:
    """The protocol's word for why a producer cannot be used."""
    match error:
        case RemoteProtocolError():
            return error.reason
        case TransportError():
            return ProtocolReason.TRANSPORT_FAILED
        case _:
            return ProtocolReason.PLAN_REFUSED
