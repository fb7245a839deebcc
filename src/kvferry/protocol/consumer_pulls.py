"""The pulls of a consumer's fetches: one to each producer rank that a fetch must hear from.

A pull goes through its table: queued while a fence of its producer is under way, open once it is sent, ending when its
fetch is over and the producer may still write, in doubt when nobody will say that it does not. Served or closed it is
quiet. Live pulls are also listed by the life of the producer that they go to, because one fence settles all of them
(:mod:`kvferry.protocol.consumer_fences`).
"""

from collections.abc import Iterable

from kvferry.ids import EngineId, Incarnation
from kvferry.protocol.consumer_events import ConsumerAction, ForgetPull, PullKey, SendAbort, SendPull
from kvferry.protocol.consumer_fetches import Fetches
from kvferry.protocol.consumer_records import (
    ConsumerLimits,
    FenceDue,
    Fetch,
    FetchPull,
    ProducerRecord,
    PullDue,
    TimerKey,
)
from kvferry.protocol.newest import Newest
from kvferry.protocol.tables import PULL_TABLE, PullState, PullStep
from kvferry.protocol.timers import Timers
from kvferry.protocol.turn import Turn


class Pulls:
    """All pulls that are not over, by fetch and by producer."""

    def __init__(
        self, limits: ConsumerLimits, turn: Turn[ConsumerAction], timers: Timers[TimerKey], *, fetches: Fetches
    ) -> None:
        self._limits = limits
        self._turn = turn
        self._timers = timers
        self._fetches = fetches
        self.producers: dict[Incarnation, ProducerRecord] = {}
        self.sent_upstream: Newest[tuple[EngineId, PullKey], None] = Newest(limits.remembered_pulls)
        """What no second pull may be sent for."""

    def get(self, key: PullKey) -> FetchPull | None:
        """A pull of a fetch that is known."""
        fetch = self._fetches.get(key.transfer)
        return fetch.pulls.get(key) if fetch else None

    def of(self, producer: ProducerRecord) -> list[FetchPull]:
        """Those to one producer that are not over, as they are now."""
        return [self._fetches.known[key.transfer].pulls[key] for key in producer.pulls]

    def producer(self, incarnation: Incarnation, *, upstream: bool) -> ProducerRecord:
        """The record of one life of a producer, from its first pull on."""
        return self.producers.setdefault(incarnation, ProducerRecord(incarnation, upstream))

    def add(self, fetch: Fetch, pull: FetchPull) -> None:
        """Queue it."""
        fetch.pulls[pull.key] = pull
        self.producers[pull.producer].pulls[pull.key] = None

    def leave(self, keys: Iterable[PullKey]) -> None:
        """Those of these that are not under way never will be."""
        for key in keys:
            pull = self.get(key)
            if pull is None or pull.state in (PullState.SERVED, PullState.CLOSED):
                self._turn.ask(ForgetPull(key))

    def send(self, pull: FetchPull) -> None:
        """No fence is in its way."""
        if not self._step(pull, PullStep.SEND):
            return
        if pull.upstream:
            self.sent_upstream.note((pull.producer.engine_id, pull.key), None)
        self.listen(pull)
        self._turn.emit(pull.key.transfer, SendPull(pull.key, pull.producer, pull.release))

    def send_with_layouts(self, pull: FetchPull) -> None:
        """The producer lacks layouts: send it again with them."""
        pull.inlined = True
        self.listen(pull)
        again = SendPull(pull.key, pull.producer, pull.release, inline_layouts=True)
        self._turn.emit(pull.key.transfer, again)

    def listen(self, pull: FetchPull) -> None:
        """Expect the next word about an open pull. Upstream says nothing while the prompt is computed."""
        if not pull.upstream:
            self._timers.set(PullDue(pull.key), self._turn.now + self._limits.silence)

    def give_up(self, fetch: Fetch, *, failed: bool) -> None:
        """Their fetch is over: drop what was not sent, and wait for an end of the rest."""
        for pull in list(fetch.pulls.values()):
            if pull.state is PullState.QUEUED:
                self.settle(pull, PullStep.DROP)
            elif pull.state is not PullState.SERVED:
                self._abort(fetch, pull, failed=failed)

    def _abort(self, fetch: Fetch, pull: FetchPull, *, failed: bool) -> None:
        if not pull.upstream:
            self._turn.emit(fetch.transfer, SendAbort(pull.key, pull.producer, failed))
        if self._step(pull, PullStep.END):
            # Upstream cannot be told, and often just finishes: wait as long as the fetch itself would have.
            soonest = self._turn.now + self._limits.abort_timeout
            due = max(fetch.deadline, soonest) if pull.upstream else soonest
            self._timers.set(PullDue(pull.key), due)

    def settle(self, pull: FetchPull, step: PullStep) -> None:
        """A pull is over and quiet."""
        if not self._step(pull, step):
            return
        self._timers.cancel(PullDue(pull.key))
        self._turn.emit(pull.key.transfer, ForgetPull(pull.key))
        producer = self.producers[pull.producer]
        del producer.pulls[pull.key]
        if not producer.pulls and not producer.fencing:
            self._timers.cancel(FenceDue(pull.producer))
            del self.producers[pull.producer]

    def doubt(self, pull: FetchPull) -> None:
        """Only a fence can tell now. A pull that asked for no byte has nothing to be in doubt of."""
        if pull.release:
            self.settle(pull, PullStep.REFUSE)
            return
        if not self._step(pull, PullStep.DOUBT):
            return
        self._timers.cancel(PullDue(pull.key))
        producer = self.producers[pull.producer]
        if producer.doubt_since is None and not producer.fencing:
            producer.doubt_since = self._turn.now
            self._timers.set(FenceDue(pull.producer), self._turn.now + self._limits.fence_after)

    def _step(self, pull: FetchPull, step: PullStep) -> bool:
        after = PULL_TABLE.get((pull.state, step))
        if after is None:
            return False
        pull.state = after
        self._turn.note(pull.key.transfer, f"pull {pull.key.rank} {after.value}")
        return True
