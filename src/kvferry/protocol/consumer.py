"""The consumer's machine: destination blocks that wait to be filled, and who may still be writing into them.

A *fetch* is one transfer (``consumer_fetches``); it sends a *pull* to each producer rank that it must hear from
(``consumer_pulls``); doubt about a producer ends in a *fence* (``consumer_fences``). Here events are taken in, and what
a reply means is decided. What holds at all times:

* A fetch ends once, by done, failed, aborted or expired, at the latest at its deadline. It is done when every pull is
  served, and a pull is served when its positions have arrived in every cache group, however many parts that took.
* Its fate is reported at once; its blocks are released once, when every pull that was sent is *quiet*: answered by a
  producer that says so, or fenced. A kvferry producer names a request only when its write is quiet. An upstream one
  also names requests whose write failed, and may go on writing: its failures are in doubt.
* Doubt about one producer ends in one fence: the engine that receives from it is destroyed, which settles every pull
  sent to it, so its other open pulls are failed with it. The fence waits ``fence_after`` for them, at most
  ``fence_latest``; it does not wait when the producer is lost, or when too many blocks are in quarantine. Pulls that
  were given up have ``fence_after`` to become quiet then.
* While a fence is under way, new pulls to that producer wait. When it proves nothing (a writer over ``cma`` that lives
  and cannot be reached) its blocks stay held, it is tried again every ``fence_latest``, and fetches from that producer
  are refused meanwhile. With ``quarantined_blocks`` held, all new fetches are: no block is ever given back unproven.
* At most one pull for each (transfer, rank) ever reaches an upstream producer, and nothing else does. A kvferry
  producer is told when a fetch is given up, and gets a pull a second time only if it lacked a layout.
* Everything learnt about a producer belongs to one life of it.
"""

from typing import Final, assert_never

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import TransferId
from kvferry.protocol.consumer_checks import check_fetches, check_producers
from kvferry.protocol.consumer_events import (
    ConsumerAction,
    ConsumerClosing,
    ConsumerEvent,
    ConsumerTick,
    DestinationReleased,
    FenceDone,
    FenceFailed,
    FetchAborted,
    FetchEnded,
    FetchRequested,
    ProducerLost,
    PullFailed,
    PullKey,
    ReleaseRequested,
    ReplyArrived,
    SourceRefused,
    SourceResolved,
    word_of,
)
from kvferry.protocol.consumer_fences import UNPROVEN, Fences
from kvferry.protocol.consumer_fetches import Fetches
from kvferry.protocol.consumer_pulls import Pulls
from kvferry.protocol.consumer_records import ConsumerLimits, FenceDue, Fetch, FetchDue, FetchPull, PullDue, TimerKey
from kvferry.protocol.coverage import Coverage
from kvferry.protocol.invariants import holds
from kvferry.protocol.replies import PullVerdict, Verdict, judge
from kvferry.protocol.story import Entry, Story
from kvferry.protocol.tables import FETCH_ENDED, PULL_MOVING, FetchState, FetchStep, PullState, PullStep
from kvferry.protocol.timers import Timers
from kvferry.protocol.turn import Turn
from kvferry.protocol.values import Fate, Outcome, Ticket

_FULL: Final = "too many blocks are held for failed fetches whose writers live and cannot be reached"


class Consumer:
    """One consumer rank. Feed events in the order in which they happen; carry out the actions in order."""

    def __init__(self, limits: ConsumerLimits | None = None, story: Story | None = None) -> None:
        self.limits = limits or ConsumerLimits()
        self.story = story or Story()
        self._timers: Timers[TimerKey] = Timers()
        self._turn: Turn[ConsumerAction] = Turn(word_of)
        parts = (self.limits, self._turn, self._timers)
        self._fetches = Fetches(*parts)
        self._pulls = Pulls(*parts, fetches=self._fetches)
        self._fences = Fences(*parts, fetches=self._fetches, pulls=self._pulls, fail=self._fail)
        self._closing = False

    @property
    def next_deadline(self) -> float | None:
        """When to feed the next ``ConsumerTick``."""
        return self._timers.next

    @property
    def held(self) -> tuple[Ticket, ...]:
        """Tickets whose blocks are held."""
        return tuple(self._fetches.tickets)

    def ticket_of(self, transfer: TransferId) -> Ticket | None:
        """The ticket whose blocks are held for a transfer."""
        fetch = self._fetches.get(transfer)
        return fetch.ticket if fetch else None

    @property
    def quarantined_blocks(self) -> int:
        """Blocks held although their fetch is over."""
        return self._fetches.quarantined

    def handle(self, event: ConsumerEvent, now: float) -> tuple[ConsumerAction, ...]:
        """Take in one event; what must now be done, in order."""
        self._turn.begin(now)
        self._dispatch(event)
        self._fences.mind_quarantine()
        for transfer, words in self._turn.told.items():
            fetch = self._fetches.get(transfer)
            state = fetch.state.value if fetch else ""
            self.story.add(transfer, Entry(now, type(event).__name__, state, tuple(words)))
        return tuple(self._turn.actions)

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
                self._fences.lost(event)
            case FenceDone():
                self._fences.done(event.producer)
            case FenceFailed():
                self._fences.failed(event.producer)
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
        if event.ticket in self._fetches.tickets:
            return
        refusal, detail = self._no_room(event.transfer), ""
        if refusal is None and self._fences.at_the_bound:
            refusal, detail = ProtocolReason.LIMIT_EXCEEDED, _FULL
        if refusal is not None:
            outcome = Outcome(Fate.FAILED, refusal, detail)
            self._turn.emit(event.transfer, FetchEnded(event.transfer, event.request, event.ticket, outcome))
            self._turn.emit(event.transfer, DestinationReleased(event.transfer, event.ticket))
            return
        fetch = Fetch(event.transfer, event.request, event.source, event.deadline, event.ticket)
        fetch.span, fetch.groups, fetch.blocks = event.span, event.groups, event.blocks
        self._fetches.begin(fetch)

    def _release_requested(self, event: ReleaseRequested) -> None:
        if self._no_room(event.transfer) is None:
            self._fetches.begin(Fetch(event.transfer, event.request, event.source, event.deadline, ticket=None))

    def _no_room(self, transfer: TransferId) -> ProtocolReason | None:
        if self._closing:
            return ProtocolReason.ABORTED
        if self._fetches.get(transfer) is not None:
            return ProtocolReason.DUPLICATE_TRANSFER
        return ProtocolReason.LIMIT_EXCEEDED if self._fetches.full else None

    def _aborted(self, ticket: Ticket) -> None:
        transfer = self._fetches.tickets.get(ticket)
        if transfer is None:
            return
        fetch = self._fetches.known[transfer]
        unsent = not any(pull.state in PULL_MOVING for pull in fetch.pulls.values())
        telling = fetch.state not in FETCH_ENDED and unsent and not self._closing
        self._end(fetch, FetchStep.ABORT, ProtocolReason.ABORTED)
        if telling:
            self._fetches.begin(Fetch(transfer, fetch.request, fetch.source, fetch.deadline, ticket=None))

    # ----------------------------------------------------------------------------------------------- the source

    def _resolved(self, event: SourceResolved) -> None:
        fetch = self._fetches.get(event.transfer)
        if fetch is not None and fetch.state is FetchState.RESOLVING:
            self._pull_from(fetch, event)
        self._pulls.leave(PullKey(event.transfer, target.rank) for target in event.targets)

    def _pull_from(self, fetch: Fetch, event: SourceResolved) -> None:
        keys = {target.rank: PullKey(fetch.transfer, target.rank) for target in event.targets}
        if not keys or len(keys) != len(event.targets):
            self._end(fetch, FetchStep.FAIL, ProtocolReason.PLAN_REFUSED)
            return
        engine = event.producer.engine_id
        if event.upstream and any((engine, key) in self._pulls.sent_upstream for key in keys.values()):
            self._end(fetch, FetchStep.FAIL, ProtocolReason.DUPLICATE_TRANSFER)
            return
        known = self._pulls.producers.get(event.producer)
        if known is not None and known.unproven:
            self._end(fetch, FetchStep.FAIL, ProtocolReason.PEER_LOST, UNPROVEN)
            return
        self._fetches.step(fetch, FetchStep.RESOLVE)
        producer = self._pulls.producer(event.producer, upstream=event.upstream)
        for target in event.targets:
            key = keys[target.rank]
            release = target.release or fetch.ticket is None
            coverage = Coverage(fetch.span, groups=fetch.groups)
            self._pulls.add(fetch, FetchPull(key, event.producer, producer.upstream, release, coverage))
        if not producer.fencing:
            for pull in fetch.pulls.values():
                self._pulls.send(pull)

    def _refused(self, event: SourceRefused) -> None:
        fetch = self._fetches.get(event.transfer)
        if fetch is not None and fetch.state is FetchState.RESOLVING:
            self._end(fetch, FetchStep.FAIL, event.reason, event.detail)

    # ------------------------------------------------------------------------------------------------ the pulls

    def _reply_arrived(self, event: ReplyArrived) -> None:
        pull = self._pulls.get(event.key)
        if pull is None or pull.state not in PULL_MOVING:
            return
        if pull.upstream and pull.state is PullState.IN_DOUBT:
            return  # no later word of upstream says that a failed write is quiet
        fetch = self._fetches.known[event.key.transfer]
        verdict = judge(event.reply, fetch.request, pull.producer, upstream=pull.upstream)
        try:
            for part in () if pull.release else verdict.parts:
                pull.coverage.add(part)
        except RemoteProtocolError as error:
            verdict = PullVerdict(Verdict.DOUBT, reason=error.reason, detail=error.message)
        self._follow(fetch, pull, verdict)
        if verdict.reason is ProtocolReason.STALE_INCARNATION:
            self._fences.outlived(pull.producer)

    def _follow(self, fetch: Fetch, pull: FetchPull, verdict: PullVerdict) -> None:
        """Do what a reply means for its pull."""
        reason, detail = verdict.reason or ProtocolReason.PEER_FAILED, verdict.detail
        match verdict.kind:
            case Verdict.WAIT:
                if pull.state is PullState.OPEN:
                    self._pulls.listen(pull)
            case Verdict.FAILING:
                self._end(fetch, FetchStep.FAIL, reason, detail)
            case Verdict.SERVED:
                self._served(fetch, pull)
            case Verdict.LAYOUT_MISS if pull.state is PullState.OPEN and not pull.inlined:
                self._pulls.send_with_layouts(pull)
            case Verdict.LAYOUT_MISS | Verdict.REFUSED:
                self._pulls.settle(pull, PullStep.REFUSE)
                self._end(fetch, FetchStep.FAIL, reason, detail)
                self._fetches.review(fetch)
            case Verdict.DOUBT:
                self._pulls.doubt(pull)
                self._end(fetch, FetchStep.FAIL, reason, detail)
                self._fetches.review(fetch)
            case _:
                assert_never(verdict.kind)

    def _served(self, fetch: Fetch, pull: FetchPull) -> None:
        whole = pull.upstream or pull.release or pull.coverage.complete
        self._pulls.settle(pull, PullStep.SERVE if whole else PullStep.REFUSE)
        if not whole:
            self._end(fetch, FetchStep.FAIL, ProtocolReason.PEER_FAILED, "positions are missing")
        self._fetches.review(fetch)

    def _pull_failed(self, event: PullFailed) -> None:
        pull = self._pulls.get(event.key)
        if pull is None or pull.state not in PULL_MOVING:
            return
        fetch = self._fetches.known[event.key.transfer]
        if event.quiet:
            self._pulls.settle(pull, PullStep.REFUSE)
        else:
            self._pulls.doubt(pull)
        self._end(fetch, FetchStep.FAIL, event.reason, event.detail)
        self._fetches.review(fetch)

    # ---------------------------------------------------------------------------------------------- the fetches

    def _end(self, fetch: Fetch, step: FetchStep, reason: ProtocolReason, detail: str = "") -> None:
        """A fetch is over without being served: report it, and get its pulls to an end."""
        if self._fetches.end(fetch, step, reason, detail):
            self._pulls.give_up(fetch, failed=step is not FetchStep.ABORT)
            self._fetches.review(fetch)

    def _fail(self, fetch: Fetch, reason: ProtocolReason, detail: str) -> None:
        self._end(fetch, FetchStep.FAIL, reason, detail)

    # -------------------------------------------------------------------------------------------- time, closing

    def _tick(self) -> None:
        while (key := self._timers.pop_due(self._turn.now)) is not None:
            match key:
                case FetchDue():
                    self._end(self._fetches.known[key.transfer], FetchStep.TIME_OUT, ProtocolReason.EXPIRED)
                case PullDue():
                    self._pull_due(key.key)
                case FenceDue():
                    self._fences.due(self._pulls.producers[key.producer])
                case _:
                    assert_never(key)

    def _pull_due(self, key: PullKey) -> None:
        fetch = self._fetches.known[key.transfer]
        self._turn.note(key.transfer, "silent")
        self._pulls.doubt(fetch.pulls[key])
        self._end(fetch, FetchStep.FAIL, ProtocolReason.PEER_LOST)
        self._fetches.review(fetch)

    def _close(self) -> None:
        self._closing = True
        for fetch in self._fetches.all():
            self._end(fetch, FetchStep.FAIL, ProtocolReason.ABORTED)
        self._fences.close()

    def check_invariants(self) -> None:
        """What holds between any two events; for tests. Raises ``AssertionError``."""
        check_fetches(self._fetches, self._pulls, self._timers)
        check_producers(self._pulls, self._timers)
        holds(len(self._fetches.known) <= self.limits.fetches, "fetches are bounded")
        holds(len(self._pulls.sent_upstream.known) <= self.limits.remembered_pulls, "memory is bounded")
