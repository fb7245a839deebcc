"""What a fault is tried on: a producer and a consumer in processes of their own, and how the damage is counted.

:class:`FaultBench` starts the sides, makes the transfer that the fault hits (the *victim*), moves one more afterwards,
and adds up what nobody may ever see: wrong bytes in a request that was reported as done, bytes that landed in blocks
that had gone back, blocks that never came home, and threads or file descriptors left over.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from kvferry.ids import TransferId
from kvferry.runtime.stories import ask_stories
from kvferry.testing.ferry_bench import Event, Ferry
from kvferry.testing.ferry_process import Spec
from kvferry.testing.ports import free_port

VICTIM = "victim"
SLACK = min(32, (os.cpu_count() or 1) + 4)
"""File descriptors and threads by which two audits of a healthy side differ: a loop's pool for blocking calls grows, up
to so many threads (``ThreadPoolExecutor``), when many are made at once, and keeps them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, and what came of it."""

    fault: str
    means: str
    transport: str
    phase: str
    producer: str
    consumer: str
    noticed: float | None
    """Seconds until a side reported; ``None`` where there was nothing to notice."""
    back: float | None
    """Seconds until the blocks of both living sides were back."""
    wrong: int
    lost: int
    leaked: int
    problems: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Nothing was lost and nothing was late."""
        return not (self.wrong or self.lost or self.leaked or self.problems)


@dataclass(slots=True)
class Seen:
    """What was observed while the fault lasted."""

    phase: str = ""
    producer: str = ""
    consumer: str = ""
    noticed: float | None = None
    back: float | None = None
    problems: list[str] = field(default_factory=list)


class FaultBench:
    """Two sides and their accounts."""

    def __init__(
        self,
        transport: str,
        *,
        large: bool = False,
        timing: dict[str, float] | None = None,
        limits: dict[str, float] | None = None,
        producer_limits: dict[str, float] | None = None,
        hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.transport = transport
        self.tokens = 2048 if large else 200
        self.folder = tempfile.mkdtemp(prefix="kvferry-faults-")
        self.debug = str(Path(self.folder) / "debug")
        self.hosts, self.prefix = hosts, prefix
        base = Spec(role="producer", transport=transport, large=large, debug_dir=self.debug, timing=timing or {})
        self._producer = _with(
            base, layers=4 if large else 2, port=free_port(hosts[0]) if not prefix else 18_998, blocks=512,
            host=hosts[0], limits=producer_limits or {},
        )  # fmt: skip
        self._consumer = _with(
            base, role="consumer", engine="d", layers=4 if large else 2, block_tokens=32, blocks=256, host=hosts[1],
            limits=limits or {},
        )  # fmt: skip
        if prefix:
            self._producer = _with(self._producer, write_targets=(f"{hosts[1]}/32",))
        self._log = (Path(self.folder) / "log").open("wb")
        self._ferries: list[Ferry] = []
        self._before: dict[str, Event] = {}
        self._serial = 0
        self._count = {"wrong": 0, "lost": 0, "leaked": 0}
        self.problems: list[str] = []
        self.producer = self.start_producer()
        self.consumer = self.start_consumer()
        self.url = self.producer.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ferry in self._ferries:
            with contextlib.suppress(Exception):
                ferry.process.kill()
            with contextlib.suppress(Exception):
                ferry.close()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- the sides -------------------------------------------------------------------------------------------

    def start_producer(self, **changes: object) -> Ferry:
        """A (new) producer at the producer's place."""
        return self._start(_with(self._producer, **changes), prefix=self.prefix)

    def start_consumer(self, **changes: object) -> Ferry:
        """A (new) consumer."""
        return self._start(_with(self._consumer, **changes), prefix=())

    def _start(self, spec: Spec, *, prefix: tuple[str, ...]) -> Ferry:
        ferry = Ferry(spec, prefix=prefix, log=self._log)
        self._ferries.append(ferry)
        return ferry

    # -- transfers -------------------------------------------------------------------------------------------

    def publish(self, transfer: str = VICTIM, *, salt: int = 7, tokens: int | None = None) -> float:
        """Let the producer publish."""
        return self.producer.tell("publish", transfer=transfer, tokens=tokens or self.tokens, salt=salt)

    def fetch(
        self, transfer: str = VICTIM, *, salt: int = 7, tokens: int | None = None, url: str | None = None
    ) -> float:
        """Let the consumer fetch."""
        source = ["p", url or self.url]
        return self.consumer.tell("fetch", transfer=transfer, tokens=tokens or self.tokens, salt=salt, source=source)

    def move(self, *, seconds: float = 30.0) -> Event:
        """One whole transfer, which must be done, with all blocks back."""
        self._serial += 1
        name = f"good-{self._serial}"
        self.publish(name, salt=self._serial)
        self.fetch(name, salt=self._serial)
        end = self.consumer.wait("ended", name, seconds=seconds)
        if end["fate"] != "done":
            self.problems.append(f"the transfer after the fault: {end['fate']} {end['reason']} {end['detail']}")
        self.consumer.wait("quiet", name, seconds=seconds)
        self.producer.wait("quiet", name, seconds=seconds)
        return end

    def warm(self) -> None:
        """One transfer before the fault, and the accounts as they then are."""
        self.move()
        self._before = {ferry.spec.role: ferry.audit() for ferry in (self.producer, self.consumer)}

    def ended(self, since: float, seen: Seen, *, seconds: float = 30.0, transfer: str = VICTIM) -> Event:
        """Wait for the consumer's word on the victim, and until its blocks are back."""
        end = self.consumer.wait("ended", transfer, seconds=seconds)
        seen.consumer = f"{end['fate']} {end['reason']}".strip()
        seen.noticed = max(0.0, end["at"] - since)
        quiet = self.consumer.wait("quiet", transfer, seconds=seconds)
        seen.back = max(seen.back or 0.0, quiet["at"] - since)
        return end

    def producer_back(self, since: float, seen: Seen, *, seconds: float = 30.0, transfer: str = VICTIM) -> None:
        """Wait until the producer has the victim's blocks back, and note what it says of it."""
        quiet = self.producer.wait("quiet", transfer, seconds=seconds)
        seen.back = max(seen.back or 0.0, quiet["at"] - since)
        seen.producer = self.said("producer", transfer)

    def said(self, side: str, transfer: str = VICTIM) -> str:
        """The last end that this side's story tells of a transfer."""
        for answer in ask_stories(self.debug, TransferId(transfer)):
            ends = [word for event in answer.events for word in event.actions if word.startswith("ended ")]
            if answer.side == side and ends:
                return ends[-1].removeprefix("ended ")
        return "not told"

    def said_event(self, side: str, event: str, transfer: str = VICTIM) -> bool:
        """Whether this side's story of a transfer has such an event."""
        answers = ask_stories(self.debug, TransferId(transfer))
        return any(one.event == event for answer in answers if answer.side == side for one in answer.events)

    # -- the accounts ----------------------------------------------------------------------------------------

    def settle(self, ferry: Ferry, *, seconds: float = 20.0) -> Event:
        """The last audit of a living side: everything must be home."""
        role = ferry.spec.role
        before = self._before.get(role)

        def home(found: Event) -> bool:
            return found["free"] == found["total"] and (before is None or _extra(before, found) == 0)

        found = ferry.audit_until(home, seconds=seconds)
        self._count["wrong"] += found["wrong"] + found["stray"]
        self._count["lost"] += found["total"] - found["free"]
        if before is not None:
            self._count["leaked"] += _extra(before, found)
        return found

    def row(self, fault: str, means: str, seen: Seen) -> Row:
        """Settle both sides, and sum up."""
        for ferry in (self.producer, self.consumer):
            if ferry.process.poll() is None:
                self.settle(ferry)
        problems = (*self.problems, *seen.problems)
        return Row(
            fault, means, self.transport, seen.phase, seen.producer or "nothing to report",
            seen.consumer or "nothing to report", seen.noticed, seen.back, problems=problems, **self._count,
        )  # fmt: skip


def _extra(before: Event, after: Event) -> int:
    """Threads and file descriptors more than before, beyond what a healthy side varies by."""
    return sum(max(0, int(after[key]) - int(before[key]) - SLACK) for key in ("threads", "fds"))


def _with(spec: Spec, **changes: object) -> Spec:
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return Spec(**{**fields, **changes})


def wait_until(holds: Callable[[], bool], *, seconds: float) -> bool:
    """Poll; whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
