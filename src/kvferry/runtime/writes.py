"""Writes under way: submissions watched on the loop until they are final, and after a failure until they are quiet.

Engines report by being asked: at once when a submission says that it has ended, and every now and then besides, since
not all say so. With no write under way nobody asks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvferry.runtime.loop import LoopThread
from kvferry.transport import Submission, SubmissionState

logger = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 2e-3

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class _Watched:
    submission: Submission
    on_final: Callable[[Submission, SubmissionState], None]
    on_quiet: Callable[[], None]


class Writes(Generic[_Key]):
    """The submissions of one producer, by the write that each serves."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._pending: dict[_Key, _Watched] = {}
        self._doubtful: dict[_Key, _Watched] = {}
        """Failed, and not proven quiet yet."""
        self._task: asyncio.Task[None] | None = None

    def watch(
        self,
        key: _Key,
        submission: Submission,
        *,
        on_final: Callable[[Submission, SubmissionState], None],
        on_quiet: Callable[[], None],
    ) -> None:
        """Call ``on_final`` once when it ends, and ``on_quiet`` once when a failed one turns out to be quiet."""
        self._pending[key] = _Watched(submission, on_final, on_quiet)
        submission.tell(lambda: self._thread.post(self._poll))
        if self._task is None:
            self._task = self._thread.spawn(self._ask())

    def cancel(self, key: _Key) -> None:
        """Hand nothing more of it to the engine."""
        if key in self._pending:
            self._pending[key].submission.cancel()

    def are_quiet(self, keys: Iterable[_Key]) -> bool:
        """Poll the doubtful ones now; whether none of these has anything under way. One that is pending has."""
        self.settle()
        return not any(key in self._pending or key in self._doubtful for key in keys)

    def landing(self, keys: Iterable[_Key]) -> tuple[_Key, ...]:
        """Of these, those of which bytes that have left may still land, whatever becomes of the engine here."""
        known = self._pending | self._doubtful
        return tuple(key for key in keys if key in known and not known[key].submission.destination_quiet)

    def settle(self) -> None:
        """Poll the doubtful ones now."""
        for key, watched in [*self._doubtful.items()]:
            if watched.submission.quiet:
                del self._doubtful[key]
                watched.on_quiet()

    async def _ask(self) -> None:
        while self._pending or self._doubtful:
            try:
                self._poll()
            except Exception:  # the boundary of this task, which all later writes need
                logger.exception("the end of a write could not be dealt with")
            await asyncio.sleep(LONGEST_PAUSE)
        self._task = None

    def _poll(self) -> None:
        final = [
            (key, watched, state)
            for key, watched in self._pending.items()
            if (state := watched.submission.poll()) is not SubmissionState.PENDING
        ]
        for key, watched, state in final:
            del self._pending[key]
            if state is SubmissionState.FAILED and not watched.submission.quiet:
                self._doubtful[key] = watched
            watched.on_final(watched.submission, state)
        self.settle()
