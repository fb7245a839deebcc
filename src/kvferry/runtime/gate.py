"""Holds calls back until a device has got far enough, in the order in which they came.

Caches are read and written by engines that know nothing of a device's streams. So a publication may only be served
once the device has computed it, and a fetch may only begin once the device has finished with what its blocks held
before. Whoever embeds a runtime says so with a :data:`Ready`; the gate asks it on the runtime's loop, never on the
thread of the device's user, and lets the call through. Later calls wait behind earlier ones: a cancellation never
overtakes what it cancels. Calls that wait for nothing find the gate open.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from kvferry.runtime.loop import LoopThread

logger = logging.getLogger(__name__)

FIRST_PAUSE: Final = 50e-6
LONGEST_PAUSE: Final = 1e-3

Ready = Callable[[], bool]
"""Whether the device has got there. Cheap, never waits, and once true it stays so."""
Call = Callable[[], object]


class Gate:
    """The calls of one runtime that wait for a device. Used on its loop only."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._waiting: deque[tuple[Ready | None, Call]] = deque()
        self._asking = False

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, ready: Ready | None, call: Call) -> None:
        """Make the call now, or when ``ready`` says so and all earlier ones are through."""
        if not self._waiting and (ready is None or ready()):
            call()
            return
        self._waiting.append((ready, call))
        if not self._asking:
            self._asking = True
            self._thread.spawn(self._ask())

    def open(self) -> None:
        """Let all through at once: for the end, when nothing starts any more and each call is refused."""
        while self._waiting:
            self._pass()

    async def _ask(self) -> None:
        pause = FIRST_PAUSE
        while self._waiting:
            if self._is_ready():
                self._pass()
                pause = FIRST_PAUSE
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        self._asking = False

    def _is_ready(self) -> bool:
        ready, _ = self._waiting[0]
        if ready is None:
            return True
        try:
            return ready()
        except Exception:  # a device that fails: what waits for it never happens, and its blocks stay held
            logger.exception("the device does not say whether it is done; what waits for it is dropped")
            self._waiting.popleft()
            return False

    def _pass(self) -> None:
        _, call = self._waiting.popleft()
        try:
            call()
        except Exception:  # as for every call that is handed to the loop
            logger.exception("a call that had waited for the device failed")
