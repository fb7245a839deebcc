"""What a consumer's machine remembers, and its limits. Only the machine changes these records."""

from dataclasses import dataclass, field

from kvferry.errors import LocalProtocolError, ProtocolReason
from kvferry.ids import Incarnation, RequestId, TransferId
from kvferry.protocol.consumer_events import PullKey, Source
from kvferry.protocol.coverage import Coverage
from kvferry.protocol.tables import FetchState, PullState
from kvferry.protocol.values import Span, Ticket


@dataclass(frozen=True, slots=True)
class ConsumerLimits:
    """Bounds and times of a consumer's machine. Times are seconds."""

    fetches: int = 16_384
    """Transfers known at once; one more is failed, untouched."""

    remembered_pulls: int = 65_536
    """Pulls to upstream producers of which a second one is refused."""

    silence: float = 30.0
    """A kvferry producer that has said nothing about an open pull for this long is taken as lost."""

    abort_timeout: float = 5.0
    """How long a kvferry producer may take to say that a pull which we gave up is quiet."""

    fence_after: float = 2.0
    """How long doubt waits for other pulls of that producer to finish before a fence fails them."""

    fence_latest: float = 8.0
    """After this it waits no longer; also how often an unanswered fence is asked for again."""

    quarantined_blocks: int | None = None
    """Most destination blocks that may be held for fetches that are over; above it doubt is fenced at once, a pull that
    was given up has ``fence_after`` to become quiet, and where a fence proves nothing (`cma`, a writer that lives and
    cannot be reached) new fetches are refused."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise LocalProtocolError(ProtocolReason.LIMIT_EXCEEDED, f"limit {name} must be above 0")


@dataclass(slots=True)
class FetchPull:
    """One pull of a fetch."""

    key: PullKey
    producer: Incarnation
    upstream: bool
    release: bool
    coverage: Coverage
    state: PullState = PullState.QUEUED
    inlined: bool = False
    """It has been sent again with the layouts that the producer lacked; once is enough."""


@dataclass(slots=True)
class Fetch:
    """One transfer, from the order until its blocks are back."""

    transfer: TransferId
    request: RequestId
    source: Source
    deadline: float
    ticket: Ticket | None
    """``None``: nothing is held and nothing is reported; the producer is only told that it is not needed."""

    span: Span = field(default_factory=lambda: Span(0, 0))
    groups: int = 1
    blocks: int = 0
    state: FetchState = FetchState.RESOLVING
    pulls: dict[PullKey, FetchPull] = field(default_factory=dict)


@dataclass(slots=True)
class ProducerRecord:
    """One life of a producer, while pulls to it are not over."""

    incarnation: Incarnation
    upstream: bool
    pulls: dict[PullKey, None] = field(default_factory=dict)
    fencing: bool = False
    unproven: bool = False
    """A fence was tried and proves nothing for now: its writers live, and do not say that they have stopped."""

    doubt_since: float | None = None


@dataclass(frozen=True, slots=True)
class FetchDue:
    """Timer: a fetch has reached its deadline."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class PullDue:
    """Timer: an open pull has been silent, or an ending one unanswered, for long enough."""

    key: PullKey


@dataclass(frozen=True, slots=True)
class FenceDue:
    """Timer: doubt about a producer is old enough, or a fence is unanswered."""

    producer: Incarnation


TimerKey = FetchDue | PullDue | FenceDue
