"""What a producer's machine remembers, and its limits. Only the machine changes these records."""

from dataclasses import dataclass, field

from kvferry.errors import LocalProtocolError, ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol.producer_events import Failure, PulledRequest
from kvferry.protocol.tables import LEASE_ENDED, LeaseState, LeaseStep, WriteState
from kvferry.protocol.values import DONE, Fate, Outcome, PromptMark, Puller, PullId, Span, Table, Ticket, WriteId

_FATES = {
    LeaseState.FAILED: Fate.FAILED,
    LeaseState.ABORTED: Fate.ABORTED,
    LeaseState.EXPIRED: Fate.EXPIRED,
}
_OTHER_PROMPT = "the transfer id was given to another prompt; each prompt needs one of its own"


@dataclass(frozen=True, slots=True)
class ProducerLimits:
    """Bounds and times of a producer's machine. Times are seconds."""

    leases: int = 16_384
    """Transfers known at once; one published beyond that is given back as failed, one announced is not noted."""

    pulls: int = 8_192
    """Open pulls; one more is answered with an error, or not at all where it repeats an open one."""

    strangers: int = 4_096
    """Transfers that only peers have spoken of. They never hinder the others."""

    strangers_per_peer: int = 2_048
    """The same for one consumer rank, so that one with many requests leaves room for the others."""

    pullers: int = 4_096
    """Consumer ranks that one transfer may be pulled by."""

    remembered: int = 4_096
    """Ended transfers of which late pulls are told how they ended; also pulls that were refused for want of room."""

    stranger_wait: float = 60.0
    """How long a pull for a transfer that only peers have spoken of may wait for the scheduler to speak of it."""

    keep_alive: float = 2.0
    """How often an open pull is told to go on waiting; also finds out whether the consumer is still there."""

    write_timeout: float = 120.0
    """After this a write is stopped."""

    stop_timeout: float = 2.0
    """After this a stopped write that has not reported is in doubt."""

    fence_after: float = 3.0
    """How long a write may be in doubt before proof is asked for, and how often it is asked for again."""

    lost_grace: float = 5.0
    """How long a lease is still kept once all that came for it are lost or were refused: another may be sent."""

    side_wait: float = 60.0
    """How long a lease is still kept for the ranks of a side that has been served in part, once nothing is open."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise LocalProtocolError(ProtocolReason.LIMIT_EXCEEDED, f"limit {name} must be above 0")


@dataclass(slots=True)
class Write:
    """One request of one pull, until it is named in an answer."""

    id: WriteId
    wanted: PulledRequest
    puller: Puller
    state: WriteState = WriteState.WAITING
    behind: WriteId | None = None
    """A repeated pull of the same rank: refused, but not before the first is quiet, since a refusal frees blocks."""

    failure: Failure | None = None
    """Decided as soon as the write is given up, told to the consumer as settled only when it is quiet."""


@dataclass(slots=True)
class PullRecord:
    """An open pull: which of its requests are not named yet."""

    id: PullId
    unnamed: dict[WriteId, None] = field(default_factory=dict)


@dataclass(slots=True)
class Lease:
    """One transfer, from the first that is heard of it until its blocks are back."""

    transfer: TransferId
    state: LeaseState = LeaseState.AWAITED
    stranger_of: Puller | None = None
    """Who spoke of it first, while only peers have."""

    deadline: float = 0.0
    due: LeaseStep = LeaseStep.TIME_OUT
    """What happens at the deadline, or once the writes under way then have settled."""

    overdue: bool = False
    ticket: Ticket | None = None
    tokens: Span = field(default_factory=lambda: Span(0, 0))
    tables: tuple[Table, ...] = ()
    prompt: tuple[PromptMark, ...] = ()
    writes: dict[WriteId, None] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    """By side: how many of its ranks are to be served."""

    tried: set[Puller] = field(default_factory=set)
    """Ranks for which a write has started; none ever starts for them again."""

    served: dict[str, set[str]] = field(default_factory=dict)
    given_up: dict[str, set[str]] = field(default_factory=dict)
    peer_failed: bool = False
    gone: set[Puller] = field(default_factory=set)
    """Ranks that came for it and will not be served: lost, refused, or they gave up."""

    kept_until: float | None = None
    """Earlier than the deadline, where nobody is known who may still come."""

    reason: ProtocolReason | None = None
    """Why it ended otherwise than done."""

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        return Outcome(_FATES[self.state], self.reason) if self.reason else DONE

    def mismatch(self, wanted: PulledRequest) -> Failure | None:
        """Why a request is not served: the cache is of another prompt, as far as both ends have said what it is of."""
        if not self.prompt or wanted.prompt is None or wanted.span is None:
            return None
        if PromptMark(wanted.span.stop, wanted.prompt) in self.prompt:
            return None
        return Failure(wanted.request, ProtocolReason.OTHER_PROMPT, _OTHER_PROMPT)

    def pullers(self) -> int:
        return len(self.tried) + sum(len(ranks) for ranks in self.given_up.values())

    def refusal(self, puller: Puller, expected: int, *, limit: int) -> ProtocolReason | None:
        """Why a rank that has nothing open here may not pull it; ``limit``: of the ranks that may."""
        if self.state in LEASE_ENDED or self.overdue:
            return self.reason or ProtocolReason.UNKNOWN_TRANSFER
        if puller.rank in self.given_up.get(puller.side, ()):
            return ProtocolReason.ABORTED
        if puller in self.tried:
            return ProtocolReason.DUPLICATE_TRANSFER
        if self.expected.get(puller.side, expected) != expected:
            return ProtocolReason.INCOMPATIBLE_PEER
        return ProtocolReason.LIMIT_EXCEEDED if self.pullers() + len(self.writes) >= limit else None

    @property
    def forlorn(self) -> bool:
        """Whether no side is known that can still be served: each that came has a rank that will not be."""
        sides = {puller.side for puller in self.gone}
        return bool(sides) and self.expected.keys() <= sides

    def mind_wait(self, now: float, limits: ProducerLimits) -> None:
        """Until when it is kept, as things are now."""
        if self.forlorn or (self.served and not self.writes):
            wait = limits.lost_grace if self.forlorn else limits.side_wait
            self.kept_until = min(self.kept_until or self.deadline, now + wait)
        else:
            self.kept_until = None

    def settled(self) -> LeaseStep | None:
        """How a published lease ends once a side has nothing more to come for; ``None`` while one has."""
        for side, expected in self.expected.items():
            served = self.served.get(side, set())
            if len(served) >= expected:
                return LeaseStep.COMPLETE
            if len(served | self.given_up.get(side, set())) >= expected:
                return LeaseStep.FAIL if self.peer_failed else LeaseStep.WITHDRAW
        return None


@dataclass(frozen=True, slots=True)
class LeaseDue:
    """Timer: a lease has reached its deadline."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class WriteDue:
    """Timer: a write has been in its state for long enough."""

    write: WriteId


@dataclass(frozen=True, slots=True)
class KeepAliveDue:
    """Timer: a pull has had no answer for a while."""

    pull: PullId


TimerKey = LeaseDue | WriteDue | KeepAliveDue
