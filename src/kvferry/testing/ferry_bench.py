"""The driver of sides that live in processes of their own (:mod:`kvferry.testing.ferry_process`).

:class:`Ferry` starts a side, tells it what to do and waits for what it says. Both ends stamp their events with the
host's monotonic clock, so times of different processes can be subtracted.
"""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

from kvferry.testing.ferry_process import Spec

Event = dict[str, Any]


class Ferry:
    """One side, seen from the driver."""

    def __init__(self, spec: Spec, *, prefix: Sequence[str] = (), log: IO[bytes] | None = None) -> None:
        """``prefix``: of the command, such as that of a network namespace."""
        self.spec = spec
        self.events: list[Event] = []
        self._lines: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "kvferry.testing.ferry_process", msgspec.json.encode(spec).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log or subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait("ready", seconds=60)

    @property
    def engine(self) -> str:
        """Its engine id."""
        return self.spec.engine

    @property
    def url(self) -> str:
        """Of its bootstrap service."""
        return f"http://{self.spec.host}:{self.spec.port}"

    def tell(self, do: str, **more: object) -> float:
        """Give a command; returns when it was given."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": do, **more}) + "\n")
        stdin.flush()
        return time.monotonic()

    def wait(self, event: str, transfer: str | None = None, *, seconds: float = 20.0) -> Event:
        """The first event of this kind (about this transfer) that was not waited for before."""
        found = self.find(event, transfer, seconds=seconds)
        if found is None:
            said = [(one["event"], one.get("transfer")) for one in self.events[-5:]]
            raise TimeoutError(f"{self.spec.role}: no {event} {transfer or ''} within {seconds} s; last said: {said}")
        return found

    def find(self, event: str, transfer: str | None = None, *, seconds: float) -> Event | None:
        """The same, or ``None`` when it does not come in time."""
        deadline = time.monotonic() + seconds
        while True:
            for index, one in enumerate(self.events):
                if one["event"] == event and transfer in (None, one.get("transfer")):
                    return self.events.pop(index)
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                self._lines.put(None)
                return None
            self.events.append(line)

    def ask(self, do: str, answer: str, *, seconds: float = 30.0) -> Event:
        """A command that is answered by an event."""
        self.tell(do)
        return self.wait(answer, seconds=seconds)

    def audit(self) -> Event:
        """What it says of its blocks, bytes and resources."""
        return self.ask("audit", "audit")

    def audit_until(self, holds: Callable[[Event], bool], *, seconds: float) -> Event:
        """Audits until one holds; the last one anyway."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.audit()
            if holds(found) or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def stop(self) -> float:
        """SIGSTOP; returns when."""
        self.process.send_signal(signal.SIGSTOP)
        return time.monotonic()

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> float:
        """SIGKILL, and wait until it is gone; returns when it was sent."""
        when = time.monotonic()
        self.process.kill()
        self.process.wait()
        return when

    def close(self, *, seconds: float = 15.0) -> Event | None:
        """Let it close; its last audit. Killed when it does not end."""
        last: Event | None = None
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.resume()
                self.tell("close")
            last = self.find("closed", seconds=seconds)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        return last

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                # An engine of foreign code may print there too.
                with contextlib.suppress(json.JSONDecodeError):
                    self._lines.put(json.loads(line))
        self._lines.put(None)
