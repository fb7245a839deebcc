"""A soak: minutes of mixed load with faults, and at the end nothing may be wrong, lost, or more than it was.

Two producers and one consumer in processes of their own. All the time transfers of random length run, and now and then
one is aborted, withdrawn, never published, served by an engine that fails, lies or hangs, or cut off by a stop of a
producer; and producers are killed and started again. Every byte of every request that is reported as done is checked,
and blocks are overwritten when they go back, so that a late read or write shows.

``python -m kvferry.testing.soak --seconds 600 [--transport cma] [--seed N] [--page docs/soak.md]``
"""

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kvferry.testing.ferry_bench import Event, Ferry
from kvferry.testing.ferry_process import Spec
from kvferry.testing.ports import free_port

TIMING = {"publish": 15.0, "pull": 15.0, "orphan": 5.0}
LIMITS = {"write_timeout": 4.0, "stop_timeout": 1.0, "fence_after": 2.0}
BLOCKS = 800
"""Of the consumer: for what is under way, and for what is held for producers that are stopped or hang."""
OPEN = 24
"""Requests under way at once."""
SETTLE_S = 60.0
MORE_THREADS, MORE_FILES, MORE_BYTES = 4, 8, 48 << 20
"""By so much may a side have grown: engines that have been renewed keep a little."""


@dataclass(slots=True)
class Soaked:
    """What a soak came to."""

    seconds: float = 0.0
    fates: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    growth: dict[str, dict[str, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        done = ", ".join(f"{count} {fate}" for fate, count in self.fates.most_common())
        hurt = ", ".join(f"{count} {name}" for name, count in self.injected.most_common())
        lines = [f"soak: {self.seconds:.0f} s, {self.fates.total()} requests: {done}", f"injected: {hurt}"]
        lines += [f"{side}: {growth}" for side, growth in self.growth.items()]
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        return "\n".join(
            [*lines, "all bytes right, all blocks home, nothing leaked" if not self.problems else "FAILED"]
        )


class Soak:
    """The driver."""

    def __init__(self, transport: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._debug = tempfile.mkdtemp(prefix="kvferry-soak-")
        self.log = Path(self._debug) / "log"
        self._stderr = self.log.open("wb")
        """What the processes say of their ends; shown when one dies."""
        self.found = Soaked()
        self.producers = [self._producer(transport, index) for index in range(2)]
        self.consumer = Ferry(
            Spec(role="consumer", transport=transport, engine="d", block_tokens=32, blocks=BLOCKS, timing=TIMING),
            log=self._stderr,
        )
        self._open: dict[str, int] = {}
        self._serial = 0
        self._before: dict[str, Event] = {}

    def _producer(self, transport: str, index: int, *, port: int = 0) -> Ferry:
        return Ferry(
            Spec(
                role="producer", transport=transport, engine=f"p{index}", port=port or free_port(), blocks=1200,
                timing=TIMING, limits=LIMITS,
            ),
            log=self._stderr,
        )  # fmt: skip

    def run(self, seconds: float) -> Soaked:
        """Load and faults for so long, then peace, then the audit."""
        began = time.monotonic()
        self._peace(40)
        self._before = self._audits()
        turns: tuple[tuple[float, Callable[[], object]], ...] = (
            (0.86, self._request),
            (0.90, self._abort),
            (0.93, self._unpublished),
            (0.955, self._withdrawn),
            (0.985, self._misdeed),
            (0.994, self._stop),
            (1.0, self._kill),
        )
        while time.monotonic() - began < seconds:
            draw = self._random.random()
            next(act for bound, act in turns if draw <= bound)()
            self._collect(most=OPEN)
        self._peace(40)
        self._audit()
        self.found.seconds = time.monotonic() - began
        return self.found

    def close(self) -> None:
        """End all processes."""
        for ferry in (*self.producers, self.consumer):
            ferry.close()
        self._stderr.close()

    # -- what happens ----------------------------------------------------------------------------------------

    def _request(self, *, publish: bool = True) -> str:
        which = self._random.randrange(2)
        producer = self.producers[which]
        self._serial += 1
        name, salt, tokens = f"s{self._serial}", self._serial, self._random.randint(1, 260)
        orders: list[Callable[[], object]] = (
            [lambda: self._publish(producer, name, tokens=tokens, salt=salt)] if publish else []
        )
        orders.append(
            lambda: self.consumer.tell(
                "fetch", transfer=name, tokens=tokens, salt=salt, source=[producer.engine, producer.url]
            )
        )
        self._random.shuffle(orders)
        for order in orders:
            order()
        self._open[name] = which
        return name

    def _publish(self, producer: Ferry, name: str, *, tokens: int, salt: int) -> float:
        return producer.tell("publish", transfer=name, tokens=tokens, salt=salt)

    def _abort(self) -> None:
        name = self._request()
        self.consumer.tell("cancel", transfer=name)
        self.found.injected["aborts"] += 1

    def _unpublished(self) -> None:
        self._request(publish=False)
        self.found.injected["never published"] += 1

    def _withdrawn(self) -> None:
        name = self._request()
        self.producers[self._open[name]].tell("withdraw", transfer=name)
        self.found.injected["withdrawals"] += 1

    def _misdeed(self) -> None:
        name, args = self._random.choice(
            [
                ("FailAfter", {"rows": 5}),
                ("FailAndWriteLater", {"delay": 3.0}),
                ("Hang", {"rows": 3}),
                ("Slow", {"rows": 4, "pause": 0.05}),
                ("Repeat", {"delay": 0.5}),
            ]
        )
        self.producers[self._random.randrange(2)].tell("misdeed", name=name, args=args)
        self.found.injected[name] += 1

    def _stop(self) -> None:
        producer = self.producers[self._random.randrange(2)]
        producer.stop()
        time.sleep(self._random.choice([0.5, 5.0]))
        producer.resume()
        self.found.injected["stops"] += 1

    def _kill(self) -> None:
        which = self._random.randrange(2)
        old = self.producers[which]
        old.kill()
        old.close()
        self.producers[which] = self._producer(old.spec.transport, which, port=old.spec.port)
        self._before.pop(f"p{which}", None)
        self.found.injected["kills"] += 1

    def _peace(self, requests: int) -> None:
        """Only good requests, to the end of all that is under way."""
        for _ in range(requests):
            self._request()
            self._collect(most=8)
        self._collect(most=0)

    def _collect(self, *, most: int) -> None:
        deadline = time.monotonic() + SETTLE_S
        while len(self._open) > most:
            if time.monotonic() > deadline:
                self.found.problems.append(f"requests that do not end: {sorted(self._open)[:5]}")
                self._open.clear()
                return
            end = self.consumer.find("ended", seconds=0.5)
            if end is not None and self._open.pop(end["transfer"], None) is not None:
                self.found.fates[f"{end['fate']} {end['reason']}".strip()] += 1
        for ferry in (*self.producers, self.consumer):
            ferry.events[:] = [one for one in ferry.events if one["event"] == "ended"]

    # -- the accounts ----------------------------------------------------------------------------------------

    def _audits(self) -> dict[str, Event]:
        def home(found: Event) -> bool:
            return bool(found["free"] == found["total"])

        return {ferry.engine: ferry.audit_until(home, seconds=SETTLE_S) for ferry in (*self.producers, self.consumer)}

    def _audit(self) -> None:
        for side, after in self._audits().items():
            lost = after["total"] - after["free"]
            for what, count in (("bytes wrong", after["wrong"]), ("late bytes", after["stray"]), ("blocks lost", lost)):
                if count:
                    self.found.problems.append(f"{side}: {count} {what} {after['held'][:3]}")
            before = self._before.get(side)
            if before is None:
                continue  # a new process since
            growth = {key: int(after[key]) - int(before[key]) for key in ("threads", "fds", "rss")}
            self.found.growth[side] = growth
            if growth["threads"] > MORE_THREADS or growth["fds"] > MORE_FILES or growth["rss"] > MORE_BYTES:
                self.found.problems.append(f"{side} has grown: {growth}")


def page_of(found: Soaked, transport: str, *, seed: int) -> str:
    """The page of a soak at whose end all was well."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return PAGE.format(
        open=OPEN,
        threads=MORE_THREADS,
        files=MORE_FILES,
        mebibytes=MORE_BYTES >> 20,
        transport=transport,
        seed=seed,
        seconds=f"{found.seconds:.0f}",
        requests=found.fates.total(),
        fates="\n".join(f"| {fate} | {count} |" for fate, count in found.fates.most_common()),
        injected="\n".join(f"| {name} | {count} |" for name, count in found.injected.most_common()),
        growth="; ".join(
            f"{side} {grown['threads']:+d}, {grown['fds']:+d}, {grown['rss'] / (1 << 20):+.1f} MiB"
            for side, grown in found.growth.items()
        ),
        machine=f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores of {names[0] if names else platform.machine()}",
    )


PAGE = """# The soak

Minutes of mixed load with faults between two producers and one consumer, real processes without vLLM, and then an
audit. This page is written by `make soak` (`kvferry.testing.soak`) when the audit has found nothing.

Up to {open} requests of random length are under way all the time. Now and then one is aborted, withdrawn, or never
published; a producer's engine fails, fails and writes later, hangs, is slow, or writes twice; a producer is stopped and
continued, or killed and started again. Blocks are overwritten when they go back, so that a late read or write shows.

**Over {transport}, {seconds} s (seed {seed}), {requests} requests: every byte of every finished one was right, every
block came home, and nothing leaked.**

| how requests ended | number |
|---|--:|
{fates}

| what was done to them | times |
|---|--:|
{injected}

At the end a process may have {threads} threads, {files} file descriptors and {mebibytes} MiB more than at the
beginning. Found: {growth}.

{machine}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed load with faults, then an audit.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--transport", choices=("cma", "mooncake"), default="cma")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", type=Path, help="where to write what came of it, for people")
    chosen = parser.parse_args()
    soak = Soak(chosen.transport, chosen.seed)
    try:
        found = soak.run(chosen.seconds)
    except OSError:
        last = soak.log.read_text().splitlines()[-30:]
        sys.stderr.write("\n".join(["a process has died; the last that was said:", *last, ""]))
        raise
    finally:
        soak.close()
    sys.stdout.write(f"{found}\n")
    if chosen.page is not None and not found.problems:
        chosen.page.write_text(page_of(found, chosen.transport, seed=chosen.seed))
    return 1 if found.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
