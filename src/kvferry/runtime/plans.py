"""Placements by fingerprint, and the plans compiled between them; each computed once.

A pair of engines needs one plan, whatever the number of requests, and both ends compile the same one from the same
placements. Peers come and go, so both stores are bounded and forget what was used least recently.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final, Generic, TypeVar

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.layout import Placement, decode_placement, encode_placement
from kvferry.plan import Plan, compile_plan

MAX_PLACEMENTS: Final = 4096
MAX_PLANS: Final = 256
MAX_RANKS: Final = 1024
"""Of a peer's engine. Whoever names more would have this loop compile for as long as the message has room for them."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """A bounded map that drops what was used least recently."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[_Key, _Value] = OrderedDict()

    def __contains__(self, key: _Key) -> bool:
        return key in self._items

    def get(self, key: _Key) -> _Value | None:
        if key not in self._items:
            return None
        self._items.move_to_end(key)
        return self._items[key]

    def put(self, key: _Key, value: _Value) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._limit:
            self._items.popitem(last=False)


class Plans:
    """What one worker knows of layouts, its own and its peers'."""

    def __init__(self, own: Iterable[Placement] = (), *, layouts: int = MAX_PLACEMENTS) -> None:
        """``layouts``: of peers, that are remembered at once."""
        self._own = {str(placement.fingerprint): placement for placement in own}
        self._seen: Recent[str, Placement] = Recent(layouts)
        self._plans: Recent[tuple[tuple[str, ...], tuple[str, ...]], Plan] = Recent(MAX_PLANS)

    def learn(self, fingerprint: str, encoded: bytes) -> None:
        """Take a peer's placement in; refused unless it is the one that it is said to be."""
        if self._find(fingerprint) is not None:
            return
        # Before anything is built from it: a fingerprint is the digest of the very bytes.
        if sha256(encoded).hexdigest() != fingerprint:
            raise RemoteProtocolError(
                ProtocolReason.MALFORMED, f"a placement said to be {fingerprint[:16]} has another digest"
            )
        placement = decode_placement(encoded)
        if placement.fingerprint != fingerprint:
            raise RemoteProtocolError(
                ProtocolReason.MALFORMED,
                f"a placement said to be {fingerprint[:16]} is {placement.fingerprint[:16]}",
            )
        self._seen.put(fingerprint, placement)

    def missing(self, fingerprints: Iterable[str]) -> tuple[str, ...]:
        """Those that are not known here, each once."""
        return tuple(dict.fromkeys(one for one in fingerprints if self._find(one) is None))

    def placement(self, fingerprint: str) -> Placement:
        """A placement that is known here."""
        found = self._find(fingerprint)
        if found is None:
            raise RemoteProtocolError(ProtocolReason.LAYOUT_MISS, f"placement {fingerprint[:16]} is not known here")
        return found

    def own_encoded(self, fingerprints: Iterable[str]) -> dict[str, bytes]:
        """The wire forms of those of these that are this worker's own engine's; each is encoded once."""
        return {one: encode_placement(self._own[one]) for one in dict.fromkeys(fingerprints) if one in self._own}

    def known(self, producers: Sequence[str], consumers: Sequence[str]) -> Plan | None:
        """The plan between two engines that was compiled already."""
        return self._plans.get((tuple(producers), tuple(consumers)))

    def between(self, producers: Sequence[str], consumers: Sequence[str]) -> Plan:
        """The plan from all ranks of one engine to all of another.

        Raises ``PlanError`` when there is none, ``RemoteProtocolError`` for an engine of too many ranks.
        """
        plan = self.known(producers, consumers)
        if plan is not None:
            return plan
        for ranks in (len(producers), len(consumers)):
            if ranks > MAX_RANKS:
                raise RemoteProtocolError(
                    ProtocolReason.LIMIT_EXCEEDED, f"an engine of {ranks} ranks, over the limit of {MAX_RANKS}"
                )
        return self.of([self.placement(one) for one in producers], [self.placement(one) for one in consumers])

    def of(self, producers: Sequence[Placement], consumers: Sequence[Placement]) -> Plan:
        """The same, for placements that nobody has to look up."""
        key = (tuple(str(one.fingerprint) for one in producers), tuple(str(one.fingerprint) for one in consumers))
        plan = self._plans.get(key)
        if plan is None:
            plan = compile_plan(producers, consumers)
            self._plans.put(key, plan)
        return plan

    def _find(self, fingerprint: str) -> Placement | None:
        return self._own.get(fingerprint) or self._seen.get(fingerprint)
