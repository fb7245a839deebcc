"""The producer's machine: blocks that wait to be sent, who is owed them, and who may still be reading them.

Three kinds of record. A *lease* is one transfer, a *pull* is one message of a consumer rank, a *write* is what one
request of one pull is owed; the tables in ``tables`` say how leases and writes move. What holds at all times:

* A lease ends once, by done, failed, aborted or expired, at the latest at its deadline plus the time that the writes
  under way then need to settle (``write_timeout`` + ``stop_timeout`` + the fence). Its blocks are released once, when
  it has ended and none of its writes is writing, stopping or in doubt.
* No write starts unless its lease is published, and at most one ever for each (transfer, consumer rank): a pull that
  comes again, by a retry or a duplicating network, is refused, and not before the first is quiet.
* Every request of a pull is named in exactly one answer, as ok or err, and not before its write is quiet, because an
  upstream consumer frees its blocks on either word. Until then the pull is kept alive by empty answers. Where there is
  no room to keep a pull that comes again until the first is quiet, it is ignored: the first is answered. One that was
  refused for want of room stays refused, since its refusal has freed blocks.
* A lease is done when as many ranks of one side as that side expects have been served; errors do not count, ranks
  that gave up do, but then it is not done but aborted or failed.
* A transfer that is over stays over: late pulls are told how it ended, and it is not published again.
* A lease waits for its deadline only while somebody may come. Once every side that came has a rank that is lost, was
  refused or gave up, it is kept for ``lost_grace`` more, in case a router sends another consumer; once a side has been
  served in part and nothing is open, for ``side_wait``.
* Pulls may come before the scheduler speaks of a transfer. Such strangers are bounded in number and in time, and
  nothing that is known waits for them.

A failed write is *in doubt* until its completion, or an engine destroyed, proves it quiet.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from kvferry.errors import LocalProtocolError, ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol.invariants import holds
from kvferry.protocol.newest import Newest
from kvferry.protocol.producer_checks import check_lease, check_writes
from kvferry.protocol.producer_events import (
    Announced,
    Answer,
    CancelWrite,
    ConsumerLost,
    Failure,
    LeaseEnded,
    PeerAborted,
    ProducerAction,
    ProducerClosing,
    ProducerEvent,
    ProducerTick,
    ProveQuiet,
    Published,
    PullArrived,
    PulledRequest,
    PullIgnored,
    PullRefused,
    Quieted,
    ReleaseOrdered,
    SourceReleased,
    StartWrite,
    Withdrawn,
    WriteDone,
    WriteFailed,
    word_of,
)
from kvferry.protocol.producer_records import (
    KeepAliveDue,
    Lease,
    LeaseDue,
    ProducerLimits,
    PullRecord,
    TimerKey,
    Write,
    WriteDue,
)
from kvferry.protocol.story import Entry, Story
from kvferry.protocol.strangers import Strangers
from kvferry.protocol.tables import (
    LEASE_ENDED,
    LEASE_TABLE,
    WRITE_MOVING,
    WRITE_TABLE,
    LeaseState,
    LeaseStep,
    WriteState,
    WriteStep,
)
from kvferry.protocol.timers import Timers
from kvferry.protocol.values import Fate, Outcome, Puller, PullId, Ticket, WriteId

_REASONS = {LeaseStep.WITHDRAW: ProtocolReason.ABORTED, LeaseStep.TIME_OUT: ProtocolReason.EXPIRED}


class Producer:
    """One producer rank. Feed events in the order in which they happen; carry out the actions in order."""

    def __init__(self, limits: ProducerLimits | None = None, story: Story | None = None) -> None:
        self.limits = limits or ProducerLimits()
        self.story = story or Story()
        self._leases: dict[TransferId, Lease] = {}
        self._pulls: dict[PullId, PullRecord] = {}
        self._writes: dict[WriteId, Write] = {}
        self._strangers = Strangers(self.limits.strangers, self.limits.strangers_per_peer)
        self._turned_away: Newest[tuple[TransferId, Puller], ProtocolReason] = Newest(self.limits.remembered)
        self._remembered: Newest[TransferId, ProtocolReason] = Newest(self.limits.remembered)
        self._timers: Timers[TimerKey] = Timers()
        self._closing = False
        self._now = 0.0
        self._actions: list[ProducerAction] = []
        self._told: dict[TransferId, list[str]] = {}

    @property
    def next_deadline(self) -> float | None:
        """When to feed the next ``ProducerTick``."""
        return self._timers.next

    @property
    def held(self) -> tuple[Ticket, ...]:
        """Tickets whose blocks are held."""
        return tuple(lease.ticket for lease in self._leases.values() if lease.ticket is not None)

    def ticket_of(self, transfer: TransferId) -> Ticket | None:
        """The ticket whose blocks are held for a transfer."""
        lease = self._leases.get(transfer)
        return lease.ticket if lease else None

    @property
    def in_doubt(self) -> tuple[WriteId, ...]:
        """Writes of which it is not known whether they still move bytes."""
        return tuple(write.id for write in self._writes.values() if write.state is WriteState.IN_DOUBT)

    @property
    def open_pulls(self) -> int:
        """Pulls that have not had their last answer."""
        return len(self._pulls)

    def serves(self, puller: Puller, transfers: Iterable[TransferId]) -> bool:
        """Whether a pull of this rank for one of these is not over: no word that frees its blocks may be said."""
        leases = [self._leases[transfer] for transfer in transfers if transfer in self._leases]
        return any(self._first_of(lease, puller) is not None for lease in leases)

    def handle(self, event: ProducerEvent, now: float) -> tuple[ProducerAction, ...]:
        """Take in one event; what must now be done, in order."""
        self._now, self._actions, self._told = now, [], {}
        self._dispatch(event)
        for transfer, actions in self._told.items():
            lease = self._leases.get(transfer)
            state = lease.state.value if lease else ""
            self.story.add(transfer, Entry(now, type(event).__name__, state, tuple(actions)))
        return tuple(self._actions)

    def _dispatch(self, event: ProducerEvent) -> None:
        match event:
            case PullArrived():
                self._pull_arrived(event)
            case PullRefused():
                for transfer in event.transfers:
                    self._pull_refused(event.puller, transfer)
            case Published():
                self._published(event)
            case Announced():
                self._announced(event)
            case Withdrawn():
                self._withdrawn(event.transfer)
            case ReleaseOrdered():
                for transfer in event.transfers:
                    self._release_ordered(transfer)
            case WriteDone():
                self._write_ended(event.write, WriteStep.COMPLETE)
            case WriteFailed():
                self._write_failed(event)
            case Quieted():
                for write in event.writes:
                    self._write_ended(write, WriteStep.QUIET, landing=event.landing)
            case PeerAborted():
                self._peer_aborted(event)
            case ConsumerLost():
                for pull in event.pulls:
                    self._consumer_lost(pull)
            case ProducerClosing():
                self._close()
            case ProducerTick():
                self._tick()
            case _:
                assert_never(event)

    # ------------------------------------------------------------------------------------------- the scheduler

    def _announced(self, event: Announced) -> None:
        lease = self._leases.get(event.transfer)
        if lease is None:
            full = len(self._leases) >= self.limits.leases
            if event.transfer in self._remembered or self._closing or full:
                return
            lease = self._new_lease(event.transfer, event.deadline)
        if self._step_lease(lease, LeaseStep.ANNOUNCE):
            self._set_deadline(lease, event.deadline)
            self._note(event.transfer, "noted")

    def _published(self, event: Published) -> None:
        lease = self._leases.get(event.transfer)
        if lease is not None and lease.ticket is not None:
            if lease.ticket != event.ticket:
                self._give_back(event, ProtocolReason.DUPLICATE_TRANSFER)
            return
        if lease is None:
            refusal = self._no_room(event.transfer)
            if refusal is not None:
                self._give_back(event, refusal)
                return
            lease = self._new_lease(event.transfer, event.deadline)
        self._step_lease(lease, LeaseStep.PUBLISH)
        lease.ticket, lease.tokens, lease.tables = event.ticket, event.tokens, event.tables
        lease.prompt = event.prompt
        lease.deadline = event.deadline
        self._mind_deadline(lease)
        self._note(event.transfer, "published")
        for write in [self._writes[one] for one in lease.writes]:
            self._start(lease, write)  # refused meanwhile, if one before it completed the lease
        self._review(lease)

    def _no_room(self, transfer: TransferId) -> ProtocolReason | None:
        """Why a transfer may not begin now. One that is over has been answered for, and does not begin again."""
        if self._closing:
            return ProtocolReason.ABORTED
        ended = self._remembered.get(transfer)
        if ended is not None:
            served = ended is ProtocolReason.UNKNOWN_TRANSFER
            return ProtocolReason.DUPLICATE_TRANSFER if served else ended
        return ProtocolReason.LIMIT_EXCEEDED if len(self._leases) >= self.limits.leases else None

    def _give_back(self, event: Published, reason: ProtocolReason) -> None:
        fates = {ProtocolReason.ABORTED: Fate.ABORTED, ProtocolReason.EXPIRED: Fate.EXPIRED}
        fate = fates.get(reason, Fate.FAILED)
        self._emit(event.transfer, LeaseEnded(event.transfer, event.ticket, Outcome(fate, reason)))
        self._emit(event.transfer, SourceReleased(event.transfer, event.ticket))

    def _withdrawn(self, transfer: TransferId) -> None:
        lease = self._leases.get(transfer)
        if lease is not None:
            self._end(lease, LeaseStep.WITHDRAW)
        elif transfer not in self._remembered:
            self._remembered.note(transfer, ProtocolReason.ABORTED)

    def _release_ordered(self, transfer: TransferId) -> None:
        lease = self._leases.get(transfer)
        if lease is None:
            if transfer not in self._remembered:
                self._remembered.note(transfer, ProtocolReason.ABORTED)
        elif lease.state not in LEASE_ENDED:
            lease.due, lease.overdue = LeaseStep.WITHDRAW, True
            self._review(lease)

    # ------------------------------------------------------------------------------------------------ the peers

    def _pull_arrived(self, event: PullArrived) -> None:
        if event.pull in self._pulls or event.expected < 1:
            raise LocalProtocolError(
                ProtocolReason.MALFORMED, f"pull {event.pull} given twice, or expecting {event.expected} ranks"
            )
        if not event.requests or len({one.request for one in event.requests}) < len(event.requests):
            raise LocalProtocolError(ProtocolReason.MALFORMED, f"pull {event.pull} repeats a request, or has none")
        if self._closing or len(self._pulls) >= self.limits.pulls:
            self._turn_away(event)
            return
        record = self._pulls[event.pull] = PullRecord(event.pull)
        for one in event.requests:
            record.unnamed[WriteId(event.pull, one.request)] = None
        self._timers.set(KeepAliveDue(event.pull), self._now + self.limits.keep_alive)
        for one in event.requests:
            self._request_arrived(event, one)

    def _turn_away(self, event: PullArrived) -> None:
        """A pull that is not kept. What this rank has pulled already is not named: its first pull will be answered."""
        reason = ProtocolReason.ABORTED if self._closing else ProtocolReason.LIMIT_EXCEEDED
        repeated = {one.request for one in event.requests if self.serves(event.puller, [one.transfer])}
        refused = [one for one in event.requests if one.request not in repeated]
        for one in refused:
            self._turned_away.note((one.transfer, event.puller), reason)
        if refused:
            err = tuple(Failure(one.request, reason) for one in refused)
            self._actions.append(Answer(event.pull, err=err, finish=not repeated))
        if repeated:
            self._actions.append(PullIgnored(event.pull))

    def _request_arrived(self, event: PullArrived, wanted: PulledRequest) -> None:
        write = Write(WriteId(event.pull, wanted.request), wanted, event.puller)
        lease, refusal = self._lease_for(event, wanted.transfer)
        if lease is None or refusal is not None:
            if refusal is ProtocolReason.LIMIT_EXCEEDED:
                self._turned_away.note((wanted.transfer, event.puller), refusal)
            self._note(wanted.transfer, f"refused {refusal}")
            self._name(write, Failure(wanted.request, refusal or ProtocolReason.UNKNOWN_TRANSFER))
            return
        lease.expected[event.puller.side] = event.expected
        write.behind = self._first_of(lease, event.puller)
        self._writes[write.id] = write
        lease.writes[write.id] = None
        if write.behind is not None:
            write.failure = Failure(wanted.request, ProtocolReason.DUPLICATE_TRANSFER)
            self._note(wanted.transfer, "repeats a pull")
            return
        lease.gone.discard(event.puller)
        self._mind_deadline(lease)
        if lease.state is LeaseState.PUBLISHED:
            self._start(lease, write)
            self._review(lease)
        else:
            self._note(wanted.transfer, "waits")

    def _lease_for(self, event: PullArrived, transfer: TransferId) -> tuple[Lease | None, ProtocolReason | None]:
        """The lease that a pull may draw on, or why it may not."""
        lease = self._leases.get(transfer)
        refusal = self._turned_away.get((transfer, event.puller))
        if refusal is None and lease is None:
            refusal = self._remembered.get(transfer)
        if refusal is not None:
            return lease, refusal
        if lease is None:
            lease = self._new_stranger(transfer, event.puller)
            return lease, None if lease else ProtocolReason.LIMIT_EXCEEDED
        if self._first_of(lease, event.puller) is not None:
            return lease, None  # answered after the first
        return lease, lease.refusal(event.puller, event.expected, limit=self.limits.pullers)

    def _first_of(self, lease: Lease, puller: Puller) -> WriteId | None:
        """The write of this rank that is not over."""
        return next((one for one in lease.writes if self._writes[one].puller == puller), None)

    def _peer_aborted(self, event: PeerAborted) -> None:
        if event.transfer in self._remembered and event.transfer not in self._leases:
            return
        lease = self._leases.get(event.transfer) or self._new_stranger(event.transfer, event.puller)
        if lease is None or lease.state in LEASE_ENDED:
            return
        side, rank = event.puller.side, event.puller.rank
        known = rank in lease.served.get(side, ()) or rank in lease.given_up.get(side, ())
        if known or lease.pullers() >= self.limits.pullers:
            return
        lease.expected.setdefault(side, event.expected)
        lease.given_up.setdefault(side, set()).add(rank)
        self._will_not_be_served(lease, event.puller)
        lease.peer_failed = lease.peer_failed or event.failed
        self._note(event.transfer, "peer gave up")
        for write in [self._writes[one] for one in lease.writes]:
            if write.puller == event.puller:
                self._give_up(write, ProtocolReason.ABORTED)
        self._review(lease)

    def _consumer_lost(self, pull: PullId) -> None:
        record = self._pulls.get(pull)
        if record is None:
            return
        for write in [self._writes[one] for one in record.unnamed]:
            self._will_not_be_served(self._leases[write.wanted.transfer], write.puller)
            self._give_up(write, ProtocolReason.PEER_LOST)

    def _pull_refused(self, puller: Puller, transfer: TransferId) -> None:
        lease = self._leases.get(transfer)
        if lease is None or lease.state in LEASE_ENDED or self._first_of(lease, puller) is not None:
            return
        if puller.rank not in lease.served.get(puller.side, ()) and len(lease.gone) < self.limits.pullers:
            self._note(transfer, "refused by the driver")
            self._will_not_be_served(lease, puller)

    def _will_not_be_served(self, lease: Lease, puller: Puller) -> None:
        lease.gone.add(puller)
        self._mind_deadline(lease)

    # ----------------------------------------------------------------------------------------------- the writes

    def _start(self, lease: Lease, write: Write) -> None:
        if write.behind is not None:
            return
        write.failure = lease.mismatch(write.wanted)
        if write.failure is not None:
            # Not tried: the consumer that the cache is meant for may be another rank's request, or come later.
            self._write_ended(write.id, WriteStep.REFUSE)
            return
        lease.tried.add(write.puller)
        if write.wanted.release:
            self._write_ended(write.id, WriteStep.COUNT)
            return
        if self._step_write(write, WriteStep.START):
            self._timers.set(WriteDue(write.id), self._now + self.limits.write_timeout)
            start = StartWrite(write.id, lease.transfer, lease.tokens, lease.tables, write.wanted)
            self._emit(lease.transfer, start)

    def _write_failed(self, event: WriteFailed) -> None:
        write = self._writes.get(event.write)
        if write is None or write.state not in WRITE_MOVING:
            return
        write.failure = write.failure or Failure(write.id.request, event.reason, event.detail)
        if event.quiet:
            self._write_ended(write.id, WriteStep.FAIL, landing=event.landing)
        elif self._step_write(write, WriteStep.DOUBT):
            self._enter_doubt(write)

    def _give_up(self, write: Write, reason: ProtocolReason) -> None:
        """Nobody wants this write any more: refuse it if it has not begun, else stop it."""
        if write.behind is not None:
            return
        if write.state is WriteState.WAITING:
            write.failure = Failure(write.id.request, reason)
            self._write_ended(write.id, WriteStep.REFUSE)
        elif self._step_write(write, WriteStep.STOP):
            self._enter_stopping(write, reason)

    def _enter_stopping(self, write: Write, reason: ProtocolReason) -> None:
        write.failure = Failure(write.id.request, reason)
        self._timers.set(WriteDue(write.id), self._now + self.limits.stop_timeout)
        self._emit(write.wanted.transfer, CancelWrite(write.id))
        self._emit(write.wanted.transfer, Answer(write.id.pull, failed=(write.failure,)))

    def _enter_doubt(self, write: Write) -> None:
        wait = 0.0 if self._closing else self.limits.fence_after
        self._timers.set(WriteDue(write.id), self._now + wait)
        if write.failure is not None:
            self._emit(write.wanted.transfer, Answer(write.id.pull, failed=(write.failure,)))

    def _write_ended(self, key: WriteId, step: WriteStep, *, landing: bool = False) -> None:
        """A write is over and quiet: name it, count it, see what that means for its lease."""
        write = self._writes.get(key)
        if write is None or not self._step_write(write, step):
            return
        lease = self._leases[write.wanted.transfer]
        self._timers.cancel(WriteDue(key))
        del self._writes[key]
        del lease.writes[key]
        if write.state is WriteState.SERVED:
            lease.served.setdefault(write.puller.side, set()).add(write.puller.rank)
            lease.gone.discard(write.puller)
            self._name(write, None)
        else:
            if write.puller in lease.tried and write.behind is None:
                lease.gone.add(write.puller)
            failure = write.failure or Failure(key.request, ProtocolReason.TRANSPORT_FAILED)
            self._name(write, replace(failure, landing=landing))
        for other in [one for one in lease.writes if self._writes[one].behind == key]:
            self._write_ended(other, WriteStep.REFUSE, landing=landing)
        self._mind_deadline(lease)
        self._review(lease)

    def _name(self, write: Write, failure: Failure | None) -> None:
        """Name a request of a pull, once; with the last one the pull is finished."""
        record = self._pulls[write.id.pull]
        del record.unnamed[write.id]
        finish = not record.unnamed
        if finish:
            del self._pulls[record.id]
            self._timers.cancel(KeepAliveDue(record.id))
        else:
            self._timers.set(KeepAliveDue(record.id), self._now + self.limits.keep_alive)
        ok = () if failure else (write.id.request,)
        err = (failure,) if failure else ()
        self._emit(write.wanted.transfer, Answer(record.id, ok=ok, err=err, finish=finish))

    # ----------------------------------------------------------------------------------------------- the leases

    def _new_lease(self, transfer: TransferId, deadline: float) -> Lease:
        lease = self._leases[transfer] = Lease(transfer)
        self._set_deadline(lease, deadline)
        return lease

    def _new_stranger(self, transfer: TransferId, puller: Puller) -> Lease | None:
        if not self._strangers.take(puller):
            return None
        lease = self._new_lease(transfer, self._now + self.limits.stranger_wait)
        lease.stranger_of = puller
        return lease

    def _set_deadline(self, lease: Lease, deadline: float) -> None:
        lease.deadline = deadline
        self._timers.set(LeaseDue(lease.transfer), deadline)

    def _mind_deadline(self, lease: Lease) -> None:
        """How long a published lease waits for the next pull: less, once those who came will not be served."""
        if lease.state is not LeaseState.PUBLISHED or lease.overdue:
            return
        lease.mind_wait(self._now, self.limits)
        self._timers.set(LeaseDue(lease.transfer), lease.kept_until or lease.deadline)

    def _review(self, lease: Lease) -> None:
        """See whether a lease is complete, overdue, or over and quiet."""
        if self._leases.get(lease.transfer) is not lease:
            return
        if lease.state is LeaseState.PUBLISHED:
            step = lease.settled()
            if step is not None:
                self._end(lease, step)
                return
        if lease.state not in LEASE_ENDED and lease.overdue and not self._moving(lease):
            self._end(lease, lease.due)
        elif lease.state in LEASE_ENDED and not lease.writes:
            self._drop(lease)

    def _moving(self, lease: Lease) -> bool:
        return any(self._writes[write].state in WRITE_MOVING for write in lease.writes)

    def _end(self, lease: Lease, step: LeaseStep, reason: ProtocolReason | None = None) -> None:
        if not self._step_lease(lease, step):
            return
        self._timers.cancel(LeaseDue(lease.transfer))
        if step is not LeaseStep.COMPLETE:
            lease.reason = reason or _REASONS.get(step, ProtocolReason.PEER_FAILED)
        if lease.ticket is not None:
            self._emit(lease.transfer, LeaseEnded(lease.transfer, lease.ticket, lease.outcome))
        for write in [self._writes[one] for one in lease.writes]:
            if lease.reason is not None or write.state is WriteState.WAITING:
                self._give_up(write, lease.reason or ProtocolReason.UNKNOWN_TRANSFER)
        self._review(lease)

    def _drop(self, lease: Lease) -> None:
        """The lease is over and nothing reads its blocks."""
        del self._leases[lease.transfer]
        self._remembered.note(lease.transfer, lease.reason or ProtocolReason.UNKNOWN_TRANSFER)
        if lease.ticket is not None:
            self._emit(lease.transfer, SourceReleased(lease.transfer, lease.ticket))

    # -------------------------------------------------------------------------------------------- time, closing

    def _tick(self) -> None:
        doubtful = False
        while (key := self._timers.pop_due(self._now)) is not None:
            match key:
                case LeaseDue():
                    self._lease_due(self._leases[key.transfer])
                case KeepAliveDue():
                    self._timers.set(key, self._now + self.limits.keep_alive)
                    self._actions.append(Answer(key.pull))
                case WriteDue():
                    doubtful = self._write_due(self._writes[key.write]) or doubtful
                case _:
                    assert_never(key)
        if doubtful:
            self._ask_for_proof()

    def _lease_due(self, lease: Lease) -> None:
        lease.overdue = True
        self._note(lease.transfer, "due")
        self._review(lease)

    def _write_due(self, write: Write) -> bool:
        """A write has been in its state for too long. True when its doubt now needs a proof."""
        if write.state is WriteState.IN_DOUBT:
            return True
        if self._step_write(write, WriteStep.TIME_OUT):
            if write.state is WriteState.STOPPING:
                self._enter_stopping(write, ProtocolReason.TRANSPORT_FAILED)
            else:
                self._enter_doubt(write)
        return False

    def _ask_for_proof(self) -> None:
        """Ask once for all that is in doubt: whatever proves one quiet, an engine destroyed, proves all."""
        for key in self.in_doubt:
            self._timers.set(WriteDue(key), self._now + self.limits.fence_after)
            self._note(self._writes[key].wanted.transfer, "proof asked for")
        self._actions.append(ProveQuiet(self.in_doubt))

    def _close(self) -> None:
        self._closing = True
        for lease in list(self._leases.values()):
            self._end(lease, LeaseStep.FAIL, ProtocolReason.ABORTED)
        for key in self.in_doubt:
            self._timers.set(WriteDue(key), self._now)

    # ------------------------------------------------------------------------------------------------- the rest

    def _step_lease(self, lease: Lease, step: LeaseStep) -> bool:
        after = LEASE_TABLE.get((lease.state, step))
        if after is None:
            return False
        lease.state = after
        if lease.stranger_of is not None:
            self._strangers.give_back(lease.stranger_of)
            lease.stranger_of = None
        self._told.setdefault(lease.transfer, [])
        return True

    def _step_write(self, write: Write, step: WriteStep) -> bool:
        after = WRITE_TABLE.get((write.state, step))
        if after is None:
            return False
        write.state = after
        return True

    def _emit(self, transfer: TransferId, action: ProducerAction) -> None:
        self._actions.append(action)
        self._note(transfer, word_of(action))

    def _note(self, transfer: TransferId, word: str) -> None:
        self._told.setdefault(transfer, []).append(word)

    def check_invariants(self) -> None:
        """What holds between any two events; for tests. Raises ``AssertionError``."""
        for lease in self._leases.values():
            check_lease(lease, self._writes, self._timers)
        check_writes(self._writes, self._leases, self._pulls, self._timers)
        self._strangers.check(one.stranger_of for one in self._leases.values() if one.stranger_of)
        holds(len(self._pulls) <= self.limits.pulls, "pulls are bounded")
        holds(len(self._leases) <= self.limits.leases + self.limits.strangers, "leases are bounded")
        holds(len(self._timers) <= len(self._leases) + len(self._pulls) + len(self._writes), "no stray timer")
