"""What a runtime says about its transfers: one line each (INFO; WARNING for a failure), and the report where wanted.

The report is written at the one place where a pair's end is known and its memory has not gone back yet, so that its
digest is that of the bytes that were moved. The line sums up all pairs of a transfer on this rank.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.ids import Incarnation, RequestId, TransferId
from kvferry.layout import Placement
from kvferry.plan import BlockTable, TransferRequest
from kvferry.protocol import Fate, FetchEnded, LeaseEnded, Outcome, PulledRequest, Span, Table
from kvferry.runtime.admission import Admitted
from kvferry.runtime.binding import block_tables
from kvferry.runtime.checking import Verified
from kvferry.runtime.digest import PageDigest, page_digest
from kvferry.runtime.fetches import Fetch
from kvferry.runtime.report import Line, Report
from kvferry.runtime.sending import Sent
from kvferry.runtime.sides import Local
from kvferry.runtime.tally import Receive, Tally, Write
from kvferry.runtime.verify import Wrong

logger = logging.getLogger("kvferry.transfer")


@dataclass(slots=True)
class _Totals:
    """What the pairs of one transfer came to."""

    ranks: int = 0
    nbytes: int = 0
    descriptors: int = 0
    bind_ms: float = 0.0
    write_ms: float = 0.0
    transport: str = "no transport"


class ProducerJournal:
    """The lines of a producer rank, and what is counted of it."""

    def __init__(self, local: Local, report: Report | None, tally: Tally | None = None) -> None:
        self._local = local
        self._report = report
        self._tally = tally or Tally()
        self._requests: dict[TransferId, RequestId] = {}
        self._totals: dict[TransferId, _Totals] = {}

    def published(self, transfer: TransferId, request: RequestId) -> None:
        """Remember what the local engine calls this transfer's request."""
        self._requests[transfer] = request

    def renewed(self, doubtful: int) -> None:
        """The engine was destroyed and made anew."""
        self._tally.count("engines_renewed", 1)
        logger.warning(
            "the transfer engine of rank %d did not come to an end with %d write(s): it was destroyed, and so reads "
            "nothing for them any more; it is made anew, and other writes under way have failed with it",
            self._local.index,
            doubtful,
        )

    def sent(self, sent: Sent) -> None:
        """One pair has ended; its memory has not gone back yet."""
        known = sent.transfer in self._requests  # else its line is written already
        totals = self._totals.setdefault(sent.transfer, _Totals()) if known else _Totals()
        totals.ranks += 1
        totals.nbytes += sent.nbytes
        totals.descriptors += sent.descriptors
        totals.bind_ms += sent.bind_ms
        totals.write_ms += sent.write_ms
        totals.transport = sent.transport
        if sent.failure is None and sent.descriptors:
            self._tally.wrote(Write(sent.nbytes, sent.descriptors, sent.bind_ms / 1e3, sent.write_ms / 1e3))
        if self._report is None:
            return
        digest = self._digest(sent) if sent.failure is None else None
        status = Fate.DONE if sent.failure is None else Fate.FAILED
        line = self._line(sent.admitted, sent.transfer, Span(sent.request.start, sent.request.stop))
        self._report.write(
            line.with_end(
                status=status.value,
                reason=sent.failure,
                bytes=sent.nbytes,
                descriptors=sent.descriptors,
                ms=sent.write_ms,
                transport=sent.transport,
                digest=digest.digest if digest else None,
                pages=digest.pages if digest else 0,
            )
        )

    def released(self, admitted: Admitted, request: PulledRequest) -> None:
        """A consumer rank wants nothing of this transfer."""
        if self._report is not None:
            line = self._line(admitted, request.transfer, request.span or Span(0, 0))
            self._report.write(line.with_end(status=Fate.DONE.value, bytes=0, descriptors=0))

    def lease_ended(self, ended: LeaseEnded) -> None:
        """All pairs of a transfer have ended."""
        totals = self._totals.pop(ended.transfer, None) or _Totals()
        self._requests.pop(ended.transfer, None)
        self._tally.ended("producer", ended.outcome)
        logger.log(
            level_of(ended.outcome),
            "transfer %s: %s as producer: %d bytes in %d descriptors to %d rank(s) over %s, bind %.2f ms, "
            "write %.2f ms",
            ended.transfer,
            said(ended.outcome),
            totals.nbytes,
            totals.descriptors,
            totals.ranks,
            totals.transport,
            totals.bind_ms,
            totals.write_ms,
        )

    def _digest(self, sent: Sent) -> PageDigest | None:
        consumer = sent.admitted.plan.consumers[sent.admitted.consumer]
        reader = self._local.pages
        if reader is None:
            return None
        return page_digest(self._local.placement, consumer, sent.request, side="producer", reader=reader)

    def _line(self, admitted: Admitted, transfer: TransferId, span: Span) -> Line:
        return Line(
            transfer_id=transfer,
            request_id=self._requests.get(transfer, RequestId("")),
            side="producer",
            engine_id=self._local.incarnation.engine_id,
            peer_engine_id=admitted.peer,
            producer_rank=self._local.index,
            consumer_rank=admitted.consumer,
            start=span.start,
            stop=span.stop,
        )


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a consumer knows of a transfer that has ended."""

    ended: FetchEnded
    producer: Incarnation | None
    """``None`` when the producer was never found."""
    sources: Mapping[int, Placement]
    """Placements of the producer ranks that were pulled from for bytes, by rank."""
    span: Span
    tables: tuple[Table, ...]
    resolve_ms: float
    """From the order to the pulls."""
    wait_ms: float
    """From the pulls to the end."""
    transport: str
    verified: Verified | None = None
    """Pages that were compared with the producer's; ``None`` where that was not asked for."""


class ConsumerJournal:
    """The lines of a consumer rank, and what is counted of it."""

    def __init__(self, local: Local, report: Report | None, tally: Tally | None = None) -> None:
        self._local = local
        self._report = report
        self._tally = tally or Tally()

    def ended(self, fetched: Fetched) -> None:
        """A transfer has ended, and the request that it is for has not gone on yet: count it, and report its bytes."""
        ended = fetched.ended
        if fetched.verified is not None:
            self._tally.count("verified_pages", fetched.verified.pages)
            self._tally.count("verified_bytes", fetched.verified.nbytes)
        self._tally.ended("consumer", ended.outcome)
        if ended.outcome.fate is Fate.DONE:
            tokens = fetched.span.stop - fetched.span.start
            self._tally.received(Receive(tokens, fetched.resolve_ms / 1e3, fetched.wait_ms / 1e3))
        if self._report is not None:
            for rank, placement in fetched.sources.items():
                self._report.write(self._line(fetched, rank, placement))

    def told(self, fetched: Fetched) -> None:
        """The request may have gone on: the line, for which nobody should have to wait."""
        ended = fetched.ended
        logger.log(
            level_of(ended.outcome),
            "transfer %s: %s as consumer: positions %d to %d from %s, %d rank(s), over %s, resolve %.2f ms, "
            "wait %.2f ms%s",
            ended.transfer,
            said(ended.outcome),
            fetched.span.start,
            fetched.span.stop,
            fetched.producer or "nobody",
            len(fetched.sources),
            fetched.transport,
            fetched.resolve_ms,
            fetched.wait_ms,
            _said_verified(fetched.verified),
        )

    def retried(self, failed: TransferId, fetch: Fetch) -> None:
        """A fetch failed, its blocks are quiet, and another producer is asked."""
        self._tally.count("retries", 1)
        logger.warning("transfer %s failed; its request is tried again as %s from %s at %s",
                       failed, fetch.transfer, fetch.source.engine, fetch.source.bootstrap)  # fmt: skip

    def fenced(self, producer: Incarnation) -> None:
        """Nothing that this life of a producer had under way can land any more."""
        self._tally.count("fences", 1)
        logger.warning("producer %s is fenced: nothing that it had under way can land any more", producer)

    def mismatched(self, transfer: TransferId, rank: int, wrong: Wrong) -> None:
        """A page is not what the producer has; the fetch fails."""
        self._tally.count("verify_mismatches", 1)
        logger.error("transfer %s: what producer rank %d wrote is wrong: %s", transfer, rank, wrong)

    def released(self, transfer: TransferId, request: RequestId, producer: Incarnation, rank: int) -> None:
        """Nothing was wanted of this transfer, and a producer rank was told so."""
        if self._report is not None:
            line = self._blank(transfer, request, peer=producer.engine_id, rank=rank, span=Span(0, 0))
            self._report.write(line.with_end(status=Fate.DONE.value, bytes=0, descriptors=0))

    def _line(self, fetched: Fetched, rank: int, placement: Placement) -> Line:
        ended = fetched.ended
        digest = self._digest(fetched, placement) if ended.outcome.fate is Fate.DONE else None
        peer = fetched.producer.engine_id if fetched.producer else ""
        return self._blank(ended.transfer, ended.request, peer=peer, rank=rank, span=fetched.span).with_end(
            status=ended.outcome.fate.value,
            reason=None if ended.outcome.fate is Fate.DONE else said(ended.outcome),
            ms=fetched.wait_ms,
            transport=fetched.transport,
            digest=digest.digest if digest else None,
            pages=digest.pages if digest else 0,
        )

    def _digest(self, fetched: Fetched, placement: Placement) -> PageDigest | None:
        reader = self._local.pages
        if reader is None:
            return None
        # Only the producer's shapes are used on this side, not its tables.
        nothing = tuple(BlockTable.empty() for _ in placement.groups)
        tables = block_tables(fetched.tables)
        request = TransferRequest(fetched.span.start, fetched.span.stop, nothing, tables)
        return page_digest(placement, self._local.placement, request, side="consumer", reader=reader)

    def _blank(self, transfer: TransferId, request: RequestId, *, peer: str, rank: int, span: Span) -> Line:
        return Line(
            transfer_id=transfer,
            request_id=request,
            side="consumer",
            engine_id=self._local.incarnation.engine_id,
            peer_engine_id=peer,
            producer_rank=rank,
            consumer_rank=self._local.index,
            start=span.start,
            stop=span.stop,
        )


def _said_verified(verified: Verified | None) -> str:
    if verified is None:
        return ""
    return f", verified {verified.pages} pages ({verified.nbytes} bytes) in {verified.seconds * 1e3:.2f} ms"


def level_of(outcome: Outcome) -> int:
    """A transfer that nobody wanted to end this way is a warning; what a client aborted is not."""
    return logging.WARNING if outcome.fate in (Fate.FAILED, Fate.EXPIRED) else logging.INFO


def said(outcome: Outcome) -> str:
    """An outcome in words."""
    if outcome.reason is None:
        return outcome.fate.value
    detail = f": {outcome.detail}" if outcome.detail else ""
    return f"{outcome.fate.value} ({outcome.reason.value}{detail})"
