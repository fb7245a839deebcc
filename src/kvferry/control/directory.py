"""Who has registered: the state of the bootstrap service, in upstream's shape, with our card beside.

Keyed by data-parallel rank. An engine is listed only when all its ranks are there, because readers take the number of
ranks that they see as its size and keep it. Upstream's workers do not say how many they are; they are listed as they
come, as upstream does. The engine that came last under a key is the one that counts: a restart replaces what was
there, and what a late rank of an older life sends changes nothing.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta, Struct

from kvferry.control.sockets import check_endpoint
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId
from kvferry.protocol.messages import Name, Names, Size, Text, Version

LIVES: Final = 4
"""Engines remembered under one key, so that stragglers of the last ones are known as such."""

KEYS: Final = 1024
RANKS: Final = 65_536
"""Registrations remembered, of all engines and lives together."""

Rank = Annotated[int, Meta(ge=0, le=65_535)]


class RankCard(Struct, frozen=True, omit_defaults=True):
    """What a kvferry rank adds to its registration."""

    version: Version
    epoch: Name
    tp_size: Size
    pp_size: Size
    fingerprint: Name
    model: Text = ""
    transport: Text = ""
    transport_address: Text = ""
    features: Names = ()
    secure: Text = ""
    """Address of the rank's CURVE door; empty when it has none."""

    keys: Text = ""
    """Name of the keys of that door: tells a consumer whether its own are of the same secret."""


class Registration(Struct, frozen=True, omit_defaults=True):
    """The body of ``POST /register``: upstream's fields, and ours under one key."""

    engine_id: Name
    dp_rank: Rank
    tp_rank: Rank
    pp_rank: Rank
    addr: Name
    kvferry: RankCard | None = None


class RankEntry(Struct, frozen=True, omit_defaults=True):
    """One rank in an engine's card."""

    fingerprint: Name
    transport: Text = ""
    transport_address: Text = ""
    secure: Text = ""
    """Address of its CURVE door; empty when it has none."""


class EngineCard(Struct, frozen=True, omit_defaults=True):
    """What ``GET /query`` says of a kvferry engine, under the key ``kvferry`` of its entry."""

    version: Version
    epoch: Name
    tp_size: Size
    pp_size: Size
    ranks: Annotated[tuple[RankEntry, ...], Meta(max_length=65_536)]
    """In rank order: pipeline rank times tensor size plus tensor rank."""

    model: Text = ""
    features: Names = ()
    keys: Text = ""
    """Name of the keys of the CURVE doors."""


class EngineEntry(Struct, frozen=True, omit_defaults=True):
    """One value of the answer to ``GET /query``."""

    engine_id: Name
    worker_addr: Annotated[dict[Rank, dict[Rank, Name]], Meta(max_length=65_536)]
    """Tensor rank, pipeline rank, address."""

    kvferry: EngineCard | None = None


@dataclass(slots=True)
class _Life:
    engine_id: str
    epoch: str | None
    """``None``: upstream's, which tell nothing of the kind."""

    ranks: dict[tuple[int, int], Registration] = field(default_factory=dict)

    def size(self) -> tuple[int, int] | None:
        card = next(iter(self.ranks.values())).kvferry
        return (card.tp_size, card.pp_size) if card else None

    def complete(self) -> bool:
        size = self.size()
        return size is None or len(self.ranks) == size[0] * size[1]


class Directory:
    """Registrations by data-parallel rank."""

    def __init__(self) -> None:
        self._lives: dict[int, OrderedDict[tuple[str, str | None], _Life]] = {}

    def register(self, one: Registration) -> None:
        """Take a registration in; the same one again is no error. Raises :class:`RemoteProtocolError`."""
        check_endpoint(one.addr)
        if one.kvferry is not None and one.kvferry.secure:
            check_endpoint(one.kvferry.secure)
        _check_rank(one)
        if one.dp_rank not in self._lives and len(self._lives) >= KEYS:
            raise RemoteProtocolError(ProtocolReason.LIMIT_EXCEEDED, f"{KEYS} engines are registered already")
        if self._count() >= RANKS and self._known(one) is None:
            raise RemoteProtocolError(ProtocolReason.LIMIT_EXCEEDED, f"{RANKS} ranks are registered already")
        lives = self._lives.setdefault(one.dp_rank, OrderedDict())
        name = (one.engine_id, one.kvferry.epoch if one.kvferry else None)
        life = lives.get(name)
        if life is not None and _contradicts(life, one):
            if one.kvferry is not None:
                raise RemoteProtocolError(
                    ProtocolReason.INCOMPATIBLE_PEER,
                    f"rank tp {one.tp_rank} pp {one.pp_rank} of engine {one.engine_id} says other sizes, or another "
                    "address, than that engine has given",
                )
            life = None  # upstream's, restarted under its old name
        if life is None:
            life = lives[name] = _Life(*name)
            lives.move_to_end(name)
            if len(lives) > LIVES:
                lives.popitem(last=False)
        life.ranks[(one.tp_rank, one.pp_rank)] = one

    def _count(self) -> int:
        return sum(len(life.ranks) for lives in self._lives.values() for life in lives.values())

    def _known(self, one: Registration) -> Registration | None:
        """What this rank has registered before."""
        name = (one.engine_id, one.kvferry.epoch if one.kvferry else None)
        life = self._lives.get(one.dp_rank, OrderedDict()).get(name)
        return life.ranks.get((one.tp_rank, one.pp_rank)) if life is not None else None

    def listing(self) -> dict[int, EngineEntry]:
        """What ``GET /query`` answers."""
        newest = {key: next(reversed(lives.values())) for key, lives in self._lives.items()}
        return {key: _entry(life) for key, life in newest.items() if life.ranks and life.complete()}

    def addresses(self, engine: EngineId) -> tuple[str, ...]:
        """Where the ranks of an engine that has registered are reached by kvferry: its secure doors where it has them.

        In whatever order; empty when it has not registered.
        """
        for lives in self._lives.values():
            life = next(reversed(lives.values()))
            if life.engine_id == engine:
                return tuple((one.kvferry and one.kvferry.secure) or one.addr for one in life.ranks.values())
        return ()


def _contradicts(life: _Life, one: Registration) -> bool:
    known = life.ranks.get((one.tp_rank, one.pp_rank))
    size = (one.kvferry.tp_size, one.kvferry.pp_size) if one.kvferry else None
    return life.size() != size or (known is not None and known.addr != one.addr)


def _check_rank(one: Registration) -> None:
    card = one.kvferry
    if card is not None and not (one.tp_rank < card.tp_size and one.pp_rank < card.pp_size):
        raise RemoteProtocolError(
            ProtocolReason.MALFORMED,
            f"rank tp {one.tp_rank} pp {one.pp_rank} of an engine of {card.tp_size} x {card.pp_size}",
        )


def _entry(life: _Life) -> EngineEntry:
    addresses: dict[int, dict[int, str]] = {}
    for (tp_rank, pp_rank), one in sorted(life.ranks.items()):
        addresses.setdefault(tp_rank, {})[pp_rank] = one.addr
    return EngineEntry(engine_id=life.engine_id, worker_addr=addresses, kvferry=_card(life.ranks))


def _card(ranks: Mapping[tuple[int, int], Registration]) -> EngineCard | None:
    cards = [one.kvferry for _, one in sorted(ranks.items(), key=lambda item: item[0][::-1])]
    known = [card for card in cards if card is not None]
    if len(known) != len(cards):
        return None
    first = known[0]
    shared = set(first.features).intersection(*(card.features for card in known))
    return EngineCard(
        version=min(card.version for card in known),
        epoch=first.epoch,
        tp_size=first.tp_size,
        pp_size=first.pp_size,
        ranks=tuple(RankEntry(c.fingerprint, c.transport, c.transport_address, c.secure) for c in known),
        model=first.model,
        features=tuple(feature for feature in first.features if feature in shared),
        keys=first.keys if all(card.keys == first.keys for card in known) else "",
    )
