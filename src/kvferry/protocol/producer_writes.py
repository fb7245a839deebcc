"""What a producer owes: a *write* for each request of each open pull, from the pull until an answer names it.

A write goes through its table: it waits until its blocks are there, is under way, is stopped when nobody wants it any
more, is in doubt when it failed and bytes may still move. Whatever proves it quiet ends it, and not before that is it
named, as ok or err, because an upstream consumer frees its blocks on either word. When all requests of a pull are
named, the pull is finished; until then empty answers keep it alive.

What the end of a write means for its lease is counted in the lease here; whether the lease is then over, the machine
is asked (``review``).
"""

from collections.abc import Callable
from dataclasses import replace

from kvferry.errors import ProtocolReason
from kvferry.protocol.producer_events import (
    Answer,
    CancelWrite,
    Failure,
    ProducerAction,
    ProveQuiet,
    PullArrived,
    StartWrite,
    WriteFailed,
)
from kvferry.protocol.producer_leases import Leases
from kvferry.protocol.producer_records import KeepAliveDue, Lease, ProducerLimits, PullRecord, TimerKey, Write, WriteDue
from kvferry.protocol.tables import WRITE_MOVING, WRITE_TABLE, WriteState, WriteStep
from kvferry.protocol.timers import Timers
from kvferry.protocol.turn import Turn
from kvferry.protocol.values import Puller, PullId, WriteId


class Writes:
    """All writes that are not over, and the pulls that they are owed to."""

    def __init__(
        self,
        limits: ProducerLimits,
        turn: Turn[ProducerAction],
        timers: Timers[TimerKey],
        *,
        leases: Leases,
        review: Callable[[Lease], None],
    ) -> None:
        self._limits = limits
        self._turn = turn
        self._timers = timers
        self._leases = leases
        self._review = review
        self._closing = False
        self.known: dict[WriteId, Write] = {}
        self.pulls: dict[PullId, PullRecord] = {}

    @property
    def in_doubt(self) -> tuple[WriteId, ...]:
        """Writes of which it is not known whether they still move bytes."""
        return tuple(write.id for write in self.known.values() if write.state is WriteState.IN_DOUBT)

    def of(self, lease: Lease) -> list[Write]:
        """Those of one lease, as they are now: the list does not change when they do."""
        return [self.known[one] for one in lease.writes]

    def owed_to(self, pull: PullId) -> list[Write]:
        """Those of one pull; none when it is not open."""
        record = self.pulls.get(pull)
        return [self.known[one] for one in record.unnamed] if record else []

    def first_of(self, lease: Lease, puller: Puller) -> WriteId | None:
        """The write of this rank that is not over."""
        return next((one for one in lease.writes if self.known[one].puller == puller), None)

    def moving(self, lease: Lease) -> bool:
        """Whether bytes of a lease may be moving."""
        return any(self.known[write].state in WRITE_MOVING for write in lease.writes)

    # -------------------------------------------------------------------------------------------- their beginning

    def open(self, event: PullArrived) -> None:
        """Owe each request of a pull an answer."""
        record = self.pulls[event.pull] = PullRecord(event.pull)
        for one in event.requests:
            record.unnamed[WriteId(event.pull, one.request)] = None
        self._timers.set(KeepAliveDue(event.pull), self._turn.now + self._limits.keep_alive)

    def add(self, lease: Lease, write: Write) -> None:
        """Owe it; behind the write of the same rank that is not over, if there is one."""
        write.behind = self.first_of(lease, write.puller)
        if write.behind is not None:
            write.failure = Failure(write.id.request, ProtocolReason.DUPLICATE_TRANSFER)
        self.known[write.id] = write
        lease.writes[write.id] = None

    def start(self, lease: Lease, write: Write) -> None:
        """Its blocks are there."""
        if write.behind is not None:
            return
        write.failure = lease.mismatch(write.wanted)
        if write.failure is not None:
            # Not tried: the consumer that the cache is meant for may be another rank's request, or come later.
            self.end(write.id, WriteStep.REFUSE)
            return
        lease.tried.add(write.puller)
        if write.wanted.release:
            self.end(write.id, WriteStep.COUNT)
            return
        if self._step(write, WriteStep.START):
            self._timers.set(WriteDue(write.id), self._turn.now + self._limits.write_timeout)
            start = StartWrite(write.id, lease.transfer, lease.tokens, lease.tables, write.wanted)
            self._turn.emit(lease.transfer, start)

    # ------------------------------------------------------------------------------------------------- their end

    def fail(self, event: WriteFailed) -> None:
        """The engine says that it failed, which proves nothing by itself."""
        write = self.known.get(event.write)
        if write is None or write.state not in WRITE_MOVING:
            return
        write.failure = write.failure or Failure(write.id.request, event.reason, event.detail)
        if event.quiet:
            self.end(write.id, WriteStep.FAIL, landing=event.landing)
        elif self._step(write, WriteStep.DOUBT):
            self._enter_doubt(write)

    def give_up(self, write: Write, reason: ProtocolReason) -> None:
        """Nobody wants this write any more: refuse it if it has not begun, else stop it."""
        if write.behind is not None:
            return
        if write.state is WriteState.WAITING:
            write.failure = Failure(write.id.request, reason)
            self.end(write.id, WriteStep.REFUSE)
        elif self._step(write, WriteStep.STOP):
            self._enter_stopping(write, reason)

    def end(self, key: WriteId, step: WriteStep, *, landing: bool = False) -> None:
        """A write is over and quiet: name it, count it, see what that means for its lease."""
        write = self.known.get(key)
        if write is None or not self._step(write, step):
            return
        lease = self._leases.known[write.wanted.transfer]
        self._timers.cancel(WriteDue(key))
        del self.known[key]
        del lease.writes[key]
        if write.state is WriteState.SERVED:
            lease.served.setdefault(write.puller.side, set()).add(write.puller.rank)
            lease.gone.discard(write.puller)
            self.name(write, None)
        else:
            if write.puller in lease.tried and write.behind is None:
                lease.gone.add(write.puller)
            failure = write.failure or Failure(key.request, ProtocolReason.TRANSPORT_FAILED)
            self.name(write, replace(failure, landing=landing))
        for other in [one for one in lease.writes if self.known[one].behind == key]:
            self.end(other, WriteStep.REFUSE, landing=landing)
        self._leases.mind_deadline(lease)
        self._review(lease)

    def name(self, write: Write, failure: Failure | None) -> None:
        """Name a request of a pull, once; with the last one the pull is finished."""
        record = self.pulls[write.id.pull]
        del record.unnamed[write.id]
        finish = not record.unnamed
        if finish:
            del self.pulls[record.id]
            self._timers.cancel(KeepAliveDue(record.id))
        else:
            self._timers.set(KeepAliveDue(record.id), self._turn.now + self._limits.keep_alive)
        ok = () if failure else (write.id.request,)
        err = (failure,) if failure else ()
        self._turn.emit(write.wanted.transfer, Answer(record.id, ok=ok, err=err, finish=finish))

    def _enter_stopping(self, write: Write, reason: ProtocolReason) -> None:
        write.failure = Failure(write.id.request, reason)
        self._timers.set(WriteDue(write.id), self._turn.now + self._limits.stop_timeout)
        self._turn.emit(write.wanted.transfer, CancelWrite(write.id))
        self._turn.emit(write.wanted.transfer, Answer(write.id.pull, failed=(write.failure,)))

    def _enter_doubt(self, write: Write) -> None:
        wait = 0.0 if self._closing else self._limits.fence_after
        self._timers.set(WriteDue(write.id), self._turn.now + wait)
        if write.failure is not None:
            self._turn.emit(write.wanted.transfer, Answer(write.id.pull, failed=(write.failure,)))

    def _step(self, write: Write, step: WriteStep) -> bool:
        after = WRITE_TABLE.get((write.state, step))
        if after is None:
            return False
        write.state = after
        return True

    # -------------------------------------------------------------------------------------------- time, closing

    def keep_alive(self, key: KeepAliveDue) -> None:
        """A pull has had no answer for a while."""
        self._timers.set(key, self._turn.now + self._limits.keep_alive)
        self._turn.ask(Answer(key.pull))

    def due(self, write: Write) -> bool:
        """A write has been in its state for too long. True when its doubt now needs a proof."""
        if write.state is WriteState.IN_DOUBT:
            return True
        if self._step(write, WriteStep.TIME_OUT):
            if write.state is WriteState.STOPPING:
                self._enter_stopping(write, ProtocolReason.TRANSPORT_FAILED)
            else:
                self._enter_doubt(write)
        return False

    def ask_for_proof(self) -> None:
        """Ask once for all that is in doubt: whatever proves one quiet, an engine destroyed, proves all."""
        for key in self.in_doubt:
            self._timers.set(WriteDue(key), self._turn.now + self._limits.fence_after)
            self._turn.note(self.known[key].wanted.transfer, "proof asked for")
        self._turn.ask(ProveQuiet(self.in_doubt))

    def hurry(self) -> None:
        """The producer is closing: doubt waits for nothing from now on."""
        self._closing = True
        for key in self.in_doubt:
            self._timers.set(WriteDue(key), self._turn.now)
