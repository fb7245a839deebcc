"""The fetches of a consumer: transfers from the order until their blocks are back, and the tickets that stand for them.

A fetch ends once and reports at once; its blocks go back when it is over *and* quiet. Between the two they are in
quarantine, and counted. Whether a fetch is over, and what its pulls are at, is decided elsewhere
(:mod:`kvferry.protocol.consumer`, :mod:`kvferry.protocol.consumer_pulls`); here is the book of it.
"""

from collections.abc import Iterable
from typing import Final

from kvferry.errors import ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol.consumer_events import ConsumerAction, DestinationReleased, FetchEnded, Resolve
from kvferry.protocol.consumer_records import ConsumerLimits, Fetch, FetchDue, TimerKey
from kvferry.protocol.tables import FETCH_ENDED, FETCH_TABLE, PULL_MOVING, FetchState, FetchStep, PullState
from kvferry.protocol.timers import Timers
from kvferry.protocol.turn import Turn
from kvferry.protocol.values import DONE, Fate, Outcome, Ticket

_FATES: Final = {FetchStep.FAIL: Fate.FAILED, FetchStep.ABORT: Fate.ABORTED, FetchStep.TIME_OUT: Fate.EXPIRED}


class Fetches:
    """Those that are known."""

    def __init__(self, limits: ConsumerLimits, turn: Turn[ConsumerAction], timers: Timers[TimerKey]) -> None:
        self._limits = limits
        self._turn = turn
        self._timers = timers
        self.known: dict[TransferId, Fetch] = {}
        self.tickets: dict[Ticket, TransferId] = {}
        self.quarantined = 0
        """Blocks held although their fetch is over."""

    @property
    def full(self) -> bool:
        """Whether there may be no other."""
        return len(self.known) >= self._limits.fetches

    def get(self, transfer: TransferId) -> Fetch | None:
        """The fetch of a transfer, while it is known."""
        return self.known.get(transfer)

    def begin(self, fetch: Fetch) -> None:
        """Look for its producer."""
        if fetch.ticket is not None:
            self.tickets[fetch.ticket] = fetch.transfer
        self.known[fetch.transfer] = fetch
        self._timers.set(FetchDue(fetch.transfer), fetch.deadline)
        self._turn.emit(fetch.transfer, Resolve(fetch.transfer, fetch.request, fetch.ticket, fetch.source))

    def step(self, fetch: Fetch, step: FetchStep) -> bool:
        """Whether its table has this step; if so it is taken."""
        after = FETCH_TABLE.get((fetch.state, step))
        if after is None:
            return False
        fetch.state = after
        self._turn.changed(fetch.transfer)
        return True

    def end(self, fetch: Fetch, step: FetchStep, reason: ProtocolReason, detail: str = "") -> bool:
        """Report that it is over without being served, if it is not over already; its blocks go into quarantine."""
        if not self.step(fetch, step):
            return False
        self._timers.cancel(FetchDue(fetch.transfer))
        self.quarantined += fetch.blocks
        self._report(fetch, Outcome(_FATES[step], reason, detail))
        return True

    def review(self, fetch: Fetch) -> None:
        """See whether a fetch is served, or over and quiet."""
        if self.known.get(fetch.transfer) is not fetch:
            return
        states = {pull.state for pull in fetch.pulls.values()}
        if states == {PullState.SERVED} and self.step(fetch, FetchStep.COMPLETE):
            self._timers.cancel(FetchDue(fetch.transfer))
            self._report(fetch, DONE)
        if fetch.state in FETCH_ENDED and not states & PULL_MOVING:
            del self.known[fetch.transfer]
            self.quarantined -= 0 if fetch.state is FetchState.DONE else fetch.blocks
            if fetch.ticket is not None:
                del self.tickets[fetch.ticket]
                self._turn.emit(fetch.transfer, DestinationReleased(fetch.transfer, fetch.ticket))

    def _report(self, fetch: Fetch, outcome: Outcome) -> None:
        if fetch.ticket is not None:
            self._turn.emit(fetch.transfer, FetchEnded(fetch.transfer, fetch.request, fetch.ticket, outcome))

    def all(self) -> Iterable[Fetch]:
        """As they are now: the list does not change when they end."""
        return list(self.known.values())
