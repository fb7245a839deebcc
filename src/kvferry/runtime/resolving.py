"""From a source to what a fetch needs of it: the producer, the plan between the two engines, engines to receive by.

The producer is found and its layouts fetched once (:mod:`kvferry.runtime.producers`), the plan compiled once, a receive
engine made once for each life of each producer. So nearly always all of it is there, and nothing has to be waited for:
:meth:`Resolver.at_once`. What is then done is the same.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId, Incarnation
from kvferry.plan import Plan
from kvferry.protocol import Resolve
from kvferry.runtime.checking import Checker
from kvferry.runtime.courses import Courses
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.pairing import targets_of
from kvferry.runtime.plans import Plans, Recent
from kvferry.runtime.producers import Finder, Producers, RemoteEngine
from kvferry.runtime.receivers import Receivers
from kvferry.runtime.sides import Local
from kvferry.runtime.upstream_pulling import UpstreamPuller

MAX_TOLD: Final = 256
"""Producers of vLLM's own connector of which it is remembered that they were told of."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Whom a transfer is fetched from, and how."""

    engine: RemoteEngine
    plan: Plan | None
    """``None`` with a producer of vLLM's own connector, which makes its own."""
    targets: dict[int, bool]
    """Producer ranks to pull from, each with whether there is anything to fetch."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a resolver works with, that others use too."""

    finder: Finder
    receivers: Receivers
    checker: Checker
    courses: Courses
    upstream: UpstreamPuller
    is_connected: Callable[[RemoteEngine], bool]
    """Whether a connection proves that this life of a producer goes on."""


class Resolver:
    """Finds producers for one consumer rank. Used on its loop only."""

    def __init__(self, local: Local, thread: LoopThread, options: RuntimeOptions, *, means: Means) -> None:
        self._local = local
        self._thread = thread
        self._means = means
        self._plans = Plans(local.placements, layouts=options.max_layouts)
        self._producers = Producers(means.finder, options.timing)
        self.met_upstream: queue.SimpleQueue[EngineId] = queue.SimpleQueue()
        """Producers that run vLLM's own connector."""
        self._told_upstream: Recent[str, None] = Recent(MAX_TOLD)

    def forget(self, producer: Incarnation) -> None:
        """It is suspected: ask anew."""
        self._producers.forget(producer)

    def at_once(self, action: Resolve) -> Resolved | None:
        """As :meth:`resolve`, where nothing has to be asked or made; ``None`` where something has."""
        means = self._means
        engine = self._producers.known(action.source, still=means.is_connected)
        if engine is None or engine.grid is not None or engine.model != self._local.model:
            return None
        plan = self._plans.known(engine.fingerprints, self._local.side().fingerprints)
        if plan is None or not (means.courses.only_releases(action.transfer) or means.checker.is_content_with(engine)):
            return None
        targets = targets_of(plan, self._local.index)
        if not all(means.receivers.receive(engine.incarnation, engine.ranks[rank]) for rank in targets):
            return None
        return Resolved(engine, plan, targets)

    async def resolve(self, action: Resolve) -> Resolved:
        """Find, plan, and be ready to receive; raises a ``FerryError`` that says why not."""
        means = self._means
        if not means.courses.only_releases(action.transfer):
            means.receivers.prepare()
        engine = await self._producers.find(action.source, still=means.is_connected)
        self._tell_kind(engine)
        if not means.courses.only_releases(action.transfer):
            means.checker.demand(engine)
        plan = await self.plan_with(engine) if engine.grid is None else None
        if plan is None:
            targets = means.upstream.targets(engine, means.courses.span_of(action.transfer))
        else:
            targets = targets_of(plan, self._local.index)
        for rank in targets:
            await self._receive_from(engine, rank)
        return Resolved(engine, plan, targets)

    def retire_before(self, producer: Incarnation) -> None:
        """A producer has come back: nobody needs the receive engines of its earlier lives once they are idle."""
        in_use = {engine.incarnation for engine in self._means.courses.engines}
        for earlier in self._means.receivers.outlived_by(producer):
            if earlier not in in_use:
                self._thread.spawn(self._means.receivers.retire(earlier))

    async def plan_with(self, engine: RemoteEngine) -> Plan:
        """The plan between the two engines; asks for layouts that are not known."""
        if engine.model != self._local.model:
            raise RemoteProtocolError(
                ProtocolReason.INCOMPATIBLE_PEER,
                f"producer {engine.incarnation} serves model {engine.model!r}, this is {self._local.model!r}",
            )
        if missing := self._plans.missing(engine.fingerprints):
            told = await self._means.finder.placements(engine.ranks[0], missing)
            for fingerprint in missing:
                if (encoded := told.get(fingerprint)) is not None:
                    self._plans.learn(fingerprint, encoded)
        return self._plans.between(engine.fingerprints, self._local.side().fingerprints)

    def _tell_kind(self, engine: RemoteEngine) -> None:
        """The embedding engine may know better than to ask one of vLLM's connector for every prompt."""
        if engine.grid is not None and str(engine.incarnation) not in self._told_upstream:
            self._told_upstream.put(str(engine.incarnation), None)
            self.met_upstream.put(engine.incarnation.engine_id)

    async def _receive_from(self, engine: RemoteEngine, rank: int) -> None:
        peer = engine.ranks[rank]
        receiver = await self._means.receivers.of(engine.incarnation, peer.transport_address)
        if receiver.name != peer.transport:
            raise RemoteProtocolError(
                ProtocolReason.INCOMPATIBLE_PEER,
                f"producer {engine.incarnation} sends over {peer.transport!r}, this consumer receives over "
                f"{receiver.name!r}",
            )
