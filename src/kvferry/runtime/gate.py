"""Holds calls back until a device has got far enough, in the order in which they came.

Caches are read and written by engines that know nothing of a device's streams. So a publication may only be served
once the device has computed it, and a fetch may only begin once the device has finished with what its blocks held
before. Whoever embeds a runtime says so with a :data:`Ready`; the gate asks it on the runtime's loop, never on the
thread of the device's user, and lets the call through. Later calls wait behind earlier ones: a cancellation never
overtakes what it cancels. Calls that wait for nothing find the gate open.

A device may fail instead. Then what waits for it never happens, and whoever handed it in is told by another call: a
fetch that has asked for nothing yet, or a publication that nobody has read, ends at once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry.runtime.loop import LoopThread

logger = logging.getLogger(__name__)

FIRST_PAUSE: Final = 50e-6
LONGEST_PAUSE: Final = 1e-3

Ready = Callable[[], bool]
"""Whether the device has got there. Cheap, never waits, and once true it stays so; raises when it never will."""
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Waiting:
    ready: Ready | None
    call: Call
    otherwise: Call


class Gate:
    """The calls of one runtime that wait for a device. Used on its loop only."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._waiting: deque[_Waiting] = deque()
        self._asking = False
        self._told = False

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, ready: Ready | None, call: Call, *, otherwise: Call | None = None) -> None:
        """Make the call now, or when ``ready`` says so and all earlier ones are through.

        ``otherwise``: made in its place when the device fails.
        """
        new = _Waiting(ready, call, otherwise or _nothing)
        if not self._waiting and (chosen := self._chosen(new)) is not None:
            chosen()
            return
        self._waiting.append(new)
        if not self._asking:
            self._asking = True
            self._thread.spawn(self._ask())

    def open(self) -> None:
        """Let all through at once: for the end, when nothing starts any more and each call is refused."""
        while self._waiting:
            self._pass(self._waiting[0].call)

    async def _ask(self) -> None:
        pause = FIRST_PAUSE
        while self._waiting:
            if (chosen := self._chosen(self._waiting[0])) is not None:
                self._pass(chosen)
                pause = FIRST_PAUSE
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        self._asking = False

    def _chosen(self, waiting: _Waiting) -> Call | None:
        """What is to be done now; ``None`` while the device is at work."""
        try:
            return waiting.call if waiting.ready is None or waiting.ready() else None
        except Exception:  # a device that fails, in whatever way its library says so
            if not self._told:
                logger.exception("the device failed: what waits for it is given up (this is said once)")
            self._told = True
            return waiting.otherwise

    def _pass(self, call: Call) -> None:
        self._waiting.popleft()
        try:
            call()
        except Exception:  # as for every call that is handed to the loop
            logger.exception("a call that had waited for the device failed")


def _nothing() -> None:
    """Nobody is to be told."""
