"""The sending half of a producer: binds, submits, watches, and proves quiet.

A write becomes descriptors (the plan), a submission (the engine), and one event for the machine when it ended. One
engine serves all consumers of this rank. When writes stay in doubt the engine is destroyed, which proves that none of
their sources is read any more, and a new one takes its place; writes of other peers that it cuts off fail, and are
quiet at once. Over sockets it proves no more than that: bytes that had left may still land, and the machine is told so.

A consumer may ask for digests of what it is sent (:mod:`kvferry.runtime.verify`). They are made in a thread while the
engine writes, from the same held blocks, and the write is over when both are.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry.errors import PlanError, PlanReason, ProtocolReason, RemoteProtocolError, TransportError
from kvferry.ids import TransferId
from kvferry.plan import Descriptors, TransferRequest
from kvferry.protocol import ProducerEvent, Quieted, StartWrite, WriteDone, WriteFailed, WriteId
from kvferry.runtime.admission import Admitted
from kvferry.runtime.binding import check_covered, request_for
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.sides import Local
from kvferry.runtime.tails import joined, rests_of
from kvferry.runtime.targets import allowed_target
from kvferry.runtime.verify import Hashers
from kvferry.runtime.verify_hashing import Digests
from kvferry.runtime.verify_pages import Job
from kvferry.runtime.writes import Writes
from kvferry.transport import Peer, Submission, SubmissionState, Transport

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 4096
"""Consumers that stay open; the one opened first goes when one more comes."""


def label_of(engine: Transport) -> str:
    """The transport and how its bytes really move, for logs and reports."""
    return f"{engine.name}:{engine.protocol_in_use()}"


@dataclass(frozen=True, slots=True)
class Sent:
    """How one write ended."""

    write: WriteId
    admitted: Admitted
    request: TransferRequest
    transfer: TransferId
    failure: str | None
    """Why it failed; ``None`` when every byte arrived."""
    nbytes: int
    descriptors: int
    bind_ms: float
    write_ms: float
    transport: str
    digests: Digests | None = None
    """Of what was sent, where the consumer asked for them."""


@dataclass(slots=True)
class _Order:
    """A write on its way from the machine's word to its end."""

    start: StartWrite
    admitted: Admitted
    request: TransferRequest
    began: float
    bound: float
    rows: Descriptors
    cancelled: bool = False
    hashing: "asyncio.Task[Digests] | None" = None


class Sender:
    """The engine of one producer rank, and the writes that it has under way. Used on the loop only."""

    def __init__(
        self,
        local: Local,
        options: RuntimeOptions,
        thread: LoopThread,
        *,
        feed: Callable[[ProducerEvent], None],
        on_sent: Callable[[Sent], None],
        on_renewed: Callable[[int], None],
    ) -> None:
        self._local = local
        self._make = options.make_transport
        self._thread = thread
        self._feed = feed
        self._on_sent = on_sent
        self._on_renewed = on_renewed
        self._limit = options.max_descriptors
        self._targets = options.write_targets
        self._engine = self._fresh()
        self._address = self._engine.address()
        self._label = label_of(self._engine)
        self._writes: Writes[WriteId] = Writes(thread)
        self._starting: dict[WriteId, _Order] = {}
        self._peers: dict[tuple[str, tuple[int, ...]], Peer] = {}
        self._proof: asyncio.Lock = asyncio.Lock()
        """Held while the engine is destroyed and made anew."""
        self._destroyed = False
        self._closing = False
        self._hashers = Hashers(options.enter_thread)

    @property
    def transport(self) -> str:
        """Name of the transport."""
        return self._engine.name

    @property
    def address(self) -> str:
        """Of the engine, as a consumer may have to admit it."""
        return self._address

    def start(self, order: StartWrite, admitted: Admitted) -> None:
        """Bind and submit; an event for the machine follows, always."""
        began = time.perf_counter()
        wanted = order.wanted
        try:
            if wanted.span is None:
                raise PlanError(PlanReason.UNSUPPORTED, "a pull without positions, as an upstream peer sends it")
            check_covered(wanted.span, order.tokens, self._local.placement)
            request = request_for(wanted.span, order.source, wanted.tables)
            rows = self._bind(admitted, request)
        except PlanError as error:
            logger.warning("transfer %s: refused by the plan: %s", order.transfer, error)
            self._feed(WriteFailed(order.write, ProtocolReason.PLAN_REFUSED, quiet=True, detail=str(error)))
            return
        bound = time.perf_counter()
        underway = _Order(order, admitted, request, began, bound, rows)
        peer = self._peers.get(_key_of(admitted)) if rows.count else None
        if self._destroyed or (peer is None and rows.count):
            self._starting[order.write] = underway
            self._thread.spawn(self._open(underway))
        else:
            self._submit(underway, peer)

    def cancel(self, write: WriteId) -> None:
        """Hand nothing more of this write to the engine."""
        if write in self._starting:
            self._starting[write].cancelled = True
        self._writes.cancel(write)

    def prove_quiet(self, writes: tuple[WriteId, ...]) -> None:
        """Find out, or see to it, that nothing of these writes moves; ``Quieted`` follows unless that fails."""
        self._thread.spawn(self._prove(writes))

    def closing(self) -> None:
        """No engine is made any more in the place of one that is destroyed."""
        self._closing = True

    async def close(self) -> None:
        """Destroy the engine; whatever it had under way is quiet then."""
        self.closing()
        await self._hashers.close()
        async with self._proof:
            try:
                await asyncio.to_thread(self._engine.close)
            except TransportError as error:
                logger.warning("the engine is not proven closed: %s", error)

    def _bind(self, admitted: Admitted, request: TransferRequest) -> Descriptors:
        admitted.plan.check(request)
        pair = admitted.plan.pair(admitted.producer, admitted.consumer)
        if pair is None:
            return Descriptors.empty()
        rows = pair.bind(request, src=self._local.binding, dst=admitted.binding, max_descriptors=self._limit)
        caches = self._local.caches
        if admitted.extension is None and caches is not None and caches.whole_blocks:
            for rest in rests_of(request, admitted.plan):
                admitted.plan.check(rest)
                more = pair.bind(rest, src=self._local.binding, dst=admitted.binding, max_descriptors=self._limit)
                rows = joined(rows, more)
        return rows

    async def _open(self, order: _Order) -> None:
        """What may take a while before a first write: an engine, and the consumer's address."""
        try:
            if self._destroyed:
                async with self._proof:
                    if not self._closing and self._destroyed:
                        await self._renew()
            peer = await self._peer(self._engine, order.admitted) if order.rows.count else None
        except TransportError as error:
            self._failed(order, ProtocolReason.TRANSPORT_FAILED, error.message, quiet=True)
            return
        except RemoteProtocolError as error:
            logger.warning("transfer %s: refused: %s", order.start.transfer, error)
            self._failed(order, error.reason, error.message, quiet=True)
            return
        except Exception:  # the boundary of this task: a pull must not wait for a fault that nobody has foreseen
            logger.exception("transfer %s: its consumer cannot be written to", order.start.transfer)
            said = "the producer failed before it wrote anything, its log says how"
            self._failed(order, ProtocolReason.TRANSPORT_FAILED, said, quiet=True)
            return
        finally:
            del self._starting[order.start.write]
        if order.cancelled:
            self._failed(order, ProtocolReason.ABORTED, "cancelled before it was sent", quiet=True)
            return
        self._submit(order, peer)

    def _submit(self, order: _Order, peer: Peer | None) -> None:
        if peer is None:  # nothing moves
            self._landed(order)
            return
        write = order.start.write
        order.hashing = self._hash(order)
        try:
            submission = self._engine.submit(peer, order.rows)
        except TransportError as error:
            self._failed(order, ProtocolReason.TRANSPORT_FAILED, error.message, quiet=True)
            return
        self._writes.watch(
            write,
            submission,
            on_final=lambda ended, state: self._on_final(order, ended, state),
            on_quiet=lambda: self._feed(Quieted((write,), landing=not submission.destination_quiet)),
        )

    async def _peer(self, engine: Transport, admitted: Admitted) -> Peer:
        key = _key_of(admitted)
        peer = self._peers.get(key)
        if peer is None:
            address = await allowed_target(admitted.address, self._targets, transport=engine.name)
            peer = await asyncio.to_thread(engine.open_peer, address, admitted.regions)
            while len(self._peers) >= MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[key] = peer
        return peer

    def _on_final(self, order: _Order, submission: Submission, state: SubmissionState) -> None:
        if state is SubmissionState.DONE:
            self._landed(order)
            return
        self._peers.pop(_key_of(order.admitted), None)
        said = submission.error.message if submission.error else "the engine gave no reason"
        quiet, landing = submission.quiet, not submission.destination_quiet
        self._failed(order, ProtocolReason.TRANSPORT_FAILED, said, quiet=quiet, landing=landing)

    def _hash(self, order: _Order) -> "asyncio.Task[Digests] | None":
        """Begin to make the digests that the consumer asked for."""
        extension = order.admitted.extension
        ask = extension.verify if extension is not None else None
        reader = self._local.pages
        if ask is None or reader is None:
            return None
        job = Job(order.admitted.plan, (order.admitted.producer, order.admitted.consumer), order.request, ask)
        return self._thread.spawn(self._hashers.digests(job, side="producer", reader=reader))

    def _landed(self, order: _Order) -> None:
        """Every byte has arrived; the write is over when its digests are there too."""
        hashing = order.hashing or self._hash(order)
        if hashing is None:
            self._finished(order, None)
        else:
            self._thread.spawn(self._hashed(order, hashing))

    async def _hashed(self, order: _Order, hashing: "asyncio.Task[Digests]") -> None:
        await asyncio.wait({hashing})
        if hashing.cancelled() or hashing.exception() is not None:  # by the end of this runtime, or logged by the loop
            said = "every byte has arrived, but the producer's pages cannot be read to be compared, its log says how"
            self._failed(order, ProtocolReason.DEVICE_FAILED, said, quiet=True)
        else:
            self._finished(order, None, digests=hashing.result())

    def _failed(self, order: _Order, reason: ProtocolReason, said: str, *, quiet: bool, landing: bool = False) -> None:
        self._finished(order, f"{reason.value}: {said}", tell=False)
        self._feed(WriteFailed(order.start.write, reason, quiet=quiet, detail=said, landing=landing))

    def _finished(
        self, order: _Order, failure: str | None, *, tell: bool = True, digests: Digests | None = None
    ) -> None:
        now = time.perf_counter()
        self._on_sent(
            Sent(
                write=order.start.write,
                admitted=order.admitted,
                request=order.request,
                transfer=order.start.transfer,
                failure=failure,
                nbytes=order.rows.total_bytes,
                descriptors=order.rows.count,
                bind_ms=(order.bound - order.began) * 1e3,
                write_ms=(now - order.bound) * 1e3,
                transport=self._label,
                digests=digests,
            )
        )
        if tell:
            self._feed(WriteDone(order.start.write))

    async def _prove(self, writes: tuple[WriteId, ...]) -> None:
        landing: tuple[WriteId, ...] = ()
        async with self._proof:
            if not self._writes.are_quiet(writes):
                try:
                    await asyncio.to_thread(self._engine.close)
                except TransportError as error:
                    logger.warning("the engine cannot be proven stopped, blocks stay held: %s", error)
                    return
                self._destroyed = True
                self._peers.clear()
                landing = self._writes.landing(writes)
                self._writes.settle()
                if not self._closing:
                    self._on_renewed(len(writes))
                    await self._renew()
        self._feed(Quieted(landing, landing=True))
        self._feed(Quieted(tuple(write for write in writes if write not in landing)))

    async def _renew(self) -> None:
        """Put a new engine in the place of one that is destroyed; when that fails, the next write tries again."""
        try:
            self._engine = await asyncio.to_thread(self._fresh)
            self._address = self._engine.address()
        except TransportError as error:
            logger.warning("no new engine can be made, writes fail until one can: %s", error)
            return
        self._destroyed = False

    def _fresh(self) -> Transport:
        engine = self._make()
        engine.register(self._local.regions)
        return engine


def _key_of(admitted: Admitted) -> tuple[str, tuple[int, ...]]:
    """A consumer as its engine is opened: where it is, and which memory it is known to have.

    Of one that does not show its memory, more becomes known as it names higher blocks.
    """
    known = (number for region in admitted.regions for number in (region.address, region.nbytes))
    return admitted.address, tuple(known)
