"""The runtimes' side of :mod:`kvferry.control`: who is told what, and what an address book says.

A producer listens, and registers with a bootstrap service (its own, or one that runs elsewhere). A consumer asks such
a service for a producer, and says hello where the service could not tell what kind it is.
"""

import logging
from collections.abc import Mapping

from kvferry.control import (
    BootstrapClient,
    BootstrapService,
    Links,
    Listener,
    RankCard,
    Registration,
    SocketOptions,
    greet,
)
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.protocol import (
    FEATURES,
    VERSION,
    LayoutAnswer,
    LayoutAsk,
    Note,
    PullKey,
    QuietAnswer,
    ReleaseNotice,
    Source,
    decode_reply,
    encode,
)
from kvferry.runtime.consumer import ConsumerCore
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.producer import ProducerCore
from kvferry.runtime.producers import RemoteEngine, RemoteRank
from kvferry.runtime.sides import Local

logger = logging.getLogger(__name__)


class ProducerNetwork:
    """A producer rank's listener, its registration, and the bootstrap service where it serves one."""

    def __init__(self, core: ProducerCore, options: RuntimeOptions) -> None:
        self._core = core
        self._options = options
        self._listener = Listener(on_message=core.on_message, on_lost=core.on_lost, options=_socket_options(options))
        self._client = BootstrapClient()
        self._links: Links[PullKey] = _silent_links(options)
        self._service: BootstrapService | None = None

    @classmethod
    async def serve(cls, core: ProducerCore, local: Local, options: RuntimeOptions) -> "ProducerNetwork":
        """Listen, then register; consumers can find this rank when this returns."""
        network = cls(core, options)
        try:
            await network._start(local)
        except BaseException:
            await network.close()
            raise
        return network

    @property
    def address(self) -> str:
        """Of the listener."""
        return self._listener.address

    async def close(self) -> None:
        """Stop all of it; safe to call twice."""
        await self._listener.close()
        if self._service is not None:
            await self._service.close()
        await self._links.close()
        await self._client.close()

    async def _start(self, local: Local) -> None:
        await self._listener.start(self._options.host, self._options.port)
        self._core.attach(self._listener)
        bootstrap = self._options.bootstrap
        if bootstrap is None:
            return
        if bootstrap.serve is not None:
            self._service = BootstrapService(self._on_release)
            await self._service.start(*bootstrap.serve)
        await self._client.register(bootstrap.url, self._registration(local))
        logger.info(
            "producer rank %d of %s listens on %s and is registered at %s",
            local.index,
            local.incarnation,
            self.address,
            bootstrap.url,
        )

    def _registration(self, local: Local) -> Registration:
        card = RankCard(
            version=VERSION,
            epoch=local.incarnation.epoch,
            tp_size=local.tp_size,
            pp_size=local.pp_size,
            fingerprint=local.placement.fingerprint,
            model=local.model,
            transport=self._core.sender.transport,
            transport_address=self._core.sender.address,
            features=FEATURES,
        )
        return Registration(
            engine_id=local.incarnation.engine_id,
            dp_rank=self._options.dp_rank,
            tp_rank=local.tp_rank,
            pp_rank=local.index // local.tp_size,
            addr=self.address,
            kvferry=card,
        )

    def _on_release(self, addresses: tuple[str, ...], transfers: tuple[TransferId, ...]) -> None:
        notice = encode(Note(kvferry=ReleaseNotice(version=VERSION, transfers=transfers)))
        for address in addresses:
            if address == self.address:
                self._core.release(transfers)
            else:
                self._links.note(address, notice)


class ConsumerNetwork:
    """A consumer rank's connections, and what it asks bootstrap services."""

    def __init__(self, options: RuntimeOptions) -> None:
        self._options = options
        self._client = BootstrapClient(timeout=options.timing.resolve)
        self._links: Links[PullKey] | None = None
        self._asked = 0

    def attach(self, core: ConsumerCore) -> None:
        """Replies and losses go to ``core``; called on the loop."""
        self._links = Links(on_reply=core.on_reply, on_lost=core.on_lost, options=_socket_options(self._options))
        core.attach(self._links)

    async def find(self, source: Source) -> RemoteEngine:
        """One attempt to find a producer (:class:`kvferry.runtime.producers.Finder`)."""
        found = await self._client.find(source.bootstrap, source.engine)
        if found.card is None:
            return await self._greet(found.engine_id, found.addresses)
        ranks = tuple(
            RemoteRank(address, rank.fingerprint, rank.transport, rank.transport_address)
            for address, rank in zip(found.addresses, found.card.ranks, strict=True)
        )
        return RemoteEngine(Incarnation(found.engine_id, found.card.epoch), found.card.model, ranks)

    async def placements(self, rank: RemoteRank, fingerprints: tuple[str, ...]) -> Mapping[str, bytes]:
        """Ask a rank for placements."""
        self._asked += 1
        number = self._asked  # others may ask while this one waits
        ask = Note(kvferry=LayoutAsk(version=VERSION, ask=number, fingerprints=fingerprints))
        data = await self._open_links.ask(rank.address, encode(ask), timeout=self._options.timing.resolve)
        answer = decode_reply(data).kvferry
        if not isinstance(answer, LayoutAnswer) or answer.ask != number:
            raise RemoteProtocolError(ProtocolReason.MALFORMED, f"{rank.address} answers something else than layouts")
        return answer.placements

    async def is_quiet(self, rank: RemoteRank, note: Note, *, ask: int) -> bool:
        """Ask a rank whether nothing moves any more."""
        data = await self._open_links.ask(rank.address, encode(note), timeout=self._options.timing.resolve)
        answer = decode_reply(data).kvferry
        return isinstance(answer, QuietAnswer) and answer.ask == ask and answer.quiet

    async def close(self) -> None:
        """Drop all connections; safe to call twice."""
        if self._links is not None:
            await self._links.close()
        await self._client.close()

    async def _greet(self, engine: EngineId, addresses: tuple[str, ...]) -> RemoteEngine:
        """A service that drops what it does not know lists the engine: ask each rank who it is."""
        ranks: list[RemoteRank] = []
        sides = []
        for address in addresses:
            hello = await greet(
                self._open_links, address, host=self._options.host, timeout=self._options.timing.resolve
            )
            if hello is None:
                raise RemoteProtocolError(
                    ProtocolReason.INCOMPATIBLE_PEER,
                    f"engine {engine} at {address} is not kvferry (vLLM's own MooncakeConnector?); this version of "
                    "kvferry pulls from kvferry producers only",
                )
            side = hello.producer
            sides.append(side)
            fingerprint = side.fingerprints[side.index]
            ranks.append(RemoteRank(address, fingerprint, hello.transport, hello.transport_address))
        return RemoteEngine(Incarnation(engine, sides[0].epoch), sides[0].model, tuple(ranks))

    @property
    def _open_links(self) -> Links[PullKey]:
        if self._links is None:
            raise RemoteProtocolError(ProtocolReason.PEER_LOST, "this consumer is not connected yet")
        return self._links


def _socket_options(options: RuntimeOptions) -> SocketOptions:
    """Heartbeats go out every second, so a silence counts from one second after the last sign of life."""
    return SocketOptions(silence=max(1.0, options.timing.silence - 1.0))


def _silent_links(options: RuntimeOptions) -> Links[PullKey]:
    """Links on which nothing is awaited."""
    return Links(on_reply=lambda *_: None, on_lost=lambda *_: None, options=_socket_options(options))
