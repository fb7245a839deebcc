"""Fetches that may be tried again with another producer: between the machine, which knows nothing of it, and the
embedding engine.

The router may name *alternatives*: producers that have computed the same prompt. When a fetch fails, the engine is not
told yet. Its blocks are those of the next attempt, so that one begins only when nothing can be written into them any
more, which the machine says by releasing them; when it does not say so within ``grace`` seconds the failure is told as
it is. Each alternative is tried once, in order, at most ``limit`` of them; a fetch that has reached its deadline, or
that the engine has cancelled, is not tried again. What was not used is released at the end, so that its producers do
not keep it until it expires.

Every attempt is a transfer of its own, with a line, a story and a count of its own.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvferry.errors import ProtocolReason
from kvferry.protocol import Fate, FetchEnded, Outcome, Ticket
from kvferry.runtime.fetches import Alternative, Fetch


@dataclass(slots=True)
class _Trial:
    fetch: Fetch
    """The attempt that is under way, or that has failed last."""
    left: list[Alternative]
    deadline: float
    failure: FetchEnded | None = None
    """How the last attempt ended, while its blocks are not quiet."""
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A fetch to begin now."""

    fetch: Fetch
    deadline: float


class Retries:
    """The fetches of one consumer rank for which there are alternatives. Used on its loop only."""

    def __init__(
        self,
        limit: int,
        *,
        grace: float,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        report: Callable[[FetchEnded], None],
    ) -> None:
        self._limit = limit
        self._clock = clock
        """Of the attempts' deadlines."""
        self._grace = grace
        self._loop = loop
        self._report = report
        """Tells the engine of an end that was held back in vain."""
        self._trials: dict[Ticket, _Trial] = {}
        self._closing = False

    def begin(self, attempt: Attempt) -> None:
        """Remember a first attempt."""
        fetch = attempt.fetch
        if fetch.alternatives:
            self._trials.setdefault(fetch.ticket, _Trial(fetch, [*fetch.alternatives], attempt.deadline))

    def next_after(self, ended: FetchEnded) -> Alternative | None:
        """Who is tried next: then the engine is not to be told of this end. ``None``: it is."""
        trial = self._trials.get(ended.ticket)
        if trial is None or self._closing or ended.transfer != trial.fetch.transfer:
            return None
        tried = len(trial.fetch.alternatives) - len(trial.left)
        if ended.outcome.fate is not Fate.FAILED or not trial.left or tried >= self._limit:
            return None
        if self._clock() >= trial.deadline:
            return None
        trial.failure = ended
        trial.timer = self._loop.call_later(self._grace, self._give_up, ended.ticket)
        return trial.left[0]

    def quiet(self, ticket: Ticket) -> Attempt | None:
        """Nothing writes into these blocks any more: the attempt that they are used for now, if there is one."""
        trial = self._trials.get(ticket)
        if trial is None or trial.failure is None:
            return None
        self._stop_waiting(trial)
        chosen = trial.left.pop(0)
        trial.fetch = replace(trial.fetch, transfer=chosen.transfer, source=chosen.source)
        return Attempt(trial.fetch, trial.deadline)

    def cancel(self, ticket: Ticket) -> FetchEnded | None:
        """The engine wants no more: how a fetch ends that is between two attempts."""
        trial = self._trials.get(ticket)
        if trial is None or trial.failure is None:
            return None
        return replace(trial.failure, outcome=Outcome(Fate.ABORTED, ProtocolReason.ABORTED))

    def over(self, ticket: Ticket) -> tuple[Alternative, ...]:
        """The engine is told of the end: what was not used, and is now to be released."""
        trial = self._trials.pop(ticket, None)
        if trial is None:
            return ()
        self._stop_waiting(trial)
        return tuple(trial.left)

    def close(self) -> None:
        """Nothing is tried any more; failures that were held back are told."""
        self._closing = True
        for ticket in [*self._trials]:
            self._give_up(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        trial = self._trials.get(ticket)
        if trial is not None and trial.failure is not None:
            self._report(trial.failure)

    @staticmethod
    def _stop_waiting(trial: _Trial) -> None:
        trial.failure = None
        if trial.timer is not None:
            trial.timer.cancel()
            trial.timer = None
