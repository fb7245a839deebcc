"""The consumer side of one worker: asks producers to write into this worker's memory, and says when they have.

One thread with one loop owns everything; the embedding engine's thread hands in *fetch*, *release* and *cancel*, and
takes out what ended and which tickets are quiet. The fate of a fetch and its blocks are separate: the fate is told at
once, the blocks when nothing can be written into them any more.

A fetch goes: its producer is found, a plan made and an engine to receive by (:mod:`kvferry.runtime.resolving`); then
one pull goes to every producer rank that the plan pairs with this one. Answers go to the machine
(:mod:`kvferry.protocol`), after the pages were compared where that is asked for. What the machine asks for is done
here; in doubt that is a fence (:mod:`kvferry.runtime.fencing`).
"""

import asyncio
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol, assert_never

from kvferry.errors import FerryError, ProtocolReason, RemoteProtocolError
from kvferry.ids import Incarnation, RequestId, TransferId
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
from kvferry.runtime.courses import Course, Courses
from kvferry.runtime.fencing import Fences
from kvferry.runtime.fetches import Fetch
from kvferry.runtime.journal import ConsumerJournal, Fetched
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.pairing import pulls_expected, targets_of
from kvferry.runtime.producers import Finder, RemoteEngine, refusal_of
from kvferry.runtime.pulling import Pulled, PullMaker
from kvferry.runtime.pump import Pump
from kvferry.runtime.receivers import Receivers
from kvferry.runtime.resolving import Means, Resolved, Resolver
from kvferry.runtime.retrying import Attempt, Retries
from kvferry.runtime.sending import label_of
from kvferry.runtime.sides import Local
from kvferry.runtime.upstream_pulling import UpstreamPuller

logger = logging.getLogger(__name__)

CHECK_PAUSE: Final = 5.0
"""While pages are compared, the machine is told so often that a pull is alive."""


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
        self._maker = PullMaker(local, options.host)
        self._upstream = UpstreamPuller(local, options.upstream_peers)
        self._timing = options.timing
        self._journal = journal
        self._checker = Checker(local, options.verify, enter_thread=options.enter_thread)
        self._links: Wires | None = None
        self._courses = Courses(time.perf_counter)
        self._fences = Fences(self._receivers, self._courses, finder=finder, maker=self._maker)
        self._fencing: set[Incarnation] = set()
        """Producers whose fence is under way."""
        means = Means(finder, self._receivers, self._checker, self._courses, self._upstream, self._is_connected)
        self._resolver = Resolver(local, thread, options, means=means)
        machine = Consumer(_limits(local, options))
        self.story = machine.story
        """Lives of the newest transfers, for people."""
        self._pump: Pump[ConsumerEvent, ConsumerAction] = Pump(
            machine, self._perform, tick=ConsumerTick(), loop=thread.loop
        )
        self._retries = Retries(
            options.retries,
            grace=options.timing.retry_quiet,
            loop=thread.loop,
            clock=self._pump.now,
            report=self._report,
        )
        self.ended: queue.SimpleQueue[FetchEnded] = queue.SimpleQueue()
        self.quiet: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self.met_upstream = self._resolver.met_upstream
        """Producers that run vLLM's own connector."""

    @property
    def open_pulls(self) -> tuple[PullKey, ...]:
        """Pulls that are not over."""
        return tuple(self._courses.open_pulls)

    def attach(self, links: Wires) -> None:
        """Connections can be made from now on."""
        self._links = links

    @property
    def clock(self) -> Callable[[], float]:
        """That of all deadlines and stories here."""
        return self._pump.now

    def feed(self, event: ConsumerEvent) -> None:
        """Hand an event to the machine."""
        self._pump.feed(event)

    # -- from the embedding engine ---------------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Fetch positions into blocks."""
        first = Attempt(fetch, self._pump.now() + self._timing.pull)
        self._retries.begin(first)
        self._attempt(first)

    def _attempt(self, attempt: Attempt) -> None:
        fetch = attempt.fetch
        pulled = Pulled(fetch.request, fetch.transfer, fetch.span, fetch.tables, fetch.prompt)
        self._courses.offer(pulled, fetch.ticket)
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
        self._retries.begin(Attempt(fetch, self._pump.now()))  # so that its alternatives are released with it
        outcome = Outcome(Fate.FAILED, ProtocolReason.DEVICE_FAILED, "the device of this worker failed")
        ended = FetchEnded(fetch.transfer, fetch.request, fetch.ticket, outcome)
        pulled = Pulled(fetch.request, fetch.transfer, fetch.span, fetch.tables, fetch.prompt)
        fetched = self._fetched(Course(pulled, fetch.ticket, time.perf_counter()), ended)
        self._journal.ended(fetched)
        self._report(ended)
        self._journal.told(fetched)
        self.quiet.put(fetch.ticket)
        self.release(fetch.transfer, fetch.request, fetch.source)

    def release(self, transfer: TransferId, request: RequestId, source: Source) -> None:
        """Nothing is wanted of this transfer; its producer should know."""
        deadline = self._pump.now() + self._timing.orphan
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

    async def _check(self, course: Course, pull: PullKey, reply: Reply) -> None:
        """All that a rank was to write is here: compare it, then tell the machine."""
        if course.plan is None or not targets_of(course.plan, self._local.index).get(pull.rank):
            self.feed(ReplyArrived(pull, reply))  # it had nothing for us
            return
        work = self._thread.spawn(self._checker.check(course.plan, pull.rank, course.pulled, reply))
        while not (await asyncio.wait({work}, timeout=CHECK_PAUSE))[0]:
            self.feed(ReplyArrived(pull, still_busy(reply)))  # nothing more will be heard of the producer
        if pull.rank not in course.open:
            return  # fenced meanwhile: its blocks may hold something else by now, and nobody waits for a verdict
        if (fault := work.exception()) is not None:  # the loop has logged it
            said = f"the pages that came cannot be read to be compared: {fault}"
            self.feed(PullFailed(pull, ProtocolReason.DEVICE_FAILED, quiet=True, detail=said))
            return
        found = work.result()
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
                self._resolve(action)
            case SendPull():
                self._send_pull(action)
            case SendAbort():
                self._send_abort(action)
            case ForgetPull():
                self._forget_pull(action.key)
            case ForgetProducer():
                self._resolver.forget(action.producer)
            case FenceProducer():
                self._fence(action.producer)
            case FetchEnded():
                self._end(action)
            case DestinationReleased():
                self._released(action)
            case _:
                assert_never(action)

    def _resolve(self, action: Resolve) -> None:
        course = self._begin(action)
        resolved = self._resolver.at_once(action)
        if resolved is None:
            self._thread.spawn(self._resolve_later(action, course))
        else:
            self._resolved(action, course, resolved)

    def _begin(self, action: Resolve) -> Course:
        if action.ticket is not None:
            return self._courses.begin(action.transfer, action.ticket)
        empty = tuple(Table(first_token=0, blocks=()) for _ in self._local.placement.groups)
        return self._courses.begin_release(Pulled(action.request, action.transfer, Span(0, 0), empty))

    async def _resolve_later(self, action: Resolve, course: Course) -> None:
        try:
            resolved = await self._resolver.resolve(action)
        except FerryError as error:
            self._unresolved(action, course, refusal_of(error), error.message)
        except Exception:  # the boundary of this task: a request must not wait for a fault that nobody has foreseen
            logger.exception("transfer %s: looking for its producer failed", action.transfer)
            said = "this worker failed in looking for the producer, its log says how"
            self._unresolved(action, course, ProtocolReason.TRANSPORT_FAILED, said)
        else:
            self._resolved(action, course, resolved)

    def _unresolved(self, action: Resolve, course: Course, reason: ProtocolReason, said: str) -> None:
        if self._courses.get(action.transfer) is course:
            self._courses.resolved(action.transfer)
            self.feed(SourceRefused(action.transfer, reason, said))

    def _resolved(self, action: Resolve, course: Course, to: Resolved) -> None:
        if self._courses.get(action.transfer) is not course:
            return  # given up meanwhile, and what came after it looks for itself
        course.engine, course.plan = to.engine, to.plan
        course.targets, course.open = to.targets, set(to.targets)
        self._courses.resolved(action.transfer)
        self._resolver.retire_before(to.engine.incarnation)
        chosen = tuple(Target(rank, release=not wanted) for rank, wanted in to.targets.items())
        upstream = to.engine.grid is not None
        self.feed(SourceResolved(action.transfer, to.engine.incarnation, upstream=upstream, targets=chosen))

    def _send_pull(self, action: SendPull) -> None:
        course = self._courses.get(action.key.transfer)
        receiver = self._receivers.now_of(action.producer)
        if course is None or course.engine is None or receiver is None or self._links is None:
            said = "its receive engine was destroyed before the pull was sent"
            self.feed(PullFailed(action.key, ProtocolReason.PEER_LOST, quiet=True, detail=said))
            return
        if course.ticket is not None and course.pulled.verify is None and course.plan is not None:
            course.pulled = replace(course.pulled, verify=self._checker.ask(course.plan, course.engine))
        pulled = _emptied(course.pulled) if action.release else course.pulled
        rank = action.key.rank
        if course.plan is None:
            message = self._upstream.pull(pulled, receiver=receiver)
        else:
            message = self._maker.pull(pulled, course.engine, rank, receiver=receiver, inline=action.inline_layouts)
        if course.sent is None:
            course.sent, course.transport = time.perf_counter(), label_of(receiver)
        number = message.kvferry.pull if isinstance(message.kvferry, PullExtension) else None
        try:
            self._links.pull(action.key, course.engine.ranks[rank].address, encode(message), number=number)
        except RemoteProtocolError as error:  # there is no connection to send it on
            self.feed(PullFailed(action.key, error.reason, quiet=True, detail=error.message))
            return
        if course.ticket is None:
            self._journal.released(pulled.transfer, pulled.request, action.producer, rank)

    def _send_abort(self, action: SendAbort) -> None:
        course = self._courses.get(action.key.transfer)
        if course is None or course.engine is None or course.plan is None or self._links is None:
            return
        expected = pulls_expected(course.plan, action.key.rank)
        note = self._maker.abort(action.key.transfer, expected=expected, failed=action.failed)
        try:
            self._links.note(course.engine.ranks[action.key.rank].address, encode(note))
        except RemoteProtocolError as error:
            logger.debug("transfer %s: its producer is not told that it is given up: %s", action.key.transfer, error)

    def _fence(self, producer: Incarnation) -> None:
        """Begin a fence, unless one is under way: that one answers for all that is in doubt now.

        A second one would come to its turn when the first has succeeded, and destroy what has been sent for since.
        """
        if producer not in self._fencing:
            self._fencing.add(producer)
            self._thread.spawn(self._prove(producer))

    async def _prove(self, producer: Incarnation) -> None:
        try:
            proven = await self._fences.prove(producer)
        finally:
            self._fencing.discard(producer)
        if proven:
            self._journal.fenced(producer)
            self.feed(FenceDone(producer))
        else:
            self.feed(FenceFailed(producer))

    def _is_connected(self, engine: RemoteEngine) -> bool:
        """Whether a connection proves that this life of a producer goes on."""
        return self._links is not None and any(self._links.is_open(rank.address) for rank in engine.ranks)

    def _forget_pull(self, key: PullKey) -> None:
        if self._links is not None:
            self._links.forget(key)
        self._courses.pull_over(key)

    def _released(self, action: DestinationReleased) -> None:
        self._courses.released(action.transfer, action.ticket)
        again = self._retries.quiet(action.ticket)
        if again is None:
            self.quiet.put(action.ticket)
        else:
            self._journal.retried(action.transfer, again.fetch)
            self._attempt(again)

    def _end(self, ended: FetchEnded) -> None:
        course = self._courses.of_fetch(ended.transfer, ended.ticket)
        fetched = None
        if course is not None:
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

    def _fetched(self, course: Course, ended: FetchEnded) -> Fetched:
        now = time.perf_counter()
        sent = course.sent or now
        engine, plan = course.engine, course.plan
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
            transport=course.transport,
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
