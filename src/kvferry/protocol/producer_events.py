"""What a producer's machine is told, and what it asks for.

The machine (``producer.py``) sees no socket and no clock: its driver turns messages, completions and the local
scheduler's orders into the events of this file and carries out the actions. Words: a *lease* is the blocks of one
finished prompt that wait to be sent; a *pull* is one message of a consumer rank; a *write* is what one request of a
pull is owed.
"""

from dataclasses import dataclass

from kvferry.errors import ProtocolReason
from kvferry.ids import RequestId, TransferId
from kvferry.protocol.values import Outcome, PromptMark, Puller, PullId, Span, Table, Ticket, WriteId

# ---------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Announced:
    """The scheduler has taken in the prompt of this transfer: pulls for it are no strangers."""

    transfer: TransferId
    deadline: float


@dataclass(frozen=True, slots=True)
class Published:
    """The prompt is computed and lies in these blocks, which the machine now holds."""

    transfer: TransferId
    ticket: Ticket
    tokens: Span
    tables: tuple[Table, ...]
    deadline: float
    prompt: tuple[PromptMark, ...] = ()
    """What the cache is of, at each length at which a consumer may stop; empty: not compared."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The local scheduler gives this transfer up; unknown ids are no error. Writes under way are stopped."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class ReleaseOrdered:
    """The router says that no consumer will pull these any more, unless it already has; unknown ids are no error.

    Writes under way go on. An id that is published later is given back at once, for as long as it is remembered.
    """

    transfers: tuple[TransferId, ...]


@dataclass(frozen=True, slots=True)
class PulledRequest:
    """One request of a pull."""

    request: RequestId
    transfer: TransferId
    span: Span | None
    """Positions wanted; ``None`` from an upstream peer, whose lists pair from their ends."""

    tables: tuple[Table, ...]
    release: bool = False
    """No block is wanted: the pull only counts as served (a prefix hit of the whole prompt, an early abort)."""

    prompt: str | None = None
    """Digest of the prompt up to the end of ``span``, where the peer tells it."""


@dataclass(frozen=True, slots=True)
class PullArrived:
    """A pull whose peer, layout and plan the driver has checked. Refused ones never get here."""

    pull: PullId
    puller: Puller
    requests: tuple[PulledRequest, ...]
    expected: int
    """How many ranks of the puller's side must be served by this producer rank before a lease is done."""


@dataclass(frozen=True, slots=True)
class PullRefused:
    """The driver has refused a pull of this rank for these transfers; it may never be heard of again."""

    puller: Puller
    transfers: tuple[TransferId, ...]


@dataclass(frozen=True, slots=True)
class WriteDone:
    """Every descriptor of the write completed: nothing of it is under way, all bytes are there."""

    write: WriteId


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The write will not complete. Unless ``quiet``, the engine may still be moving bytes of it."""

    write: WriteId
    reason: ProtocolReason
    quiet: bool
    detail: str = ""
    landing: bool = False
    """As in :class:`Quieted`."""


@dataclass(frozen=True, slots=True)
class Quieted:
    """It is proven that nothing is read for these writes any more and, unless ``landing``, that nothing lands."""

    writes: tuple[WriteId, ...]
    landing: bool = False
    """The proof is the end of the writer's engine, and bytes that had left it before may still land."""


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """A kvferry consumer rank wants nothing more of this transfer; its pull, if any, is answered when quiet."""

    puller: Puller
    transfer: TransferId
    expected: int
    failed: bool = False
    """The consumer gave up after a failure, not because its client left."""


@dataclass(frozen=True, slots=True)
class ConsumerLost:
    """The connection that these pulls came by is gone: suspected, nothing proven."""

    pulls: tuple[PullId, ...]


@dataclass(frozen=True, slots=True)
class ProducerClosing:
    """The worker shuts down: nothing starts any more, everything ends as failed once quiet."""


@dataclass(frozen=True, slots=True)
class ProducerTick:
    """Time has passed; feed one when ``next_deadline`` is due."""


ProducerEvent = (
    Announced
    | Published
    | Withdrawn
    | ReleaseOrdered
    | PullArrived
    | PullRefused
    | WriteDone
    | WriteFailed
    | Quieted
    | PeerAborted
    | ConsumerLost
    | ProducerClosing
    | ProducerTick
)

# --------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Failure:
    """A request of a pull that is not served, and why."""

    request: RequestId
    reason: ProtocolReason
    detail: str = ""
    """Our own words; never text of a foreign exception."""

    landing: bool = False
    """Nothing is read for it any more, but bytes that had left may still land: the consumer has to fence."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a pull. ``ok`` and ``err`` are release orders to the consumer, and are given only when quiet.

    Not ``finish``: status CONTINUE (with both empty a keep-alive). ``finish``: status FINISH; by then each request
    of the pull has been named exactly once, and the driver may forget the pull.
    """

    pull: PullId
    ok: tuple[RequestId, ...] = ()
    err: tuple[Failure, ...] = ()
    failed: tuple[Failure, ...] = ()
    """Known to have failed but not quiet yet: for kvferry peers only, their blocks stay held."""

    finish: bool = False


@dataclass(frozen=True, slots=True)
class PullIgnored:
    """Forget this pull without another word: a pull of the same rank before it is not over, and will be answered."""

    pull: PullId


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Bind, submit and report with ``WriteDone`` or ``WriteFailed``; a refusal by the plan is a quiet failure."""

    write: WriteId
    transfer: TransferId
    tokens: Span
    source: tuple[Table, ...]
    wanted: PulledRequest


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """Stop this write if that can be done; report how it ended as for any write."""

    write: WriteId


@dataclass(frozen=True, slots=True)
class ProveQuiet:
    """These writes are in doubt for long enough: renew the engine, or whatever proves them quiet; then ``Quieted``.

    Asked again after ``fence_retry`` while unanswered.
    """

    writes: tuple[WriteId, ...]


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The one terminal report of a published transfer. Its blocks may still be held."""

    transfer: TransferId
    ticket: Ticket
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class SourceReleased:
    """No write touches the blocks of this ticket, and none will: return them. Exactly once."""

    transfer: TransferId
    ticket: Ticket


ProducerAction = Answer | PullIgnored | StartWrite | CancelWrite | ProveQuiet | LeaseEnded | SourceReleased


def word_of(action: ProducerAction) -> str:
    """An action in a few words, for the story of a transfer."""
    match action:
        case Answer():
            kind = "finish" if action.finish else "go on"
            reasons = [one.reason.value for one in (*action.err, *action.failed)]
            return " ".join([f"answer {action.pull}: {kind}", *(["ok"] if action.ok else []), *reasons])
        case LeaseEnded():
            return f"ended {action.outcome.fate.value} {action.outcome.reason or ''}".rstrip()
        case _:
            return type(action).__name__
