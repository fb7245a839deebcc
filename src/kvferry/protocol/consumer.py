"""The consumer's machine: destination blocks that wait to be filled, and who may still be writing into them.

A *fetch* is one transfer; it sends a *pull* to each producer rank that it must hear from. What holds at all times:

* A fetch ends once, by done, failed, aborted or expired, at the latest at its deadline. It is done when every pull is
  served, and a pull is served when its positions have arrived in every cache group, however many parts that took.
* Its fate is reported at once; its blocks are released once, when every pull that was sent is *quiet*: answered by a
  producer that says so, or fenced. A kvferry producer names a request only when its write is quiet. An upstream one
  also names requests whose write failed, and may go on writing: its failures are in doubt.
* Doubt about one producer ends in one fence: the engine that receives from it is destroyed, which settles every pull
  sent to it, so its other open pulls are failed with it. The fence waits ``fence_after`` for them, at most
  ``fence_latest``; it does not wait when the producer is lost, or when too many blocks are in quarantine.
* While a fence is under way, new pulls to that producer wait. When it proves nothing (a writer over ``cma`` that lives
  and cannot be reached) its blocks stay held, it is tried again every ``fence_latest``, and fetches from that producer
  are refused meanwhile. With ``quarantined_blocks`` held, all new fetches are: no block is ever given back unproven.
* At most one pull for each (transfer, rank) ever reaches an upstream producer, and nothing else does. A kvferry
  producer is told when a fetch is given up, and gets a pull a second time only if it lacked a layout.
* Everything learnt about a producer belongs to one life of it.
"""

from collections import OrderedDict
from typing import assert_never

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.protocol.consumer_events import (
    ConsumerAction,
    ConsumerClosing,
    ConsumerEvent,
    ConsumerTick,
    DestinationReleased,
    FenceDone,
    FenceFailed,
    FenceProducer,
    FetchAborted,
    FetchEnded,
    FetchRequested,
    ForgetProducer,
    ForgetPull,
    ProducerLost,
    PullFailed,
    PullKey,
    ReleaseRequested,
    ReplyArrived,
    Resolve,
    SendAbort,
    SendPull,
    SourceRefused,
    SourceResolved,
)
from kvferry.protocol.consumer_records import (
    ConsumerLimits,
    FenceDue,
    Fetch,
    FetchDue,
    FetchPull,
    ProducerRecord,
    PullDue,
    TimerKey,
)
from kvferry.protocol.coverage import Coverage
from kvferry.protocol.invariants import holds
from kvferry.protocol.replies import PullVerdict, Verdict, judge
from kvferry.protocol.story import Entry, Story
from kvferry.protocol.tables import (
    FETCH_ENDED,
    FETCH_TABLE,
    PULL_MOVING,
    PULL_TABLE,
    FetchState,
    FetchStep,
    PullState,
    PullStep,
)
from kvferry.protocol.timers import Timers
from kvferry.protocol.values import DONE, Fate, Outcome, Ticket

_UNPROVEN = "it cannot be proven yet that earlier writes of this producer are over"
_FULL = "too many blocks are held for failed fetches whose writers live and cannot be reached"
_FATES = {FetchStep.FAIL: Fate.FAILED, FetchStep.ABORT: Fate.ABORTED, FetchStep.TIME_OUT: Fate.EXPIRED}


class Consumer:
    """One consumer rank. Feed events in the order in which they happen; carry out the actions in order."""

    def __init__(self, limits: ConsumerLimits | None = None, story: Story | None = None) -> None:
        self.limits = limits or ConsumerLimits()
        self.story = story or Story()
        self._fetches: dict[TransferId, Fetch] = {}
        self._tickets: dict[Ticket, TransferId] = {}
        self._producers: dict[Incarnation, ProducerRecord] = {}
        self._pulled: OrderedDict[tuple[EngineId, PullKey], None] = OrderedDict()
        self._timers: Timers[TimerKey] = Timers()
        self._quarantined = 0
        self._closing = False
        self._now = 0.0
        self._actions: list[ConsumerAction] = []
        self._told: dict[TransferId, list[str]] = {}

    @property
    def next_deadline(self) -> float | None:
        """When to feed the next ``ConsumerTick``."""
        return self._timers.next

    @property
    def held(self) -> tuple[Ticket, ...]:
        """Tickets whose blocks are held."""
        return tuple(self._tickets)

    def ticket_of(self, transfer: TransferId) -> Ticket | None:
        """The ticket whose blocks are held for a transfer."""
        fetch = self._fetches.get(transfer)
        return fetch.ticket if fetch else None

    @property
    def quarantined_blocks(self) -> int:
        """Blocks held although their fetch is over."""
        return self._quarantined

    def handle(self, event: ConsumerEvent, now: float) -> tuple[ConsumerAction, ...]:
        """Take in one event; what must now be done, in order."""
        self._now, self._actions, self._told = now, [], {}
        self._dispatch(event)
        self._mind_quarantine()
        for transfer, actions in self._told.items():
            fetch = self._fetches.get(transfer)
            state = fetch.state.value if fetch else ""
            self.story.add(transfer, Entry(now, type(event).__name__, state, tuple(actions)))
        return tuple(self._actions)

    def _dispatch(self, event: ConsumerEvent) -> None:
        match event:
            case FetchRequested():
                self._fetch_requested(event)
            case ReleaseRequested():
                self._release_requested(event)
            case SourceResolved():
                self._resolved(event)
            case SourceRefused():
                self._refused(event)
            case ReplyArrived():
                self._reply_arrived(event)
            case PullFailed():
                self._pull_failed(event)
            case ProducerLost():
                self._producer_lost(event)
            case FenceDone():
                self._fence_done(event.producer)
            case FenceFailed():
                self._fence_failed(event.producer)
            case FetchAborted():
                self._aborted(event.ticket)
            case ConsumerClosing():
                self._close()
            case ConsumerTick():
                self._tick()
            case _:
                assert_never(event)

    # ------------------------------------------------------------------------------------------- the scheduler

    def _fetch_requested(self, event: FetchRequested) -> None:
        if event.ticket in self._tickets:
            return
        refusal, detail = self._no_room(event.transfer), ""
        if refusal is None and self._at_the_bound:
            refusal, detail = ProtocolReason.LIMIT_EXCEEDED, _FULL
        if refusal is not None:
            outcome = Outcome(Fate.FAILED, refusal, detail)
            self._emit(event.transfer, FetchEnded(event.transfer, event.request, event.ticket, outcome))
            self._emit(event.transfer, DestinationReleased(event.transfer, event.ticket))
            return
        fetch = Fetch(event.transfer, event.request, event.source, event.deadline, event.ticket)
        fetch.span, fetch.groups, fetch.blocks = event.span, event.groups, event.blocks
        self._tickets[event.ticket] = event.transfer
        self._begin(fetch)

    def _release_requested(self, event: ReleaseRequested) -> None:
        if self._no_room(event.transfer) is None:
            self._begin(Fetch(event.transfer, event.request, event.source, event.deadline, ticket=None))

    def _no_room(self, transfer: TransferId) -> ProtocolReason | None:
        if self._closing:
            return ProtocolReason.ABORTED
        if transfer in self._fetches:
            return ProtocolReason.DUPLICATE_TRANSFER
        return ProtocolReason.LIMIT_EXCEEDED if len(self._fetches) >= self.limits.fetches else None

    @property
    def _at_the_bound(self) -> bool:
        """Whether no more blocks may come into doubt: enough are held, and what was tried proves nothing."""
        bound = self.limits.quarantined_blocks
        full = bound is not None and self._quarantined >= bound
        return full and any(producer.unproven for producer in self._producers.values())

    def _begin(self, fetch: Fetch) -> None:
        self._fetches[fetch.transfer] = fetch
        self._timers.set(FetchDue(fetch.transfer), fetch.deadline)
        self._emit(fetch.transfer, Resolve(fetch.transfer, fetch.source))

    def _aborted(self, ticket: Ticket) -> None:
        transfer = self._tickets.get(ticket)
        if transfer is None:
            return
        fetch = self._fetches[transfer]
        unsent = not any(pull.state in PULL_MOVING for pull in fetch.pulls.values())
        telling = fetch.state not in FETCH_ENDED and unsent and not self._closing
        self._end(fetch, FetchStep.ABORT, ProtocolReason.ABORTED)
        if telling:
            self._begin(Fetch(transfer, fetch.request, fetch.source, fetch.deadline, ticket=None))

    # ----------------------------------------------------------------------------------------------- the source

    def _resolved(self, event: SourceResolved) -> None:
        fetch = self._fetches.get(event.transfer)
        if fetch is None or fetch.state is not FetchState.RESOLVING:
            return
        keys = {target.rank: PullKey(fetch.transfer, target.rank) for target in event.targets}
        if not keys or len(keys) != len(event.targets):
            self._end(fetch, FetchStep.FAIL, ProtocolReason.PLAN_REFUSED)
            return
        engine = event.producer.engine_id
        if event.upstream and any((engine, key) in self._pulled for key in keys.values()):
            self._end(fetch, FetchStep.FAIL, ProtocolReason.DUPLICATE_TRANSFER)
            return
        known = self._producers.get(event.producer)
        if known is not None and known.unproven:
            self._end(fetch, FetchStep.FAIL, ProtocolReason.PEER_LOST, _UNPROVEN)
            return
        self._step_fetch(fetch, FetchStep.RESOLVE)
        producer = self._producers.setdefault(event.producer, ProducerRecord(event.producer, event.upstream))
        for target in event.targets:
            key = keys[target.rank]
            release = target.release or fetch.ticket is None
            coverage = Coverage(fetch.span, groups=fetch.groups)
            fetch.pulls[key] = FetchPull(key, event.producer, producer.upstream, release, coverage)
            producer.pulls[key] = None
        if not producer.fencing:
            for pull in fetch.pulls.values():
                self._send(pull)

    def _refused(self, event: SourceRefused) -> None:
        fetch = self._fetches.get(event.transfer)
        if fetch is not None and fetch.state is FetchState.RESOLVING:
            self._end(fetch, FetchStep.FAIL, event.reason, event.detail)

    def _send(self, pull: FetchPull) -> None:
        if not self._step_pull(pull, PullStep.SEND):
            return
        if pull.upstream:
            self._pulled[(pull.producer.engine_id, pull.key)] = None
            if len(self._pulled) > self.limits.remembered_pulls:
                self._pulled.popitem(last=False)
        self._listen(pull)
        self._emit(pull.key.transfer, SendPull(pull.key, pull.producer, pull.release))

    def _listen(self, pull: FetchPull) -> None:
        """Expect the next word about an open pull. Upstream says nothing while the prompt is computed."""
        if not pull.upstream:
            self._timers.set(PullDue(pull.key), self._now + self.limits.silence)

    # ------------------------------------------------------------------------------------------------ the pulls

    def _pull(self, key: PullKey) -> FetchPull | None:
        fetch = self._fetches.get(key.transfer)
        return fetch.pulls.get(key) if fetch else None

    def _reply_arrived(self, event: ReplyArrived) -> None:
        pull = self._pull(event.key)
        if pull is None or pull.state not in PULL_MOVING:
            return
        if pull.upstream and pull.state is PullState.IN_DOUBT:
            return  # no later word of upstream says that a failed write is quiet
        fetch = self._fetches[event.key.transfer]
        verdict = judge(event.reply, fetch.request, pull.producer, upstream=pull.upstream)
        try:
            for part in () if pull.release else verdict.parts:
                pull.coverage.add(part)
        except RemoteProtocolError as error:
            verdict = PullVerdict(Verdict.DOUBT, reason=error.reason, detail=error.message)
        self._follow(fetch, pull, verdict)

    def _follow(self, fetch: Fetch, pull: FetchPull, verdict: PullVerdict) -> None:
        """Do what a reply means for its pull."""
        reason, detail = verdict.reason or ProtocolReason.PEER_FAILED, verdict.detail
        match verdict.kind:
            case Verdict.WAIT:
                if pull.state is PullState.OPEN:
                    self._listen(pull)
            case Verdict.FAILING:
                self._end(fetch, FetchStep.FAIL, reason, detail)
            case Verdict.SERVED:
                self._served(fetch, pull)
            case Verdict.LAYOUT_MISS if pull.state is PullState.OPEN and not pull.inlined:
                pull.inlined = True
                self._listen(pull)
                again = SendPull(pull.key, pull.producer, pull.release, inline_layouts=True)
                self._emit(pull.key.transfer, again)
            case Verdict.LAYOUT_MISS | Verdict.REFUSED:
                self._settle(pull, PullStep.REFUSE)
                self._end(fetch, FetchStep.FAIL, reason, detail)
                self._review(fetch)
            case Verdict.DOUBT:
                self._doubt(pull)
                self._end(fetch, FetchStep.FAIL, reason, detail)
                self._review(fetch)
            case _:
                assert_never(verdict.kind)

    def _served(self, fetch: Fetch, pull: FetchPull) -> None:
        whole = pull.upstream or pull.release or pull.coverage.complete
        self._settle(pull, PullStep.SERVE if whole else PullStep.REFUSE)
        if not whole:
            self._end(fetch, FetchStep.FAIL, ProtocolReason.PEER_FAILED, "positions are missing")
        self._review(fetch)

    def _pull_failed(self, event: PullFailed) -> None:
        pull = self._pull(event.key)
        if pull is None or pull.state not in PULL_MOVING:
            return
        fetch = self._fetches[event.key.transfer]
        if event.quiet:
            self._settle(pull, PullStep.REFUSE)
        else:
            self._doubt(pull)
        self._end(fetch, FetchStep.FAIL, event.reason, event.detail)
        self._review(fetch)

    def _settle(self, pull: FetchPull, step: PullStep) -> None:
        """A pull is over and quiet."""
        if not self._step_pull(pull, step):
            return
        self._timers.cancel(PullDue(pull.key))
        if step is not PullStep.DROP:
            self._emit(pull.key.transfer, ForgetPull(pull.key))
        producer = self._producers[pull.producer]
        del producer.pulls[pull.key]
        if not producer.pulls and not producer.fencing:
            self._timers.cancel(FenceDue(pull.producer))
            del self._producers[pull.producer]

    def _doubt(self, pull: FetchPull) -> None:
        """Only a fence can tell now. A pull that asked for no byte has nothing to be in doubt of."""
        if pull.release:
            self._settle(pull, PullStep.REFUSE)
            return
        if not self._step_pull(pull, PullStep.DOUBT):
            return
        self._timers.cancel(PullDue(pull.key))
        producer = self._producers[pull.producer]
        if producer.doubt_since is None and not producer.fencing:
            producer.doubt_since = self._now
            self._timers.set(FenceDue(pull.producer), self._now + self.limits.fence_after)

    # ---------------------------------------------------------------------------------------------- the fetches

    def _end(self, fetch: Fetch, step: FetchStep, reason: ProtocolReason, detail: str = "") -> None:
        """A fetch is over without being served: report it, and get its pulls to an end."""
        if not self._step_fetch(fetch, step):
            return
        self._timers.cancel(FetchDue(fetch.transfer))
        self._quarantined += fetch.blocks
        self._report(fetch, Outcome(_FATES[step], reason, detail))
        for pull in list(fetch.pulls.values()):
            if pull.state is PullState.QUEUED:
                self._settle(pull, PullStep.DROP)
            elif pull.state is not PullState.SERVED:
                self._give_up(fetch, pull, failed=step is not FetchStep.ABORT)
        self._review(fetch)

    def _give_up(self, fetch: Fetch, pull: FetchPull, *, failed: bool) -> None:
        if not pull.upstream:
            self._emit(fetch.transfer, SendAbort(pull.key, pull.producer, failed))
        if self._step_pull(pull, PullStep.END):
            # Upstream cannot be told, and often just finishes: wait as long as the fetch itself would have.
            soonest = self._now + self.limits.abort_timeout
            due = max(fetch.deadline, soonest) if pull.upstream else soonest
            self._timers.set(PullDue(pull.key), due)

    def _report(self, fetch: Fetch, outcome: Outcome) -> None:
        if fetch.ticket is not None:
            self._emit(fetch.transfer, FetchEnded(fetch.transfer, fetch.request, fetch.ticket, outcome))

    def _review(self, fetch: Fetch) -> None:
        """See whether a fetch is served, or over and quiet."""
        if self._fetches.get(fetch.transfer) is not fetch:
            return
        states = {pull.state for pull in fetch.pulls.values()}
        if states == {PullState.SERVED} and self._step_fetch(fetch, FetchStep.COMPLETE):
            self._timers.cancel(FetchDue(fetch.transfer))
            self._report(fetch, DONE)
        if fetch.state in FETCH_ENDED and not states & PULL_MOVING:
            del self._fetches[fetch.transfer]
            self._quarantined -= 0 if fetch.state is FetchState.DONE else fetch.blocks
            if fetch.ticket is not None:
                del self._tickets[fetch.ticket]
                self._emit(fetch.transfer, DestinationReleased(fetch.transfer, fetch.ticket))

    # -------------------------------------------------------------------------------------------- the producers

    def _producer_lost(self, event: ProducerLost) -> None:
        self._actions.append(ForgetProducer(event.producer))
        producer = self._producers.get(event.producer)
        if producer is not None:
            self._fence(producer, event.reason)

    def _fence(self, producer: ProducerRecord, reason: ProtocolReason) -> None:
        """Fail what is open with this producer, and have the engine that it writes to destroyed."""
        if producer.fencing:
            return
        producer.fencing, producer.doubt_since = True, None
        for pull in self._pulls_of(producer):
            fetch = self._fetches.get(pull.key.transfer)
            if fetch is None or pull.state not in PULL_MOVING:
                continue
            self._doubt(pull)
            self._end(fetch, FetchStep.FAIL, reason)
            self._review(fetch)
        if any(pull.state is PullState.IN_DOUBT for pull in self._pulls_of(producer)):
            self._ask_for_fence(producer)
        else:
            self._fence_over(producer)

    def _ask_for_fence(self, producer: ProducerRecord) -> None:
        self._actions.append(FenceProducer(producer.incarnation))
        for pull in self._pulls_of(producer):
            self._note(pull.key.transfer, "fence asked for")
        # A driver answers a fence with done or failed. This is for one that does neither.
        self._timers.set(FenceDue(producer.incarnation), self._now + 4 * self.limits.fence_latest)

    def _fence_done(self, incarnation: Incarnation) -> None:
        producer = self._producers.get(incarnation)
        if producer is None or not producer.fencing:
            return
        for pull in self._pulls_of(producer):
            fetch = self._fetches[pull.key.transfer]
            self._settle(pull, PullStep.FENCE)
            self._review(fetch)
        self._fence_over(producer)

    def _fence_over(self, producer: ProducerRecord) -> None:
        producer.fencing = producer.unproven = False
        self._timers.cancel(FenceDue(producer.incarnation))
        if not producer.pulls:
            del self._producers[producer.incarnation]
        for pull in self._pulls_of(producer):
            self._send(pull)

    def _fence_failed(self, incarnation: Incarnation) -> None:
        producer = self._producers.get(incarnation)
        if producer is None or not producer.fencing:
            return
        producer.unproven = True
        self._timers.set(FenceDue(incarnation), self._now + self.limits.fence_latest)
        for pull in self._pulls_of(producer):
            fetch = self._fetches.get(pull.key.transfer)
            if fetch is not None and pull.state is PullState.QUEUED:
                self._end(fetch, FetchStep.FAIL, ProtocolReason.PEER_LOST, _UNPROVEN)

    def _pulls_of(self, producer: ProducerRecord) -> list[FetchPull]:
        return [self._fetches[key.transfer].pulls[key] for key in producer.pulls]

    def _mind_quarantine(self) -> None:
        """At the bound, prove quiet rather than hold more; blocks are never given back unproven."""
        bound = self.limits.quarantined_blocks
        if bound is None or self._quarantined <= bound:
            return
        for producer in list(self._producers.values()):
            if any(pull.state in (PullState.IN_DOUBT, PullState.ENDING) for pull in self._pulls_of(producer)):
                self._fence(producer, ProtocolReason.LIMIT_EXCEEDED)

    # -------------------------------------------------------------------------------------------- time, closing

    def _tick(self) -> None:
        while (key := self._timers.pop_due(self._now)) is not None:
            match key:
                case FetchDue():
                    self._end(self._fetches[key.transfer], FetchStep.TIME_OUT, ProtocolReason.EXPIRED)
                case PullDue():
                    self._pull_due(key.key)
                case FenceDue():
                    self._fence_due(self._producers[key.producer])
                case _:
                    assert_never(key)

    def _pull_due(self, key: PullKey) -> None:
        fetch = self._fetches[key.transfer]
        self._note(key.transfer, "silent")
        self._doubt(fetch.pulls[key])
        self._end(fetch, FetchStep.FAIL, ProtocolReason.PEER_LOST)
        self._review(fetch)

    def _fence_due(self, producer: ProducerRecord) -> None:
        if producer.fencing:
            self._ask_for_fence(producer)
            return
        if producer.doubt_since is None:
            return
        latest = producer.doubt_since + self.limits.fence_latest
        if self._now < latest and any(pull.state is PullState.OPEN for pull in self._pulls_of(producer)):
            self._timers.set(FenceDue(producer.incarnation), min(latest, self._now + self.limits.fence_after))
            return
        if any(pull.state is PullState.IN_DOUBT for pull in self._pulls_of(producer)):
            self._fence(producer, ProtocolReason.TRANSPORT_FAILED)
        else:
            producer.doubt_since = None

    def _close(self) -> None:
        self._closing = True
        for fetch in list(self._fetches.values()):
            self._end(fetch, FetchStep.FAIL, ProtocolReason.ABORTED)
        for producer in list(self._producers.values()):
            self._fence(producer, ProtocolReason.ABORTED)

    # ------------------------------------------------------------------------------------------------- the rest

    def _step_fetch(self, fetch: Fetch, step: FetchStep) -> bool:
        after = FETCH_TABLE.get((fetch.state, step))
        if after is None:
            return False
        fetch.state = after
        self._told.setdefault(fetch.transfer, [])
        return True

    def _step_pull(self, pull: FetchPull, step: PullStep) -> bool:
        after = PULL_TABLE.get((pull.state, step))
        if after is None:
            return False
        pull.state = after
        self._note(pull.key.transfer, f"pull {pull.key.rank} {after.value}")
        return True

    def _emit(self, transfer: TransferId, action: ConsumerAction) -> None:
        self._actions.append(action)
        self._note(transfer, _word(action))

    def _note(self, transfer: TransferId, word: str) -> None:
        self._told.setdefault(transfer, []).append(word)

    def check_invariants(self) -> None:
        """What holds between any two events; for tests. Raises ``AssertionError``."""
        for fetch in self._fetches.values():
            self._check_fetch(fetch)
        tickets = {f.ticket: f.transfer for f in self._fetches.values() if f.ticket is not None}
        holds(self._tickets == tickets, "tickets name their fetches")
        for incarnation, producer in self._producers.items():
            states = {pull.state for pull in self._pulls_of(producer)}
            holds(producer.fencing or bool(states), "a producer is kept for its pulls")
            holds(not producer.unproven or states <= {PullState.IN_DOUBT}, "nothing waits for a fence that fails")
            holds(not producer.fencing or states <= {PullState.IN_DOUBT, PullState.QUEUED}, "a fence settles all")
            holds(producer.fencing or PullState.QUEUED not in states, "pulls wait only for a fence")
            doubtful = PullState.IN_DOUBT in states
            holds(not doubtful or FenceDue(incarnation) in self._timers, "doubt has an end")
        over = sum(fetch.blocks for fetch in self._fetches.values() if fetch.state in FETCH_ENDED)
        holds(over == self._quarantined, "blocks in quarantine are counted")
        holds(len(self._fetches) <= self.limits.fetches, "fetches are bounded")
        holds(len(self._pulled) <= self.limits.remembered_pulls, "memory is bounded")
        known = sum(1 + len(fetch.pulls) for fetch in self._fetches.values()) + len(self._producers)
        holds(len(self._timers) <= known, "no stray timer")

    def _check_fetch(self, fetch: Fetch) -> None:
        states = {pull.state for pull in fetch.pulls.values()}
        ended = fetch.state in FETCH_ENDED
        holds(ended != (FetchDue(fetch.transfer) in self._timers), "a fetch that is not over has a deadline")
        holds(not ended or bool(states & PULL_MOVING), "a fetch that is over is kept only for its pulls")
        holds(not ended or not states & {PullState.OPEN, PullState.QUEUED}, "no pull goes on without its fetch")
        holds(ended or not states & {PullState.ENDING, PullState.IN_DOUBT, PullState.CLOSED}, "a failure is told")
        for pull in fetch.pulls.values():
            live = pull.state in (PullState.QUEUED, *PULL_MOVING)
            known = self._producers.get(pull.producer)
            holds(live == (known is not None and pull.key in known.pulls), "a live pull is its producer's")
            due = PullDue(pull.key) in self._timers
            holds(due or pull.state is not PullState.ENDING, "an ending pull has a deadline")


def _word(action: ConsumerAction) -> str:
    match action:
        case FetchEnded():
            return f"ended {action.outcome.fate.value} {action.outcome.reason or ''}".rstrip()
        case SendPull() | SendAbort():
            return f"{type(action).__name__} {action.key.rank}"
        case _:
            return type(action).__name__
