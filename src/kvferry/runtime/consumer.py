"""The consumer side of one worker: asks producers to write into this worker's memory, and says when they have.

One thread with one loop owns everything; the embedding engine's thread hands in *fetch*, *release* and *cancel*, and
takes out what ended and which tickets are quiet. The fate of a fetch and its blocks are separate: the fate is told at
once, the blocks when nothing can be written into them any more.

A fetch goes: its producer is found and its layouts fetched once (:mod:`kvferry.runtime.producers`), the plan between
the two engines compiled once, a receive engine made once for each life of each producer; then one pull goes to every
producer rank that the plan pairs with this one.
"""

import asyncio
import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, assert_never

from kvferry.errors import FerryError, ProtocolReason, RemoteProtocolError, TransportError
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.plan import Plan
from kvferry.protocol import (
    Consumer,
    ConsumerAction,
    ConsumerClosing,
    ConsumerEvent,
    ConsumerLimits,
    ConsumerTick,
    DestinationReleased,
    Entry,
    Fate,
    FenceDone,
    FenceFailed,
    FenceProducer,
    FetchAborted,
    FetchEnded,
    FetchRequested,
    ForgetProducer,
    ForgetPull,
    Outcome,
    ProducerLost,
    PullExtension,
    PullFailed,
    PullKey,
    ReleaseRequested,
    Reply,
    ReplyArrived,
    Resolve,
    SendAbort,
    SendPull,
    Source,
    SourceRefused,
    SourceResolved,
    Span,
    Table,
    Target,
    Ticket,
    decode_reply,
    encode,
)
from kvferry.runtime.checking import Checker, Verified, still_busy
from kvferry.runtime.fetches import Fetch
from kvferry.runtime.journal import ConsumerJournal, Fetched
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.pairing import pulls_expected, targets_of
from kvferry.runtime.plans import Plans, Recent
from kvferry.runtime.producers import Finder, Producers, RemoteEngine, refusal_of
from kvferry.runtime.pulling import Pulled, PullMaker
from kvferry.runtime.pump import Pump
from kvferry.runtime.receivers import Receivers
from kvferry.runtime.retrying import Attempt, Retries
from kvferry.runtime.sending import label_of
from kvferry.runtime.sides import Local
from kvferry.runtime.upstream_pulling import UpstreamPuller

logger = logging.getLogger(__name__)

FENCES: Final = 3
FENCE_PAUSE: Final = 0.3
"""So often, at this pace, a fence is tried before it has failed."""

CHECK_PAUSE: Final = 5.0
"""While pages are compared, the machine is told so often that a pull is alive."""

MAX_TOLD: Final = 256
"""Producers of vLLM's own connector of which it is remembered that they were told of."""

QUIET_ASKS: Final = 20
QUIET_PAUSE: Final = 0.1
"""So often, at this pace, a writer is asked in one go whether it is quiet."""


class Wires(Protocol):
    """Connections to producer ranks (:class:`kvferry.control.Links`)."""

    def pull(self, key: PullKey, address: str, data: bytes, *, number: int | None) -> None:
        """Send a pull; replies to it and a loss of its connection are told by its key."""

    def note(self, address: str, data: bytes) -> None:
        """Send a message that has no answer of its own."""

    def is_open(self, address: str) -> bool:
        """Whether there is a connection to this rank now."""

    def forget(self, key: PullKey) -> None:
        """Nothing more is expected for this pull."""


@dataclass(slots=True)
class _Course:
    """How far one transfer has come on this side."""

    pulled: Pulled
    ticket: Ticket | None
    """``None``: no blocks are held for it (any more), the producer is only told that it is not needed."""
    began: float
    resolving: bool = True
    checking: set[int] = field(default_factory=set)
    """Producer ranks whose pages are being compared."""
    verified: Verified = field(default_factory=Verified)
    engine: RemoteEngine | None = None
    plan: Plan | None = None
    targets: dict[int, bool] = field(default_factory=dict)
    """Producer ranks that are pulled from, each with whether there is anything to fetch."""
    open: set[int] = field(default_factory=set)
    """Producer ranks whose pulls are not over."""
    sent: float | None = None


class ConsumerCore:
    """All of a consumer that lives on its loop."""

    def __init__(
        self,
        local: Local,
        thread: LoopThread,
        options: RuntimeOptions,
        *,
        finder: Finder,
        journal: ConsumerJournal,
    ) -> None:
        self._local = local
        self._thread = thread
        self._receivers = Receivers(options.make_transport, local.regions)
        self._finder = finder
        self._maker = PullMaker(local, options.host)
        self._upstream = UpstreamPuller(local, options.upstream_peers)
        self._timing = options.timing
        self._journal = journal
        self._plans = Plans(local.placements, layouts=options.max_layouts)
        self._producers = Producers(finder, options.timing)
        self._checker = Checker(local, options.verify)
        self._links: Wires | None = None
        self._asks = 0
        self._courses: dict[TransferId, _Course] = {}
        machine = Consumer(_limits(local, options))
        self.story = machine.story
        """Lives of the newest transfers, for people."""
        self._pump: Pump[ConsumerEvent, ConsumerAction] = Pump(
            machine, self._perform, tick=ConsumerTick(), loop=thread.loop
        )
        self._retries = Retries(
            options.retries, grace=options.timing.retry_quiet, loop=thread.loop, report=self._report
        )
        self.ended: queue.SimpleQueue[FetchEnded] = queue.SimpleQueue()
        self.quiet: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self.met_upstream: queue.SimpleQueue[EngineId] = queue.SimpleQueue()
        """Producers that run vLLM's own connector."""
        self._told_upstream: Recent[str, None] = Recent(MAX_TOLD)

    @property
    def open_pulls(self) -> tuple[PullKey, ...]:
        """Pulls that are not over."""
        return tuple(
            PullKey(transfer, rank) for transfer, course in self._courses.items() for rank in sorted(course.open)
        )

    def attach(self, links: Wires) -> None:
        """Connections can be made from now on."""
        self._links = links

    def feed(self, event: ConsumerEvent) -> None:
        """Hand an event to the machine."""
        self._pump.feed(event)

    # -- from the embedding engine ---------------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Fetch positions into blocks."""
        first = Attempt(fetch, time.monotonic() + self._timing.pull)
        self._retries.begin(first)
        self._attempt(first)

    def _attempt(self, attempt: Attempt) -> None:
        fetch = attempt.fetch
        pulled = Pulled(fetch.request, fetch.transfer, fetch.span, fetch.tables, fetch.prompt)
        # A transfer id that is used again while the first is alive is refused by the machine; the first goes on.
        self._courses.setdefault(fetch.transfer, _Course(pulled, fetch.ticket, time.perf_counter()))
        self.feed(
            FetchRequested(
                transfer=fetch.transfer,
                request=fetch.request,
                ticket=fetch.ticket,
                source=fetch.source,
                span=fetch.span,
                groups=len(fetch.tables),
                deadline=attempt.deadline,
                blocks=sum(block is not None for table in fetch.tables for block in table.blocks),
            )
        )

    def spoiled(self, fetch: Fetch) -> None:
        """The device failed before the fetch began: it has failed, and nobody was asked to write for it."""
        self._retries.begin(Attempt(fetch, time.monotonic()))  # so that its alternatives are released with it
        outcome = Outcome(Fate.FAILED, ProtocolReason.DEVICE_FAILED, "the device of this worker failed")
        ended = FetchEnded(fetch.transfer, fetch.request, fetch.ticket, outcome)
        pulled = Pulled(fetch.request, fetch.transfer, fetch.span, fetch.tables, fetch.prompt)
        fetched = self._fetched(_Course(pulled, fetch.ticket, time.perf_counter()), ended)
        self._journal.ended(fetched)
        self._report(ended)
        self._journal.told(fetched)
        self.quiet.put(fetch.ticket)
        self.release(fetch.transfer, fetch.request, fetch.source)

    def release(self, transfer: TransferId, request: RequestId, source: Source) -> None:
        """Nothing is wanted of this transfer; its producer should know."""
        groups = len(self._local.placement.groups)
        empty = tuple(Table(first_token=0, blocks=()) for _ in range(groups))
        pulled = Pulled(request, transfer, Span(0, 0), empty)
        self._courses.setdefault(transfer, _Course(pulled, None, time.perf_counter()))
        deadline = time.monotonic() + self._timing.orphan
        self.feed(ReleaseRequested(transfer, request, source, deadline))

    def cancel(self, ticket: Ticket) -> None:
        """The request of this fetch is gone."""
        between = self._retries.cancel(ticket)
        if between is not None:
            self._report(between)
        self.feed(FetchAborted(ticket))

    def closing(self) -> None:
        """Everything ends now."""
        self._retries.close()
        self.feed(ConsumerClosing())
        self._pump.stop()

    async def close(self) -> None:
        """Destroy the receive engines."""
        await self._checker.close()
        await self._receivers.close()

    # -- from the network ------------------------------------------------------------------------------------

    def on_reply(self, pull: PullKey, data: bytes) -> None:
        """A producer rank answered."""
        try:
            reply = decode_reply(data)
        except RemoteProtocolError as error:
            logger.warning("transfer %s: an unreadable reply of rank %d: %s", pull.transfer, pull.rank, error)
            # Whoever speaks another major version has refused the pull, as this side would: it did nothing for it.
            quiet = error.reason is ProtocolReason.VERSION
            self.feed(PullFailed(pull, error.reason, quiet=quiet, detail=error.message))
            return
        course = self._courses.get(pull.transfer)
        if course is None or course.pulled.verify is None or course.pulled.request not in (reply.ok_reqs or ()):
            self.feed(ReplyArrived(pull, reply))
        elif pull.rank in course.open and pull.rank not in course.checking:
            course.checking.add(pull.rank)
            self._thread.spawn(self._check(course, pull, reply))

    async def _check(self, course: _Course, pull: PullKey, reply: Reply) -> None:
        """All that a rank was to write is here: compare it, then tell the machine."""
        if course.plan is None or not targets_of(course.plan, self._local.index).get(pull.rank):
            self.feed(ReplyArrived(pull, reply))  # it had nothing for us
            return
        work = self._thread.spawn(self._checker.check(course.plan, pull.rank, course.pulled, reply))
        while not (await asyncio.wait({work}, timeout=CHECK_PAUSE))[0]:
            self.feed(ReplyArrived(pull, still_busy(reply)))  # nothing more will be heard of the producer
        found = work.result()
        if pull.rank not in course.open:
            return  # fenced meanwhile: its blocks may hold something else by now, and nobody waits for a verdict
        if isinstance(found, Verified):
            course.verified += found
            self.feed(ReplyArrived(pull, reply))
        else:
            self._journal.mismatched(pull.transfer, pull.rank, found)
            # The producer has said that its write is complete, so it is quiet, whatever it wrote.
            self.feed(PullFailed(pull, ProtocolReason.VERIFY_MISMATCH, quiet=True, detail=str(found)))

    def on_lost(self, pull: PullKey) -> None:
        """The connection of a pull is gone or silent: its producer is suspected."""
        course = self._courses.get(pull.transfer)
        if course is not None and course.engine is not None:
            self.feed(ProducerLost(course.engine.incarnation))

    # -- what the machine asks for ---------------------------------------------------------------------------

    def _perform(self, action: ConsumerAction) -> None:
        match action:
            case Resolve():
                if not self._resolve_at_once(action):
                    self._thread.spawn(self._resolve(action))
            case SendPull():
                self._send_pull(action)
            case SendAbort():
                self._send_abort(action)
            case ForgetPull():
                self._forget_pull(action.key)
            case ForgetProducer():
                self._producers.forget(action.producer)
            case FenceProducer():
                self._thread.spawn(self._fence(action.producer))
            case FetchEnded():
                self._end(action)
            case DestinationReleased():
                self._released(action)
            case _:
                assert_never(action)

    async def _resolve(self, action: Resolve) -> None:
        try:
            engine = await self._producers.find(action.source, still=self._is_connected)
            self._tell_kind(engine)
            if not self._only_releases(action.transfer):
                self._checker.demand(engine)
            plan = await self._plan_with(engine) if engine.grid is None else None
            targets = self._targets(action.transfer, engine, plan)
            for rank in targets:
                await self._receive_from(engine, rank)
        except FerryError as error:
            self._resolved(action.transfer)
            self.feed(SourceRefused(action.transfer, refusal_of(error), error.message))
            return
        self._resolved_to(action, engine, plan, targets)

    def _resolve_at_once(self, action: Resolve) -> bool:
        """The same, where nothing has to be asked or made: as nearly always. Says no where something has."""
        engine = self._producers.known(action.source, still=self._is_connected)
        if engine is None or engine.grid is not None or engine.model != self._local.model:
            return False
        plan = self._plans.known(engine.fingerprints, self._local.side().fingerprints)
        if plan is None or not (self._only_releases(action.transfer) or self._checker.is_content_with(engine)):
            return False
        targets = targets_of(plan, self._local.index)
        if not all(self._receivers.receive(engine.incarnation, engine.ranks[rank]) for rank in targets):
            return False
        self._resolved_to(action, engine, plan, targets)
        return True

    def _resolved_to(self, action: Resolve, engine: RemoteEngine, plan: Plan | None, targets: dict[int, bool]) -> None:
        if (course := self._courses.get(action.transfer)) is not None:
            course.engine, course.plan = engine, plan
            course.targets, course.open = targets, set(targets)
            course.resolving = False
        self._retire_before(engine.incarnation)
        chosen = tuple(Target(rank, release=not wanted) for rank, wanted in targets.items())
        upstream = engine.grid is not None
        self.feed(SourceResolved(action.transfer, engine.incarnation, upstream=upstream, targets=chosen))

    def _targets(self, transfer: TransferId, engine: RemoteEngine, plan: Plan | None) -> dict[int, bool]:
        if plan is None:
            course = self._courses.get(transfer)
            return self._upstream.targets(engine, course.pulled.span if course is not None else Span(0, 0))
        return targets_of(plan, self._local.index)

    def _tell_kind(self, engine: RemoteEngine) -> None:
        """The embedding engine may know better than to ask one of vLLM's connector for every prompt."""
        if engine.grid is not None and str(engine.incarnation) not in self._told_upstream:
            self._told_upstream.put(str(engine.incarnation), None)
            self.met_upstream.put(engine.incarnation.engine_id)

    def _only_releases(self, transfer: TransferId) -> bool:
        course = self._courses.get(transfer)
        return course is None or course.ticket is None

    def _retire_before(self, producer: Incarnation) -> None:
        """A producer has come back: nobody needs the receive engines of its earlier lives once they are idle."""
        in_use = {course.engine.incarnation for course in self._courses.values() if course.engine is not None}
        for earlier in self._receivers.outlived_by(producer):
            if earlier not in in_use:
                self._thread.spawn(self._receivers.retire(earlier))

    async def _receive_from(self, engine: RemoteEngine, rank: int) -> None:
        peer = engine.ranks[rank]
        receiver = await self._receivers.of(engine.incarnation, peer.transport_address)
        if receiver.name != peer.transport:
            raise RemoteProtocolError(
                ProtocolReason.INCOMPATIBLE_PEER,
                f"producer {engine.incarnation} sends over {peer.transport!r}, this consumer receives over "
                f"{receiver.name!r}",
            )

    async def _plan_with(self, engine: RemoteEngine) -> Plan:
        if engine.model != self._local.model:
            raise RemoteProtocolError(
                ProtocolReason.INCOMPATIBLE_PEER,
                f"producer {engine.incarnation} serves model {engine.model!r}, this is {self._local.model!r}",
            )
        if missing := self._plans.missing(engine.fingerprints):
            told = await self._finder.placements(engine.ranks[0], missing)
            for fingerprint in missing:
                if (encoded := told.get(fingerprint)) is not None:
                    self._plans.learn(fingerprint, encoded)
        return self._plans.between(engine.fingerprints, self._local.side().fingerprints)

    def _send_pull(self, action: SendPull) -> None:
        course = self._courses[action.key.transfer]
        receiver = self._receivers.now_of(action.producer)
        if course.engine is None or receiver is None or self._links is None:
            said = "its receive engine was destroyed before the pull was sent"
            self.feed(PullFailed(action.key, ProtocolReason.PEER_LOST, quiet=True, detail=said))
            return
        if course.ticket is not None and course.pulled.verify is None:
            course.pulled = replace(course.pulled, verify=self._checker.ask())
        pulled = _emptied(course.pulled) if action.release else course.pulled
        rank = action.key.rank
        if course.plan is None:
            message = self._upstream.pull(pulled, receiver=receiver)
        else:
            message = self._maker.pull(pulled, course.engine, rank, receiver=receiver, inline=action.inline_layouts)
        course.sent = course.sent or time.perf_counter()
        number = message.kvferry.pull if isinstance(message.kvferry, PullExtension) else None
        self._links.pull(action.key, course.engine.ranks[rank].address, encode(message), number=number)
        if course.ticket is None:
            self._journal.released(pulled.transfer, pulled.request, action.producer, rank)

    def _send_abort(self, action: SendAbort) -> None:
        course = self._courses.get(action.key.transfer)
        if course is None or course.engine is None or course.plan is None or self._links is None:
            return
        expected = pulls_expected(course.plan, action.key.rank)
        note = self._maker.abort(action.key.transfer, expected=expected, failed=action.failed)
        self._links.note(course.engine.ranks[action.key.rank].address, encode(note))

    async def _fence(self, producer: Incarnation) -> None:
        for left in reversed(range(FENCES)):
            try:
                await self._receivers.fence(producer, lambda writers: self._writers_are_quiet(producer, writers))
            except TransportError as error:
                if left:
                    await asyncio.sleep(FENCE_PAUSE)  # a process that was killed takes a moment to be gone
                    continue
                logger.warning("no fence for %s yet, its blocks stay held: %s", producer, error)
                self.feed(FenceFailed(producer))
                return
            self._journal.fenced(producer)
            self.feed(FenceDone(producer))
            return

    async def _writers_are_quiet(self, producer: Incarnation, writers: Sequence[str]) -> bool:
        """Ask ranks that live, by a fresh connection, to give up what they have of ours, and whether they have."""
        engines = (course.engine for course in self._courses.values() if course.engine is not None)
        engine = next((one for one in engines if one.incarnation == producer), None)
        if engine is None:
            return False
        for rank in [one for one in engine.ranks if one.transport_address in writers]:
            for _ in range(QUIET_ASKS):
                self._asks += 1
                try:
                    quiet = await self._finder.is_quiet(rank, self._maker.quiet_ask(self._asks), ask=self._asks)
                except FerryError as error:
                    logger.debug("%s does not say whether it is quiet: %s", rank.address, error)
                    return False
                if quiet:
                    break
                await asyncio.sleep(QUIET_PAUSE)
            else:
                return False
        return True

    def _is_connected(self, engine: RemoteEngine) -> bool:
        """Whether a connection proves that this life of a producer goes on."""
        return self._links is not None and any(self._links.is_open(rank.address) for rank in engine.ranks)

    def _forget_pull(self, key: PullKey) -> None:
        if self._links is not None:
            self._links.forget(key)
        if (course := self._courses.get(key.transfer)) is not None:
            course.open.discard(key.rank)
            self._drop_idle(key.transfer)

    def _drop_idle(self, transfer: TransferId) -> None:
        """Forget a course that holds no blocks, once nothing of it is under way."""
        course = self._courses.get(transfer)
        if course is not None and course.ticket is None and not course.open and not course.resolving:
            del self._courses[transfer]

    def _resolved(self, transfer: TransferId) -> None:
        if (course := self._courses.get(transfer)) is not None:
            course.resolving = False
            self._drop_idle(transfer)

    def _released(self, action: DestinationReleased) -> None:
        course = self._courses.get(action.transfer)
        if course is not None and course.ticket == action.ticket:
            course.ticket = None
            self._drop_idle(action.transfer)
        again = self._retries.quiet(action.ticket)
        if again is None:
            self.quiet.put(action.ticket)
        else:
            self._journal.retried(action.transfer, again.fetch)
            self._attempt(again)

    def _end(self, ended: FetchEnded) -> None:
        course = self._courses.get(ended.transfer)
        fetched = None
        if course is not None and course.ticket == ended.ticket:
            fetched = self._fetched(course, ended)
            self._journal.ended(fetched)
        following = self._retries.next_after(ended)
        if following is None:
            self._report(ended)
        if fetched is not None:
            self._journal.told(fetched)
        if following is None:
            return
        asked = f"{following.transfer} at {following.source.engine}"
        self.story.add(ended.transfer, Entry(self._pump.now(), "to be tried again", "", (asked,)))

    def _report(self, ended: FetchEnded) -> None:
        """Tell the embedding engine, and the producers that were not needed."""
        for unused in self._retries.over(ended.ticket):
            self.release(unused.transfer, ended.request, unused.source)
        self.ended.put(ended)

    def _fetched(self, course: _Course, ended: FetchEnded) -> Fetched:
        now = time.perf_counter()
        sent = course.sent or now
        engine, plan = course.engine, course.plan
        receiver = self._receivers.now_of(engine.incarnation) if engine else None
        wanted = [rank for rank, bytes_ in course.targets.items() if bytes_]
        supposed = self._upstream.sources(engine, wanted) if engine is not None and engine.grid is not None else {}
        return Fetched(
            ended=ended,
            producer=engine.incarnation if engine else None,
            sources={rank: plan.producers[rank] for rank in wanted} if plan else supposed,
            span=course.pulled.span,
            tables=course.pulled.tables,
            resolve_ms=(sent - course.began) * 1e3,
            wait_ms=(now - sent) * 1e3,
            transport=label_of(receiver) if receiver else "no transport",
            verified=course.verified if course.pulled.verify else None,
        )


def _limits(local: Local, options: RuntimeOptions) -> ConsumerLimits:
    """The machine's limits; how many blocks may be in quarantine follows from how many there are."""
    if options.consumer_limits.quarantined_blocks is not None:
        return options.consumer_limits
    blocks = max(local.placement.blocks_of_group, default=0)
    return replace(options.consumer_limits, quarantined_blocks=max(1, int(blocks * options.quarantine_max_fraction)))


def _emptied(pulled: Pulled) -> Pulled:
    empty = tuple(Table(first_token=0, blocks=()) for _ in pulled.tables)
    return Pulled(pulled.request, pulled.transfer, Span(pulled.span.start, pulled.span.start), empty)
