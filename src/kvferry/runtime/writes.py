"""Writes under way: submissions polled on the loop until they are final, and after a failure until they are quiet.

Engines report by being asked. One task asks, often while something is fresh and less often the longer nothing
happens; with no write under way it does not run at all.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvferry.runtime.loop import LoopThread
from kvferry.transport import Submission, SubmissionState

FIRST_PAUSE: Final = 50e-6
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
        if self._task is None:
            self._task = self._thread.spawn(self._ask())

    def cancel(self, key: _Key) -> None:
        """Hand nothing more of it to the engine."""
        if key in self._pending:
            self._pending[key].submission.cancel()

    def quieted(self) -> bool:
        """Poll the doubtful ones now; whether none is left."""
        for key, watched in [*self._doubtful.items()]:
            if watched.submission.quiet:
                del self._doubtful[key]
                watched.on_quiet()
        return not self._doubtful

    async def _ask(self) -> None:
        pause = FIRST_PAUSE
        while self._pending or self._doubtful:
            moved = self._poll()
            pause = FIRST_PAUSE if moved else min(pause * 2, LONGEST_PAUSE)
            await asyncio.sleep(pause)
        self._task = None

    def _poll(self) -> bool:
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
        self.quieted()
        return bool(final)
