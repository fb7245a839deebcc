"""Links that are slow, go down, or lead nowhere: a network namespace for the producer, joined by a veth pair.

Needs root and ``ip``. Where either is missing the rows are skipped by name. Addresses are of the benchmark range
198.18.0.0/15, which no real network uses.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.testing.fault_bench import VICTIM, FaultBench, Row, Seen
from kvferry.testing.faults.processes import PATIENT


def missing() -> str | None:
    """Why namespaces cannot be used here; ``None`` when they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no ip and tc commands (iproute2)"
    if os.geteuid() != 0:
        return "needs root"
    probe = subprocess.run(["ip", "netns", "add", "kvf-probe"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"ip netns: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "kvf-probe"], check=False)
    return None


def _ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Namespace:
    """One namespace with a link to this one."""

    def __init__(self, number: int) -> None:
        self.name, self.inner, self.outer = f"kvf{number}", f"kvfi{number}", f"kvfo{number}"
        self.here, self.there = f"198.18.{number}.1", f"198.18.{number}.2"

    def __enter__(self) -> "Namespace":
        _ip("ip", "netns", "add", self.name)
        _ip("ip", "link", "add", self.outer, "type", "veth", "peer", "name", self.inner, "netns", self.name)
        _ip("ip", "addr", "add", f"{self.here}/30", "dev", self.outer)
        _ip("ip", "link", "set", self.outer, "up")
        self.inside("ip", "addr", "add", f"{self.there}/30", "dev", self.inner)
        self.inside("ip", "link", "set", self.inner, "up")
        self.inside("ip", "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.outer], check=False, capture_output=True)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Of commands that run inside."""
        return ("ip", "netns", "exec", self.name)

    def inside(self, *words: str) -> None:
        """Run a command inside."""
        _ip(*self.prefix, *words)

    def limit(self, rate: str) -> None:
        """Let the inner end send so fast and no faster."""
        self.inside("tc", "qdisc", "add", "dev", self.inner, "root", "tbf", "rate", rate, "burst", "64kb",
                    "latency", "400ms")  # fmt: skip


@contextmanager
def _apart(number: int) -> Iterator[tuple[Namespace, FaultBench]]:
    with Namespace(number) as space:
        hosts = (space.there, space.here)
        with FaultBench("mooncake", large=True, timing=PATIENT, hosts=hosts, prefix=space.prefix) as bench:
            yield space, bench


def slow_link(transport: str, phase: str) -> Row:
    """A rate limit; the transfer takes its time and is right."""
    seen = Seen(phase="all through")
    number = {"20mbit": 1, "100mbit": 2}[phase]
    with _apart(number) as (space, bench):
        bench.warm()
        space.limit(phase)
        bench.publish()
        since = bench.fetch()
        end = bench.ended(since, seen, seconds=60)
        if end["fate"] != "done":
            seen.problems.append("a slow link must not fail a transfer")
        bench.producer_back(since, seen)
        seen.noticed = None
        return bench.row("slow link", f"tbf {phase} on the producer's end of a veth pair", seen)


def dead_link(transport: str, phase: str) -> Row:
    """The link goes down, or the route leads nowhere, in the middle of a write; later it is whole again."""
    seen = Seen(phase="during the write")
    down = phase == "link down"
    with _apart(3 if down else 4) as (space, bench):
        bench.warm()
        space.limit("20mbit")
        bench.publish()
        bench.fetch()
        bench.consumer.wait("began", VICTIM, seconds=30)
        if down:
            space.inside("ip", "link", "set", space.inner, "down")
        else:
            space.inside("ip", "route", "add", "blackhole", f"{space.here}/32")
        since = time.monotonic()
        bench.ended(since, seen, seconds=30)
        bench.producer_back(since, seen, seconds=40)
        if down:
            space.inside("ip", "link", "set", space.inner, "up")
        else:
            space.inside("ip", "route", "del", "blackhole", f"{space.here}/32")
        space.inside("tc", "qdisc", "del", "dev", space.inner, "root")
        time.sleep(2)
        bench.move(seconds=40)
        means = "ip link set down" if down else "a black-holed route to the consumer"
        return bench.row(phase, f"{means} inside the producer's namespace, later undone", seen)
