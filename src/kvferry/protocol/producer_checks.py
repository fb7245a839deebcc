"""What holds of a producer's records between any two events; for tests."""

from collections.abc import Mapping

from kvferry.ids import TransferId
from kvferry.protocol.invariants import holds
from kvferry.protocol.producer_records import KeepAliveDue, Lease, LeaseDue, PullRecord, TimerKey, Write, WriteDue
from kvferry.protocol.tables import LEASE_ENDED, LeaseState, WriteState
from kvferry.protocol.timers import Timers
from kvferry.protocol.values import PullId, WriteId


def check_lease(lease: Lease, writes: Mapping[WriteId, Write], timers: Timers[TimerKey]) -> None:
    """One lease."""
    ended, published = lease.state in LEASE_ENDED, lease.state is LeaseState.PUBLISHED
    states = [writes[one].state for one in lease.writes if writes[one].behind is None]
    firsts = [writes[one].behind for one in lease.writes]
    holds(all(one is None or one in lease.writes for one in firsts), "a repeated pull waits for a live one")
    holds(not ended or bool(states), "a lease that is over is kept only for its writes")
    holds(ended or lease.overdue or LeaseDue(lease.transfer) in timers, "a lease has a deadline")
    holds(lease.ticket is not None or not published, "a published lease has blocks")
    holds((lease.stranger_of is not None) == (lease.state is LeaseState.AWAITED), "strangers are awaited")
    waiting = [state is WriteState.WAITING for state in states]
    holds(not (ended or published) or not any(waiting), "no write waits for what is there or over")
    holds(ended or published or all(waiting), "no write begins before its blocks are there")
    holds(not any(one.rank in lease.served.get(one.side, ()) for one in lease.gone), "who was served is not gone")
    waits = published and not lease.overdue
    holds(not (waits and lease.forlorn) or lease.kept_until is not None, "a forlorn lease is not kept for long")


def check_writes(
    writes: Mapping[WriteId, Write],
    leases: Mapping[TransferId, Lease],
    pulls: Mapping[PullId, PullRecord],
    timers: Timers[TimerKey],
) -> None:
    """All writes, and the pulls that they are owed to."""
    for write in writes.values():
        holds(write.id in leases[write.wanted.transfer].writes, "a write is its lease's")
        holds(write.id in pulls[write.id.pull].unnamed, "a write is not named yet")
        waits = write.state is WriteState.WAITING
        holds(waits != (WriteDue(write.id) in timers), "a write that moves has a deadline")
    unnamed = sum(len(record.unnamed) for record in pulls.values())
    holds(unnamed == len(writes), "what is not named has a write")
    for pull, record in pulls.items():
        holds(bool(record.unnamed) and KeepAliveDue(pull) in timers, "an open pull is kept alive")
