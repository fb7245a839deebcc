"""The runtimes' side of :mod:`kvferry.control`: who is told what, and what an address book says.

A producer listens, and registers with a bootstrap service (its own, or one that runs elsewhere). A consumer asks such
a service for a producer, and says hello where the service could not tell what kind it is.
"""

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from kvferry.control import (
    BootstrapClient,
    BootstrapService,
    FoundEngine,
    Keyring,
    Links,
    RankCard,
    Registration,
    SocketOptions,
    Verifier,
    greet,
)
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import Incarnation, TransferId
from kvferry.protocol import (
    VERSION,
    LayoutAnswer,
    LayoutAsk,
    Note,
    PullKey,
    QuietAnswer,
    ReleaseNotice,
    Source,
    check_version,
    decode_reply,
    encode,
)
from kvferry.runtime.consumer import ConsumerCore
from kvferry.runtime.doors import Doors
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.plans import Recent
from kvferry.runtime.producer import ProducerCore
from kvferry.runtime.producers import Grid, RemoteEngine, RemoteRank
from kvferry.runtime.sides import Local
from kvferry.runtime.tally import Counted
from kvferry.runtime.verify import features_of

logger = logging.getLogger(__name__)

MAX_GREETED: Final = 1024
LISTING_SETTLES: Final = 0.5
"""Seconds for which the listing of an engine of upstream's, which is met for the first time, must not change."""


class ProducerNetwork:
    """A producer rank's doors, its registration, and the bootstrap service where it serves one."""

    def __init__(self, core: ProducerCore, options: RuntimeOptions) -> None:
        self._core = core
        self._options = options
        self._doors = Doors(
            on_message=core.on_message, on_lost=core.on_lost, options=options, sockets=_socket_options(options)
        )
        self._client = BootstrapClient(secret=options.secret, ca=options.bootstrap_ca)
        self._links: Links[PullKey] = _silent_links(options)
        self._service: BootstrapService | None = None
        self._verifier: Verifier | None = None
        self._told: dict[Counted, int] = {}

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
        """Of the door that upstream's fields tell of."""
        return self._doors.address

    def take_refused(self) -> dict[Counted, int]:
        """Strangers who were not let in since this was last called, by what they tried. From any one thread."""
        verifier = self._verifier
        now: dict[Counted, int] = {
            "refused_connections": self._doors.refused,
            "refused_orders": verifier.refused if verifier is not None else 0,
        }
        told, self._told = self._told, now
        return {name: count - told.get(name, 0) for name, count in now.items() if count > told.get(name, 0)}

    async def close(self) -> None:
        """Stop all of it; safe to call twice."""
        await self._doors.close()
        if self._service is not None:
            await self._service.close()
        await self._links.close()
        await self._client.close()

    async def _start(self, local: Local) -> None:
        await self._doors.open()
        self._core.attach(self._doors)
        bootstrap = self._options.bootstrap
        if bootstrap is None:
            return
        if bootstrap.serve is not None:
            secret = self._options.secret
            self._verifier = Verifier(secret) if secret is not None else None
            self._service = BootstrapService(self._on_release, verifier=self._verifier, tls=bootstrap.tls)
            await self._service.start(*bootstrap.serve)
        await self._client.register(bootstrap.url, self._registration(local))
        logger.info(
            "producer rank %d of %s listens on %s (%s) and is registered at %s",
            local.index,
            local.incarnation,
            self._doors.ferry_address,
            "CURVE" if self._doors.keys else "plain",
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
            features=features_of(local),
            secure=self._doors.secure_address,
            keys=self._doors.keys.name if self._doors.keys else "",
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
            if address == self._doors.ferry_address:
                self._core.release(transfers)
            else:
                self._links.note(address, notice)


class ConsumerNetwork:
    """A consumer rank's connections, and what it asks bootstrap services."""

    def __init__(self, options: RuntimeOptions) -> None:
        self._options = options
        self._keys = Keyring(options.secret) if options.secret is not None else None
        self._client = BootstrapClient(timeout=options.timing.resolve, ca=options.bootstrap_ca)
        self._links: Links[PullKey] | None = None
        self._asked = 0
        self._peers = options.upstream_peers if self._keys is None else options.upstream_peers.beside_a_secret()
        self._upstream: Recent[tuple[str, ...], None] = Recent(MAX_GREETED)
        """Addresses of ranks that are upstream's. They are greeted once: each greeting is an error in their log."""

    def attach(self, core: ConsumerCore) -> None:
        """Replies and losses go to ``core``; called on the loop."""
        self._links = Links(
            on_reply=core.on_reply, on_lost=core.on_lost, options=_socket_options(self._options), keys=self._keys
        )
        core.attach(self._links)

    async def find(self, source: Source) -> RemoteEngine:
        """One attempt to find a producer (:class:`kvferry.runtime.producers.Finder`)."""
        found = await self._client.find(source.bootstrap, source.engine)
        if found.card is None:
            engine = await self._greet(found)
            if engine.grid is not None:
                await self._look_again(source, found)
            return engine
        check_version(found.card.version, f"producer {found.engine_id}")
        check_keys(found, self._keys)
        ranks = tuple(
            RemoteRank(rank.secure or address, rank.fingerprint, rank.transport, rank.transport_address)
            for address, rank in zip(found.addresses, found.card.ranks, strict=True)
        )
        return RemoteEngine(
            Incarnation(found.engine_id, found.card.epoch), found.card.model, ranks, found.card.features
        )

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

    async def _look_again(self, source: Source, found: FoundEngine) -> None:
        """Upstream's service lists an engine before all its ranks are there: what is new must stay as it is a while."""
        if found.addresses in self._upstream:
            return
        await asyncio.sleep(LISTING_SETTLES)
        if (await self._client.find(source.bootstrap, source.engine)).addresses != found.addresses:
            raise RemoteProtocolError(
                ProtocolReason.PEER_LOST, f"ranks of engine {found.engine_id} are still registering"
            )
        self._upstream.put(found.addresses, None)

    async def _greet(self, found: FoundEngine) -> RemoteEngine:
        """A service that drops what it does not know lists the engine: ask each rank who it is."""
        engine, addresses = found.engine_id, found.addresses
        if addresses in self._upstream:
            return upstream_engine(found)
        ranks: list[RemoteRank] = []
        sides = []
        told: list[set[str]] = []
        for address in addresses:
            plain = self._keys is not None and self._takes_upstream(address)
            hello = await greet(
                self._open_links,
                address,
                host=self._options.host,
                timeout=self._options.timing.resolve,
                plain=plain,
            )
            if hello is not None and plain:
                raise RemoteProtocolError(
                    ProtocolReason.UNAUTHORIZED,
                    f"engine {engine} at {address} is kvferry and speaks without the secret that is set here: set "
                    "secret_file (or KVFERRY_SECRET) there too",
                )
            if hello is None and self._peers.any and all(map(self._takes_upstream, addresses)):
                return upstream_engine(found)
            if hello is None:
                raise RemoteProtocolError(
                    ProtocolReason.INCOMPATIBLE_PEER,
                    f"engine {engine} at {address} is not kvferry (vLLM's own MooncakeConnector?), and such peers are "
                    "refused here: option upstream_peers",
                )
            side = hello.producer
            sides.append(side)
            told.append(set(hello.features))
            fingerprint = side.fingerprints[side.index]
            ranks.append(RemoteRank(address, fingerprint, hello.transport, hello.transport_address))
        features = tuple(sorted(set.intersection(*told)))
        return RemoteEngine(Incarnation(engine, sides[0].epoch), sides[0].model, tuple(ranks), features)

    def _takes_upstream(self, address: str) -> bool:
        return self._peers.admits(urlsplit(address).hostname or "")

    @property
    def _open_links(self) -> Links[PullKey]:
        if self._links is None:
            raise RemoteProtocolError(ProtocolReason.PEER_LOST, "this consumer is not connected yet")
        return self._links


def _socket_options(options: RuntimeOptions) -> SocketOptions:
    """Heartbeats go out every second, so a silence counts from one second after the last sign of life."""
    return replace(options.sockets, silence=max(1.0, options.timing.silence - 1.0))


def _silent_links(options: RuntimeOptions) -> Links[PullKey]:
    """Links on which nothing is awaited."""
    keys = Keyring(options.secret) if options.secret is not None else None
    return Links(on_reply=lambda *_: None, on_lost=lambda *_: None, options=_socket_options(options), keys=keys)


def upstream_engine(found: FoundEngine) -> RemoteEngine:
    """An engine of vLLM's own connector. It tells no life, but takes other ports in each."""
    life = hashlib.blake2b("\n".join(found.addresses).encode(), digest_size=8).hexdigest()
    ranks = tuple(RemoteRank(address, "", "mooncake", "") for address in found.addresses)
    return RemoteEngine(Incarnation(found.engine_id, life), "", ranks, grid=Grid(found.tp_size, found.pp_size))


def check_keys(found: FoundEngine, keys: Keyring | None) -> None:
    """Refuse a kvferry producer whose doors are not for us, and learn which keys its doors take.

    There is no falling back to the plain door.
    """
    card = found.card
    if card is None:
        return
    secured = sum(bool(rank.secure) for rank in card.ranks)
    name = f"producer {found.engine_id}@{card.epoch[:8]}"
    if keys is None and secured:
        said = f"{name} speaks to holders of its shared secret only: set secret_file (or KVFERRY_SECRET) here too"
    elif keys is not None and secured < len(card.ranks):
        said = f"{name} has no secure door and a secret is set here: set secret_file (or KVFERRY_SECRET) there too"
    elif keys is not None and not keys.learn([rank.secure for rank in card.ranks], card.keys):
        said = (
            f"{name} has keys {card.keys[:16]!r}, the secret here gives {keys.used.name!r}: give both the same secret"
        )
    else:
        return
    raise RemoteProtocolError(ProtocolReason.UNAUTHORIZED, said)
