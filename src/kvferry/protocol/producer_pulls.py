"""Pulls as they come in: what a consumer rank may draw on, what is refused at once, and what waits behind its first.

At most one write ever starts for each (transfer, consumer rank), so whoever comes again has to be told apart: a pull
that repeats one which is not over is kept until the first is quiet, and refused then; where there is no room to keep
it, it is ignored, since the first will be answered. A rank that was refused for want of room stays refused, because its
refusal has freed blocks. A transfer of which nobody has spoken yet may be waited for, by so many strangers as there is
room for.
"""

from collections.abc import Callable, Iterable

from kvferry.errors import LocalProtocolError, ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol.messages import MAX_NAME
from kvferry.protocol.newest import Newest
from kvferry.protocol.producer_events import (
    Answer,
    Failure,
    ProducerAction,
    PullArrived,
    PulledRequest,
    PullIgnored,
)
from kvferry.protocol.producer_leases import Leases
from kvferry.protocol.producer_records import Lease, ProducerLimits, Write
from kvferry.protocol.producer_writes import Writes
from kvferry.protocol.tables import LeaseState
from kvferry.protocol.turn import Turn
from kvferry.protocol.values import Puller, WriteId


class Pulls:
    """Takes pulls in, and remembers whom it has turned away."""

    def __init__(
        self,
        limits: ProducerLimits,
        turn: Turn[ProducerAction],
        *,
        leases: Leases,
        writes: Writes,
        review: Callable[[Lease], None],
    ) -> None:
        self._limits = limits
        self._turn = turn
        self._leases = leases
        self._writes = writes
        self._review = review
        self.turned_away: Newest[tuple[TransferId, Puller], ProtocolReason] = Newest(limits.remembered)

    def serves(self, puller: Puller, transfers: Iterable[TransferId]) -> bool:
        """Whether a pull of this rank for one of these is not over."""
        known = [lease for transfer in transfers if (lease := self._leases.get(transfer)) is not None]
        return any(self._writes.first_of(lease, puller) is not None for lease in known)

    def arrive(self, event: PullArrived, *, closing: bool) -> None:
        """Take one in, or turn it away."""
        if event.pull in self._writes.pulls or event.expected < 1:
            raise LocalProtocolError(
                ProtocolReason.MALFORMED, f"pull {event.pull} given twice, or expecting {event.expected} ranks"
            )
        if not event.requests or len({one.request for one in event.requests}) < len(event.requests):
            raise LocalProtocolError(ProtocolReason.MALFORMED, f"pull {event.pull} repeats a request, or has none")
        if closing or len(self._writes.pulls) >= self._limits.pulls:
            self._turn_away(event, ProtocolReason.ABORTED if closing else ProtocolReason.LIMIT_EXCEEDED)
            return
        self._writes.open(event)
        for one in event.requests:
            self._take(event, one)

    def _turn_away(self, event: PullArrived, reason: ProtocolReason) -> None:
        """A pull that is not kept. What this rank has pulled already is not named: its first pull will be answered."""
        repeated = {one.request for one in event.requests if self.serves(event.puller, [one.transfer])}
        refused = [one for one in event.requests if one.request not in repeated]
        for one in refused:
            self.turned_away.note((one.transfer, event.puller), reason)
        if refused:
            err = tuple(Failure(one.request, reason) for one in refused)
            self._turn.ask(Answer(event.pull, err=err, finish=not repeated))
        if repeated:
            self._turn.ask(PullIgnored(event.pull))

    def _take(self, event: PullArrived, wanted: PulledRequest) -> None:
        write = Write(WriteId(event.pull, wanted.request), wanted, event.puller)
        lease, refusal = self._lease_for(event, wanted.transfer)
        if lease is None or refusal is not None:
            if refusal is ProtocolReason.LIMIT_EXCEEDED:
                self.turned_away.note((wanted.transfer, event.puller), refusal)
            self._turn.note(wanted.transfer, f"refused {refusal}")
            self._writes.name(write, Failure(wanted.request, refusal or ProtocolReason.UNKNOWN_TRANSFER))
            return
        lease.expected[event.puller.side] = event.expected
        self._writes.add(lease, write)
        if write.behind is not None:
            self._turn.note(wanted.transfer, "repeats a pull")
            return
        lease.gone.discard(event.puller)
        self._leases.mind_deadline(lease)
        if lease.state is LeaseState.PUBLISHED:
            self._writes.start(lease, write)
            self._review(lease)
        else:
            self._turn.note(wanted.transfer, "waits")

    def _lease_for(self, event: PullArrived, transfer: TransferId) -> tuple[Lease | None, ProtocolReason | None]:
        """The lease that a pull may draw on, or why it may not."""
        if len(transfer) > MAX_NAME:
            return None, ProtocolReason.MALFORMED
        lease = self._leases.get(transfer)
        refusal = self.turned_away.get((transfer, event.puller))
        if refusal is None and lease is None:
            refusal = self._leases.over.get(transfer)
        if refusal is not None:
            return lease, refusal
        if lease is None:
            lease = self._leases.begin_stranger(transfer, event.puller)
            return lease, None if lease else ProtocolReason.LIMIT_EXCEEDED
        if self._writes.first_of(lease, event.puller) is not None:
            return lease, None  # answered after the first
        return lease, lease.refusal(event.puller, event.expected, limit=self._limits.pullers)
