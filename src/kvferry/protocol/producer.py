"""The producer's machine: blocks that wait to be sent, who is owed them, and who may still be reading them.

Three kinds of record, a module for each. A *lease* is one transfer (``producer_leases``), a *pull* is one message of a
consumer rank (``producer_pulls``), a *write* is what one request of one pull is owed (``producer_writes``); the tables
in ``tables`` say how leases and writes move. Here events are taken in, and it is decided when a lease is over. What
holds at all times:

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
from typing import assert_never

from kvferry.errors import ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol.invariants import holds
from kvferry.protocol.producer_checks import check_lease, check_writes
from kvferry.protocol.producer_events import (
    Announced,
    ConsumerLost,
    LeaseEnded,
    PeerAborted,
    ProducerAction,
    ProducerClosing,
    ProducerEvent,
    ProducerTick,
    Published,
    PullArrived,
    PullRefused,
    Quieted,
    ReleaseOrdered,
    SourceReleased,
    Withdrawn,
    WriteDone,
    WriteFailed,
    word_of,
)
from kvferry.protocol.producer_leases import Leases
from kvferry.protocol.producer_pulls import Pulls
from kvferry.protocol.producer_records import KeepAliveDue, Lease, LeaseDue, ProducerLimits, TimerKey, WriteDue
from kvferry.protocol.producer_writes import Writes
from kvferry.protocol.story import Entry, Story
from kvferry.protocol.tables import LEASE_ENDED, LeaseState, LeaseStep, WriteState, WriteStep
from kvferry.protocol.timers import Timers
from kvferry.protocol.turn import Turn
from kvferry.protocol.values import Fate, Outcome, Puller, PullId, Ticket, WriteId


class Producer:
    """One producer rank. Feed events in the order in which they happen; carry out the actions in order."""

    def __init__(self, limits: ProducerLimits | None = None, story: Story | None = None) -> None:
        self.limits = limits or ProducerLimits()
        self.story = story or Story()
        self._timers: Timers[TimerKey] = Timers()
        self._turn: Turn[ProducerAction] = Turn(word_of)
        self._leases = Leases(self.limits, self._turn, self._timers)
        self._writes = Writes(self.limits, self._turn, self._timers, leases=self._leases, review=self._review)
        self._pulls = Pulls(self.limits, self._turn, leases=self._leases, writes=self._writes, review=self._review)
        self._closing = False

    @property
    def next_deadline(self) -> float | None:
        """When to feed the next ``ProducerTick``."""
        return self._timers.next

    @property
    def held(self) -> tuple[Ticket, ...]:
        """Tickets whose blocks are held."""
        return tuple(lease.ticket for lease in self._leases.known.values() if lease.ticket is not None)

    def ticket_of(self, transfer: TransferId) -> Ticket | None:
        """The ticket whose blocks are held for a transfer."""
        lease = self._leases.get(transfer)
        return lease.ticket if lease else None

    @property
    def in_doubt(self) -> tuple[WriteId, ...]:
        """Writes of which it is not known whether they still move bytes."""
        return self._writes.in_doubt

    @property
    def open_pulls(self) -> int:
        """Pulls that have not had their last answer."""
        return len(self._writes.pulls)

    def serves(self, puller: Puller, transfers: Iterable[TransferId]) -> bool:
        """Whether a pull of this rank for one of these is not over: no word that frees its blocks may be said."""
        return self._pulls.serves(puller, transfers)

    def handle(self, event: ProducerEvent, now: float) -> tuple[ProducerAction, ...]:
        """Take in one event; what must now be done, in order."""
        self._turn.begin(now)
        self._dispatch(event)
        for transfer, words in self._turn.told.items():
            lease = self._leases.get(transfer)
            state = lease.state.value if lease else ""
            self.story.add(transfer, Entry(now, type(event).__name__, state, tuple(words)))
        return tuple(self._turn.actions)

    def _dispatch(self, event: ProducerEvent) -> None:
        match event:
            case PullArrived():
                self._pulls.arrive(event, closing=self._closing)
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
                self._writes.end(event.write, WriteStep.COMPLETE)
            case WriteFailed():
                self._writes.fail(event)
            case Quieted():
                for write in event.writes:
                    self._writes.end(write, WriteStep.QUIET, landing=event.landing)
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
            if event.transfer in self._leases.over or self._closing or self._leases.full:
                return
            lease = self._leases.begin(event.transfer, event.deadline)
        if self._leases.step(lease, LeaseStep.ANNOUNCE):
            self._leases.set_deadline(lease, event.deadline)
            self._turn.note(event.transfer, "noted")

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
            lease = self._leases.begin(event.transfer, event.deadline)
        self._leases.step(lease, LeaseStep.PUBLISH)
        lease.ticket, lease.tokens, lease.tables = event.ticket, event.tokens, event.tables
        lease.prompt = event.prompt
        lease.deadline = event.deadline
        self._leases.mind_deadline(lease)
        self._turn.note(event.transfer, "published")
        for write in self._writes.of(lease):
            self._writes.start(lease, write)  # refused meanwhile, if one before it completed the lease
        self._review(lease)

    def _no_room(self, transfer: TransferId) -> ProtocolReason | None:
        """Why a transfer may not begin now. One that is over has been answered for, and does not begin again."""
        if self._closing:
            return ProtocolReason.ABORTED
        ended = self._leases.over.get(transfer)
        if ended is not None:
            served = ended is ProtocolReason.UNKNOWN_TRANSFER
            return ProtocolReason.DUPLICATE_TRANSFER if served else ended
        return ProtocolReason.LIMIT_EXCEEDED if self._leases.full else None

    def _give_back(self, event: Published, reason: ProtocolReason) -> None:
        fates = {ProtocolReason.ABORTED: Fate.ABORTED, ProtocolReason.EXPIRED: Fate.EXPIRED}
        fate = fates.get(reason, Fate.FAILED)
        self._turn.emit(event.transfer, LeaseEnded(event.transfer, event.ticket, Outcome(fate, reason)))
        self._turn.emit(event.transfer, SourceReleased(event.transfer, event.ticket))

    def _withdrawn(self, transfer: TransferId) -> None:
        lease = self._leases.get(transfer)
        if lease is not None:
            self._end(lease, LeaseStep.WITHDRAW)
        else:
            self._leases.never(transfer)

    def _release_ordered(self, transfer: TransferId) -> None:
        lease = self._leases.get(transfer)
        if lease is None:
            self._leases.never(transfer)
        elif lease.state not in LEASE_ENDED:
            lease.due, lease.overdue = LeaseStep.WITHDRAW, True
            self._review(lease)

    # ------------------------------------------------------------------------------------------------ the peers

    def _peer_aborted(self, event: PeerAborted) -> None:
        if event.transfer in self._leases.over and self._leases.get(event.transfer) is None:
            return
        lease = self._leases.get(event.transfer) or self._leases.begin_stranger(event.transfer, event.puller)
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
        self._turn.note(event.transfer, "peer gave up")
        for write in self._writes.of(lease):
            if write.puller == event.puller:
                self._writes.give_up(write, ProtocolReason.ABORTED)
        self._review(lease)

    def _consumer_lost(self, pull: PullId) -> None:
        for write in self._writes.owed_to(pull):
            self._will_not_be_served(self._leases.known[write.wanted.transfer], write.puller)
            self._writes.give_up(write, ProtocolReason.PEER_LOST)

    def _pull_refused(self, puller: Puller, transfer: TransferId) -> None:
        lease = self._leases.get(transfer)
        if lease is None or lease.state in LEASE_ENDED or self._writes.first_of(lease, puller) is not None:
            return
        if puller.rank not in lease.served.get(puller.side, ()) and len(lease.gone) < self.limits.pullers:
            self._turn.note(transfer, "refused by the driver")
            self._will_not_be_served(lease, puller)

    def _will_not_be_served(self, lease: Lease, puller: Puller) -> None:
        lease.gone.add(puller)
        self._leases.mind_deadline(lease)

    # ------------------------------------------------------------------------------------------------- their end

    def _review(self, lease: Lease) -> None:
        """See whether a lease is complete, overdue, or over and quiet."""
        if self._leases.get(lease.transfer) is not lease:
            return
        if lease.state is LeaseState.PUBLISHED:
            step = lease.settled()
            if step is not None:
                self._end(lease, step)
                return
        if lease.state not in LEASE_ENDED and lease.overdue and not self._writes.moving(lease):
            self._end(lease, lease.due)
        elif lease.state in LEASE_ENDED and not lease.writes:
            self._leases.drop(lease)

    def _end(self, lease: Lease, step: LeaseStep, reason: ProtocolReason | None = None) -> None:
        """It is over: report it, and give up what is still owed for it."""
        if not self._leases.end(lease, step, reason):
            return
        for write in self._writes.of(lease):
            if lease.reason is not None or write.state is WriteState.WAITING:
                self._writes.give_up(write, lease.reason or ProtocolReason.UNKNOWN_TRANSFER)
        self._review(lease)

    # -------------------------------------------------------------------------------------------- time, closing

    def _tick(self) -> None:
        doubtful = False
        while (key := self._timers.pop_due(self._turn.now)) is not None:
            match key:
                case LeaseDue():
                    self._lease_due(self._leases.known[key.transfer])
                case KeepAliveDue():
                    self._writes.keep_alive(key)
                case WriteDue():
                    doubtful = self._writes.due(self._writes.known[key.write]) or doubtful
                case _:
                    assert_never(key)
        if doubtful:
            self._writes.ask_for_proof()

    def _lease_due(self, lease: Lease) -> None:
        lease.overdue = True
        self._turn.note(lease.transfer, "due")
        self._review(lease)

    def _close(self) -> None:
        self._closing = True
        for lease in list(self._leases.known.values()):
            self._end(lease, LeaseStep.FAIL, ProtocolReason.ABORTED)
        self._writes.hurry()

    def check_invariants(self) -> None:
        """What holds between any two events; for tests. Raises ``AssertionError``."""
        leases, writes, pulls = self._leases.known, self._writes.known, self._writes.pulls
        for lease in leases.values():
            check_lease(lease, writes, self._timers)
        check_writes(writes, leases, pulls, self._timers)
        self._leases.check()
        holds(len(pulls) <= self.limits.pulls, "pulls are bounded")
        holds(len(self._timers) <= len(leases) + len(pulls) + len(writes), "no stray timer")
