"""Drives a consumer's machine, one event at a time, with a clock of its own."""

from collections.abc import Sequence
from typing import TypeVar

from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.protocol import (
    VERSION,
    Consumer,
    ConsumerAction,
    ConsumerEvent,
    ConsumerLimits,
    ConsumerTick,
    Fate,
    FetchEnded,
    FetchRequested,
    PartDone,
    PullKey,
    Reply,
    ReplyArrived,
    ReplyExtension,
    Side,
    Source,
    SourceResolved,
    Span,
    Status,
    Target,
    Ticket,
)
from kvferry.protocol.messages import Failed

T = TransferId("t")
TICKET = Ticket(1)
LIFE = Incarnation(EngineId("P"), "e1")
SOURCE = Source(EngineId("P"), "http://p:1")
SPAN = Span(16, 64)
A = TypeVar("A")


class Driver:
    """A machine with a clock; checks its invariants after every event."""

    def __init__(self, **limits: float) -> None:
        self.machine = Consumer(ConsumerLimits(**limits))  # type: ignore[arg-type]
        self.now = 0.0
        self.all: list[ConsumerAction] = []

    def feed(self, event: ConsumerEvent) -> tuple[ConsumerAction, ...]:
        actions = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        self.all += actions
        return actions

    def wait(self, seconds: float) -> list[ConsumerAction]:
        until, actions = self.now + seconds, []
        while (due := self.machine.next_deadline) is not None and due <= until:
            self.now = due
            actions += self.feed(ConsumerTick())
        self.now = until
        return actions

    def fetch(self, transfer: TransferId = T, ticket: Ticket = TICKET, seconds: float = 60) -> Sequence[ConsumerAction]:
        request = RequestId(f"d-{transfer}")
        return self.feed(FetchRequested(transfer, request, ticket, SOURCE, SPAN, 2, self.now + seconds, blocks=3))

    def resolve(self, *ranks: int, transfer: TransferId = T, upstream: bool = False) -> Sequence[ConsumerAction]:
        targets = tuple(Target(rank) for rank in ranks or (0,))
        return self.feed(SourceResolved(transfer, LIFE, upstream, targets))

    def open(self, *ranks: int, transfer: TransferId = T, ticket: Ticket = TICKET, upstream: bool = False) -> None:
        """Fetch, and have the pulls sent."""
        self.fetch(transfer, ticket)
        self.resolve(*ranks, transfer=transfer, upstream=upstream)

    def reply(self, rank: int = 0, transfer: TransferId = T, **fields: object) -> Sequence[ConsumerAction]:
        return self.feed(ReplyArrived(PullKey(transfer, rank), say(transfer, **fields)))

    def kept(self, kind: type[A]) -> list[A]:
        return [action for action in self.all if isinstance(action, kind)]


def say(
    transfer: TransferId = T,
    *,
    status: Status = Status.FINISH,
    ok: bool = False,
    failed: ProtocolReason | None = None,
    quiet: bool = True,
    parts: Sequence[tuple[int, int]] | None = None,
    epoch: str = "e1",
    reason: ProtocolReason | None = None,
) -> Reply:
    """A kvferry producer's reply; an ``ok`` one covers everything unless ``parts`` says otherwise."""
    request = f"d-{transfer}"
    covered = [(SPAN.start, SPAN.stop)] if parts is None and ok else parts or ()
    return Reply(
        status=status,
        ok_reqs=(request,) if ok else None,
        err_reqs=(request,) if failed and quiet else None,
        kvferry=ReplyExtension(
            version=VERSION,
            producer=Side("P", epoch, 0),
            pull=1,
            parts=tuple(PartDone(request, start, stop) for start, stop in covered),
            failed=(Failed(request, failed.value, quiet),) if failed else (),
            reason=reason.value if reason else None,
        ),
    )


def theirs(status: Status = Status.FINISH, *, ok: bool = False, err: bool = False) -> Reply:
    """An upstream producer's reply."""
    return Reply(status, ("d-t",) if ok else None, ("d-t",) if err else None)


def only(actions: Sequence[ConsumerAction], kind: type[A]) -> A:
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def failed(
    reason: ProtocolReason, transfer: TransferId = T, ticket: Ticket = TICKET
) -> tuple[TransferId, Ticket, Fate, ProtocolReason]:
    return transfer, ticket, Fate.FAILED, reason


def fate(ended: FetchEnded) -> tuple[TransferId, Ticket, Fate, ProtocolReason | None]:
    return ended.transfer, ended.ticket, ended.outcome.fate, ended.outcome.reason
