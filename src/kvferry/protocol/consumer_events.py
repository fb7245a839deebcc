"""What a consumer's machine is told, and what it asks for.

Words: a *fetch* is one transfer that this consumer rank wants; it sends one *pull* to each producer rank that it
must hear from. A fetch's fate and its blocks are separate: the fate is reported at once, the blocks are released
when every pull is quiet.
"""

from dataclasses import dataclass

from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.protocol.messages import Reply as WireReply
from kvferry.protocol.values import Outcome, Span, Ticket


@dataclass(frozen=True, slots=True)
class Source:
    """Where a transfer's cache comes from, as the router's parameters name it."""

    engine: EngineId
    bootstrap: str


@dataclass(frozen=True, slots=True)
class PullKey:
    """One pull of this consumer rank. At most one per key ever reaches an upstream producer."""

    transfer: TransferId
    rank: int
    """The producer rank, as the driver numbers them (pipeline rank times tensor size plus tensor rank)."""


# ---------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class FetchRequested:
    """The scheduler has allocated the destination blocks of ``ticket`` and waits for positions ``span``."""

    transfer: TransferId
    request: RequestId
    ticket: Ticket
    source: Source
    span: Span
    groups: int
    """Cache groups that parts are counted over."""

    deadline: float
    blocks: int = 0
    """Destination blocks held, for the bound on blocks in quarantine."""


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """Nothing is wanted of this transfer; the producer should know. Holds no block, reports nothing."""

    transfer: TransferId
    request: RequestId
    source: Source
    deadline: float


@dataclass(frozen=True, slots=True)
class Target:
    """A producer rank to pull from."""

    rank: int
    release: bool = False
    """It has nothing for us; the pull only lets it count us as served."""


@dataclass(frozen=True, slots=True)
class SourceResolved:
    """The driver found the producer, checked that it is compatible and chose the ranks to pull from."""

    transfer: TransferId
    producer: Incarnation
    upstream: bool
    """The producer is vLLM's own connector: nothing but one pull per rank may be sent to it."""

    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class SourceRefused:
    """The producer cannot be found, or is not compatible. Nothing was sent."""

    transfer: TransferId
    reason: ProtocolReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReplyArrived:
    """A producer rank answered a pull; any answer, keep-alives included."""

    key: PullKey
    reply: WireReply


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A pull cannot go on. ``quiet`` only where it surely never reached the producer."""

    key: PullKey
    reason: ProtocolReason
    quiet: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProducerLost:
    """This life of a producer is suspected dead, or known to be over (another epoch was seen)."""

    producer: Incarnation
    reason: ProtocolReason = ProtocolReason.PEER_LOST


@dataclass(frozen=True, slots=True)
class FenceDone:
    """The engine that received this producer's writes is destroyed: nothing sent before can land any more."""

    producer: Incarnation


@dataclass(frozen=True, slots=True)
class FenceFailed:
    """It could not be destroyed; the blocks stay held, and the fence is asked for again later."""

    producer: Incarnation


@dataclass(frozen=True, slots=True)
class FetchAborted:
    """The local request is gone. A ticket that was never seen, or is over, is no error."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ConsumerClosing:
    """The worker shuts down: every fetch fails now, everything sent is fenced."""


@dataclass(frozen=True, slots=True)
class ConsumerTick:
    """Time has passed; feed one when ``next_deadline`` is due."""


ConsumerEvent = (
    FetchRequested
    | ReleaseRequested
    | SourceResolved
    | SourceRefused
    | ReplyArrived
    | PullFailed
    | ProducerLost
    | FenceDone
    | FenceFailed
    | FetchAborted
    | ConsumerClosing
    | ConsumerTick
)

# --------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Resolve:
    """A fetch has begun: find the producer (cached facts are fine), check compatibility, choose ranks.

    Answered with ``Source*``.
    """

    transfer: TransferId
    request: RequestId
    ticket: Ticket | None
    """``None``: nothing is wanted, the producer is only to be told."""

    source: Source


@dataclass(frozen=True, slots=True)
class SendPull:
    """Send the pull of this key to the producer's rank, naming the current receive engine for that producer."""

    key: PullKey
    producer: Incarnation
    release: bool
    """Send empty block lists."""

    inline_layouts: bool = False
    """The producer lacks placements: put them into the pull."""


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell a kvferry producer rank that nothing more is wanted; it answers the pull when quiet."""

    key: PullKey
    producer: Incarnation
    failed: bool


@dataclass(frozen=True, slots=True)
class ForgetPull:
    """The pull is over, or is not going to be sent: its connection, if it has one of its own, may be closed."""

    key: PullKey


@dataclass(frozen=True, slots=True)
class ForgetProducer:
    """Drop the cached facts of exactly this life of the producer; ask again when it is next needed."""

    producer: Incarnation


@dataclass(frozen=True, slots=True)
class FenceProducer:
    """Destroy the engine that receives from this producer, make a new one, answer with ``FenceDone``."""

    producer: Incarnation


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """The one terminal report of a fetch. Its blocks may still be held."""

    transfer: TransferId
    request: RequestId
    ticket: Ticket
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class DestinationReleased:
    """Nothing writes into the blocks of this ticket, and nothing will. Exactly once."""

    transfer: TransferId
    ticket: Ticket


ConsumerAction = (
    Resolve | SendPull | SendAbort | ForgetPull | ForgetProducer | FenceProducer | FetchEnded | DestinationReleased
)


def word_of(action: ConsumerAction) -> str:
    """An action in a few words, for the story of a transfer."""
    match action:
        case FetchEnded():
            return f"ended {action.outcome.fate.value} {action.outcome.reason or ''}".rstrip()
        case SendPull() | SendAbort():
            return f"{type(action).__name__} {action.key.rank}"
        case _:
            return type(action).__name__
