"""Drives one machine: events in, actions out, a timer for its next deadline.

The machine is pure; this is the only place where it meets a clock. That clock counts no time in which this process
stood still (:mod:`kvferry.transport.awake`): just after it, peers would seem silent whose messages are still unread.

Events that arise while an action is carried out wait in the queue until the actions of the event before are all done,
so a machine never sees itself re-entered.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

from kvferry.transport.awake import LOOK_EVERY, AwakeClock

SLACK: Final = 1e-3
"""So late may a tick be: timers of the loop are no finer."""

_Event = TypeVar("_Event")
_EventIn = TypeVar("_EventIn", contravariant=True)
_Action = TypeVar("_Action")
_ActionOut = TypeVar("_ActionOut", covariant=True)


class Machine(Protocol[_EventIn, _ActionOut]):
    """What a pump drives."""

    def handle(self, event: _EventIn, now: float) -> Iterable[_ActionOut]:
        """Take an event in; what is to be done now."""

    @property
    def next_deadline(self) -> float | None:
        """When a tick is due."""


class Pump(Generic[_Event, _Action]):
    """One machine on one loop."""

    def __init__(
        self,
        machine: Machine[_Event, _Action],
        perform: Callable[[_Action], None],
        *,
        tick: _Event,
        loop: asyncio.AbstractEventLoop,
        clock: AwakeClock | None = None,
    ) -> None:
        self._machine = machine
        self._perform = perform
        self._tick = tick
        self._loop = loop
        self._clock = clock or AwakeClock()
        self._queue: deque[_Event] = deque()
        self._running = False
        self._timer: asyncio.TimerHandle | None = None
        self._waits = False
        """The machine has a deadline."""

    def now(self) -> float:
        """The clock of all deadlines and of the story of this machine."""
        return self._clock() if self._waits else self._clock.after_idling()

    def feed(self, event: _Event) -> None:
        """Hand an event to the machine and carry out what it asks for; on the loop's thread.

        A fault in one action keeps no other one from being carried out: the machine takes all of them as done, and asks
        for none again. The first fault is raised when nothing is left to do.
        """
        self._queue.append(event)
        if self._running:
            return
        self._running = True
        faults: list[Exception] = []
        try:
            while self._queue:
                for action in self._machine.handle(self._queue.popleft(), self.now()):
                    try:
                        self._perform(action)
                    except Exception as fault:  # noqa: BLE001 - raised below
                        faults.append(fault)
        finally:
            self._running = False
            self._set_timer()
        if faults:
            raise faults[0]

    def stop(self) -> None:
        """No further ticks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        due = self._machine.next_deadline
        self._waits = due is not None
        if due is None:
            self.stop()
            return
        wait = min(max(0.0, due - self.now()), LOOK_EVERY)
        if self._timer is not None and self._timer.when() <= self._loop.time() + wait + SLACK:
            return  # it comes in time; one that comes early sets the next one
        self.stop()
        self._timer = self._loop.call_later(wait, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        due = self._machine.next_deadline
        if due is not None and due > self.now():
            self._set_timer()
        else:
            self.feed(self._tick)
