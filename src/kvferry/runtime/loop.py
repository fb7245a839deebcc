"""One thread with one asyncio loop, and the only ways into it.

Everything that a runtime owns is touched on its loop alone, so nothing there needs a lock. Other threads hand in
plain calls with :meth:`LoopThread.post` and never wait, or wait for a coroutine with :meth:`LoopThread.run`.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class LoopThread:
    """A running event loop in a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Callable[..., object], *args: object) -> bool:
        """Run ``call`` on the loop soon; says whether the loop still takes calls."""
        try:
            self.loop.call_soon_threadsafe(self._guarded, call, args)
        except RuntimeError:
            return False
        return True

    def run(self, coroutine: Coroutine[Any, Any, _T], *, timeout: float | None = None) -> _T:
        """Run a coroutine on the loop and wait here for its result. Never called on the loop itself."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def belong(self, enter: Callable[[], None]) -> None:
        """Call ``enter`` in this thread now, and first in every thread that blocking calls are handed to.

        For what is kept for each thread, like the device that is current. Called on the loop.
        """
        enter()
        self.loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=self._thread.name, initializer=enter))

    def spawn(self, coroutine: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Start a task that this loop owns; called on the loop. A task that dies is logged, never lost."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def close(self, *, timeout: float = 5.0) -> None:
        """Cancel what still runs and end the thread; safe to call twice."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: a task failed", self._thread.name, exc_info=error)

    def _guarded(self, call: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            call(*args)
        except Exception:  # the boundary of this thread: a bug in one call must not end all transfers silently
            logger.exception("%s: a call failed", self._thread.name)
