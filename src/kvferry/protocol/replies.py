"""What one reply means for the pull that it answers.

The two kinds of producer mean different things by the same words. kvferry names a request as failed only when it is
quiet, tells of a failure before that under its own key, and refuses a whole pull only before it did anything for it.
One that it names as failed and *not* quiet is what it can say no more of: its engine is destroyed, but bytes that had
left before may still land, so the receiver has to fence.
Upstream names a failed request while bytes of it may still be moving; what it leaves out of its FINISH it has never
begun to write. Every pull of ours carries one request.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import ProtocolReason
from kvferry.ids import Incarnation, RequestId
from kvferry.protocol.messages import Failed, PartDone, Reply, ReplyExtension, Status
from kvferry.protocol.pulls import incarnation_of


class Verdict(StrEnum):
    """What becomes of a pull."""

    WAIT = "wait"
    FAILING = "failing"
    """It will not be served, and is not quiet yet; the producer will say when it is."""

    SERVED = "served"
    REFUSED = "refused"
    """Not served, and quiet."""

    DOUBT = "doubt"
    """Not served, and nobody will say when it is quiet."""

    LAYOUT_MISS = "layout-miss"
    """Refused, and quiet: the producer lacks a placement, which may be sent with the pull."""


@dataclass(frozen=True, slots=True)
class PullVerdict:
    """What becomes of a pull, why, and which positions have arrived."""

    kind: Verdict
    reason: ProtocolReason | None = None
    detail: str = ""
    parts: tuple[PartDone, ...] = ()


def judge(reply: Reply, request: RequestId, producer: Incarnation, *, upstream: bool) -> PullVerdict:
    """The meaning of ``reply`` for the pull of ``request``."""
    named_ok = request in (reply.ok_reqs or ())
    named_err = request in (reply.err_reqs or ())
    if named_ok and named_err:
        return PullVerdict(Verdict.DOUBT, ProtocolReason.MALFORMED, "a request is named as ok and as err")
    if upstream:
        return _judge_upstream(reply, named_ok=named_ok, named_err=named_err)
    extension = reply.kvferry
    if not isinstance(extension, ReplyExtension):
        return PullVerdict(Verdict.DOUBT, ProtocolReason.MALFORMED, "a kvferry producer answered without its key")
    if incarnation_of(extension.producer) != producer:
        return PullVerdict(Verdict.DOUBT, ProtocolReason.STALE_INCARNATION, "another life of the producer answered")
    parts = tuple(part for part in extension.parts if part.request == request)
    failures = [one for one in extension.failed if one.request == request]
    verdict = _judge_kvferry(reply, extension, failures, named_ok=named_ok, named_err=named_err)
    return PullVerdict(verdict.kind, verdict.reason, verdict.detail, parts)


def _judge_upstream(reply: Reply, *, named_ok: bool, named_err: bool) -> PullVerdict:
    if reply.status in (Status.ERROR, Status.LAYOUT_MISS) or named_err:
        return PullVerdict(Verdict.DOUBT, ProtocolReason.PEER_FAILED, "the producer reports a failure")
    if named_ok:
        return PullVerdict(Verdict.SERVED)
    if reply.status is Status.FINISH:
        return PullVerdict(Verdict.REFUSED, ProtocolReason.EXPIRED, "the producer no longer holds this transfer")
    return PullVerdict(Verdict.WAIT)


def _judge_kvferry(
    reply: Reply, extension: ReplyExtension, failures: list[Failed], *, named_ok: bool, named_err: bool
) -> PullVerdict:
    if reply.status is Status.ERROR:
        reason = _reason(extension.reason)
        kind = Verdict.LAYOUT_MISS if reason is ProtocolReason.LAYOUT_MISS else Verdict.REFUSED
        return PullVerdict(kind, reason, reply.err_msg or "")
    if named_ok and not failures:
        return PullVerdict(Verdict.SERVED)
    if failures:
        unsettled = Verdict.DOUBT if named_err else Verdict.FAILING
        kind = Verdict.REFUSED if failures[0].quiet else unsettled
        return PullVerdict(kind, _reason(failures[0].reason), failures[0].detail)
    if reply.status is Status.FINISH:
        return PullVerdict(Verdict.DOUBT, ProtocolReason.MALFORMED, "a finished pull does not name its request")
    return PullVerdict(Verdict.WAIT)


def _reason(word: str | None) -> ProtocolReason:
    """A reason of a peer, which may be of a newer version and know more of them."""
    try:
        return ProtocolReason(word or "")
    except ValueError:
        return ProtocolReason.PEER_FAILED
