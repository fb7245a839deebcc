"""The leases of a producer: transfers from the first that is heard of them until their blocks are back.

Here is how one begins (by the scheduler's word, or as a *stranger* that only a peer has spoken of), how it moves by
its table, how long it is kept, and what is remembered once it is over, so that it does not begin again and late pulls
are told how it ended. What its writes are at is another matter (:mod:`kvferry.protocol.producer_writes`): when a lease
ends, and when it may be dropped, the machine decides.
"""

from typing import Final

from kvferry.errors import ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol.invariants import holds
from kvferry.protocol.newest import Newest
from kvferry.protocol.producer_events import LeaseEnded, ProducerAction, SourceReleased
from kvferry.protocol.producer_records import Lease, LeaseDue, ProducerLimits, TimerKey
from kvferry.protocol.strangers import Strangers
from kvferry.protocol.tables import LEASE_TABLE, LeaseState, LeaseStep
from kvferry.protocol.timers import Timers
from kvferry.protocol.turn import Turn
from kvferry.protocol.values import Puller

_REASONS: Final = {LeaseStep.WITHDRAW: ProtocolReason.ABORTED, LeaseStep.TIME_OUT: ProtocolReason.EXPIRED}


class Leases:
    """Those that are known, and how the newest of the others ended."""

    def __init__(self, limits: ProducerLimits, turn: Turn[ProducerAction], timers: Timers[TimerKey]) -> None:
        self._limits = limits
        self._turn = turn
        self._timers = timers
        self._strangers = Strangers(limits.strangers, limits.strangers_per_peer)
        self.known: dict[TransferId, Lease] = {}
        self.over: Newest[TransferId, ProtocolReason] = Newest(limits.remembered)
        """How late pulls are answered; ``UNKNOWN_TRANSFER`` for what was served."""

    @property
    def full(self) -> bool:
        """Whether the scheduler may begin no other."""
        return len(self.known) >= self._limits.leases

    def get(self, transfer: TransferId) -> Lease | None:
        """The lease of a transfer, while it is known."""
        return self.known.get(transfer)

    def begin(self, transfer: TransferId, deadline: float) -> Lease:
        """One that the scheduler speaks of."""
        lease = self.known[transfer] = Lease(transfer)
        self.set_deadline(lease, deadline)
        return lease

    def begin_stranger(self, transfer: TransferId, puller: Puller) -> Lease | None:
        """One that only a peer has spoken of; ``None`` where there is no room for it."""
        if not self._strangers.take(puller):
            return None
        lease = self.begin(transfer, self._turn.now + self._limits.stranger_wait)
        lease.stranger_of = puller
        return lease

    def never(self, transfer: TransferId) -> None:
        """It is not known, and it is not to begin."""
        if transfer not in self.over:
            self.over.note(transfer, ProtocolReason.ABORTED)

    def set_deadline(self, lease: Lease, deadline: float) -> None:
        """Until when it is kept."""
        lease.deadline = deadline
        self._timers.set(LeaseDue(lease.transfer), deadline)

    def mind_deadline(self, lease: Lease) -> None:
        """How long a published lease waits for the next pull: less, once those who came will not be served."""
        if lease.state is not LeaseState.PUBLISHED or lease.overdue:
            return
        lease.mind_wait(self._turn.now, self._limits)
        self._timers.set(LeaseDue(lease.transfer), lease.kept_until or lease.deadline)

    def step(self, lease: Lease, step: LeaseStep) -> bool:
        """Whether its table has this step; if so it is taken."""
        after = LEASE_TABLE.get((lease.state, step))
        if after is None:
            return False
        lease.state = after
        if lease.stranger_of is not None:
            self._strangers.give_back(lease.stranger_of)
            lease.stranger_of = None
        self._turn.changed(lease.transfer)
        return True

    def end(self, lease: Lease, step: LeaseStep, reason: ProtocolReason | None = None) -> bool:
        """Report how it ended, if it has not ended before; its blocks may still be held."""
        if not self.step(lease, step):
            return False
        self._timers.cancel(LeaseDue(lease.transfer))
        if step is not LeaseStep.COMPLETE:
            lease.reason = reason or _REASONS.get(step, ProtocolReason.PEER_FAILED)
        if lease.ticket is not None:
            self._turn.emit(lease.transfer, LeaseEnded(lease.transfer, lease.ticket, lease.outcome))
        return True

    def drop(self, lease: Lease) -> None:
        """It is over and nothing reads its blocks."""
        del self.known[lease.transfer]
        self.over.note(lease.transfer, lease.reason or ProtocolReason.UNKNOWN_TRANSFER)
        if lease.ticket is not None:
            self._turn.emit(lease.transfer, SourceReleased(lease.transfer, lease.ticket))

    def check(self) -> None:
        """What holds of their number between any two events; for tests. Raises ``AssertionError``."""
        self._strangers.check(one.stranger_of for one in self.known.values() if one.stranger_of)
        holds(len(self.known) <= self._limits.leases + self._limits.strangers, "leases are bounded")
