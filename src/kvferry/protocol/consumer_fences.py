"""Doubt about a producer, and the fence that ends it.

A fence destroys the engine that receives from one life of a producer, which settles every pull sent to it; so its other
open pulls are failed with it. Doubt waits ``fence_after`` for them, at most ``fence_latest``; it does not wait when the
producer is lost, or when too many blocks are in quarantine. A pull that was merely given up is in no doubt yet: its
producer has ``fence_after`` then to say that it is quiet, or clients who leave would cost others their transfers. Pulls
that come while a fence is under way are queued. A fence that proves nothing is tried again, and meanwhile nothing may
wait for it.
"""

from collections.abc import Callable
from typing import Final

from kvferry.errors import ProtocolReason
from kvferry.ids import Incarnation
from kvferry.protocol.consumer_events import ConsumerAction, FenceProducer, ForgetProducer, ProducerLost
from kvferry.protocol.consumer_fetches import Fetches
from kvferry.protocol.consumer_pulls import Pulls
from kvferry.protocol.consumer_records import (
    ConsumerLimits,
    FenceDue,
    Fetch,
    ProducerRecord,
    PullDue,
    TimerKey,
)
from kvferry.protocol.tables import PULL_MOVING, PullState, PullStep
from kvferry.protocol.timers import Timers
from kvferry.protocol.turn import Turn

UNPROVEN: Final = "it cannot be proven yet that earlier writes of this producer are over"

Fail = Callable[[Fetch, ProtocolReason, str], None]
"""Ends a fetch as failed, if it has not ended."""


class Fences:
    """What is known of each life of a producer beside its pulls."""

    def __init__(
        self,
        limits: ConsumerLimits,
        turn: Turn[ConsumerAction],
        timers: Timers[TimerKey],
        *,
        fetches: Fetches,
        pulls: Pulls,
        fail: Fail,
    ) -> None:
        self._limits = limits
        self._turn = turn
        self._timers = timers
        self._fetches = fetches
        self._pulls = pulls
        self._fail = fail

    @property
    def at_the_bound(self) -> bool:
        """Whether no more blocks may come into doubt: enough are held, and what was tried proves nothing."""
        bound = self._limits.quarantined_blocks
        full = bound is not None and self._fetches.quarantined >= bound
        return full and any(producer.unproven for producer in self._pulls.producers.values())

    def lost(self, event: ProducerLost) -> None:
        """This life of a producer is suspected to be over."""
        self._turn.ask(ForgetProducer(event.producer))
        producer = self._pulls.producers.get(event.producer)
        if producer is not None:
            self.begin(producer, event.reason)

    def outlived(self, incarnation: Incarnation) -> None:
        """What is known of this life is not so any more: whoever answers at its address says so."""
        self._turn.ask(ForgetProducer(incarnation))

    def begin(self, producer: ProducerRecord, reason: ProtocolReason) -> None:
        """Fail what is open with this producer, and have the engine that it writes to destroyed."""
        if producer.fencing:
            return
        producer.fencing, producer.doubt_since = True, None
        for pull in self._pulls.of(producer):
            fetch = self._fetches.get(pull.key.transfer)
            if fetch is None or pull.state not in PULL_MOVING:
                continue
            self._pulls.doubt(pull)
            self._fail(fetch, reason, "")
            self._fetches.review(fetch)
        if any(pull.state is PullState.IN_DOUBT for pull in self._pulls.of(producer)):
            self._ask(producer)
        else:
            self._over(producer)

    def done(self, incarnation: Incarnation) -> None:
        """The engine is destroyed: everything that was sent to this producer is quiet."""
        producer = self._pulls.producers.get(incarnation)
        if producer is None or not producer.fencing:
            return
        for pull in self._pulls.of(producer):
            fetch = self._fetches.known[pull.key.transfer]
            self._pulls.settle(pull, PullStep.FENCE)
            self._fetches.review(fetch)
        self._over(producer)

    def failed(self, incarnation: Incarnation) -> None:
        """It proves nothing for now."""
        producer = self._pulls.producers.get(incarnation)
        if producer is None or not producer.fencing:
            return
        producer.unproven = True
        self._timers.set(FenceDue(incarnation), self._turn.now + self._limits.fence_latest)
        for pull in self._pulls.of(producer):
            fetch = self._fetches.get(pull.key.transfer)
            if fetch is not None and pull.state is PullState.QUEUED:
                self._fail(fetch, ProtocolReason.PEER_LOST, UNPROVEN)

    def due(self, producer: ProducerRecord) -> None:
        """Doubt is old enough, or a fence is unanswered."""
        if producer.fencing:
            self._ask(producer)
            return
        if producer.doubt_since is None:
            return
        latest = producer.doubt_since + self._limits.fence_latest
        if self._turn.now < latest and any(pull.state is PullState.OPEN for pull in self._pulls.of(producer)):
            soon = min(latest, self._turn.now + self._limits.fence_after)
            self._timers.set(FenceDue(producer.incarnation), soon)
            return
        if any(pull.state is PullState.IN_DOUBT for pull in self._pulls.of(producer)):
            self.begin(producer, ProtocolReason.TRANSPORT_FAILED)
        else:
            producer.doubt_since = None

    def mind_quarantine(self) -> None:
        """At the bound, prove quiet rather than hold more; blocks are never given back unproven."""
        bound = self._limits.quarantined_blocks
        if bound is None or self._fetches.quarantined <= bound:
            return
        soon = self._turn.now + self._limits.fence_after
        for producer in list(self._pulls.producers.values()):
            pulls = self._pulls.of(producer)
            if any(pull.state is PullState.IN_DOUBT for pull in pulls):
                self.begin(producer, ProtocolReason.LIMIT_EXCEEDED)
                continue
            for pull in pulls:
                if pull.state is PullState.ENDING:
                    self._timers.hasten(PullDue(pull.key), soon)

    def close(self) -> None:
        """Nothing goes on: fence all that is not over."""
        for producer in list(self._pulls.producers.values()):
            self.begin(producer, ProtocolReason.ABORTED)

    def _ask(self, producer: ProducerRecord) -> None:
        self._turn.ask(FenceProducer(producer.incarnation))
        for pull in self._pulls.of(producer):
            self._turn.note(pull.key.transfer, "fence asked for")
        # A driver answers a fence with done or failed. This is for one that does neither.
        self._timers.set(FenceDue(producer.incarnation), self._turn.now + 4 * self._limits.fence_latest)

    def _over(self, producer: ProducerRecord) -> None:
        producer.fencing = producer.unproven = False
        self._timers.cancel(FenceDue(producer.incarnation))
        if not producer.pulls:
            del self._pulls.producers[producer.incarnation]
        for pull in self._pulls.of(producer):
            self._pulls.send(pull)
