"""Bad bytes against every reader of foreign bytes: ``python -m kvferry.testing.fuzz_wire --count 1000000``.

Input n follows from the seed n alone, so a run is resumed with ``--start`` and a finding is named by its seed. An input
is a *finding* when its reader raises something else than a ``FerryError``, takes longer than the limit, takes more
memory than the limit, or takes the process down.

The work is done in a child. It says in shared memory which seed it is at, so that the parent knows what killed it or
hangs in it, writes that down, and starts another child behind that seed. Memory is limited for the child as a whole by
the kernel, for every input; on one input in 64 it is measured (by ``tracemalloc``, which knows NumPy's arrays too).
"""

import argparse
import contextlib
import logging
import multiprocessing
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Final

from kvferry.errors import FerryError
from kvferry.testing.fuzz_targets import Target, targets
from kvferry.testing.mutations import bad_message

SECONDS: Final = 1.0
"""Processor time that one input may take."""

HANG: Final = 30.0
"""Seconds after which a child that stays at one input is killed."""

ALLOWANCE: Final = 32 << 20
"""Bytes that one input of any size may take; what it may take beyond that is in proportion to its length."""

PER_BYTE: Final = 64
ADDRESS_SPACE: Final = 1 << 30
"""Bytes that the child may map more than it had at its start."""

MEASURED: Final = 64
MOST_FINDINGS: Final = 20
REPORT_EVERY: Final = 2_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One input that was not taken as it should be."""

    seed: int
    target: str
    what: str
    data: bytes


@dataclass(slots=True)
class Report:
    """What a run came to."""

    count: int = 0
    taken: Counter[str] = field(default_factory=Counter)
    """Inputs that passed, by target: still good after all."""
    refused: Counter[str] = field(default_factory=Counter)
    """Inputs that were refused, by target and reason."""
    slowest: float = 0.0
    largest: int = 0
    """Bytes, of those measured."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Count another part of the run in."""
        self.count += other.count
        self.taken += other.taken
        self.refused += other.refused
        self.slowest = max(self.slowest, other.slowest)
        self.largest = max(self.largest, other.largest)
        self.findings += other.findings


def input_of(seed: int) -> tuple[Target, bytes]:
    """The reader and the bytes of one seed."""
    chance = random.Random(seed)
    target = chance.choice(targets())
    return target, bad_message(chance.choice(target.good), chance, form=target.form)


def try_input(seed: int, report: Report) -> None:
    """Give one input to its reader and count what came of it."""
    target, data = input_of(seed)
    report.count += 1
    measured = seed % MEASURED == 0
    if measured:
        tracemalloc.start()
    began = time.thread_time()
    try:
        target.read(data)
    except FerryError as error:
        report.refused[f"{target.name}: {error.reason.value}"] += 1
    except Exception as error:  # noqa: BLE001 - whatever it raises is a finding
        report.findings.append(Finding(seed, target.name, f"raised {type(error).__name__}: {error}"[:300], data))
    else:
        report.taken[target.name] += 1
    spent = time.thread_time() - began
    peak = 0
    if measured:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    else:
        report.slowest = max(report.slowest, spent)
    report.largest = max(report.largest, peak)
    if spent > (10 * SECONDS if measured else SECONDS):
        report.findings.append(Finding(seed, target.name, f"took {spent:.2f} s", data))
    if peak > ALLOWANCE + PER_BYTE * len(data):
        report.findings.append(Finding(seed, target.name, f"took {peak >> 20} MiB for {len(data)} bytes", data))


def fuzz(seeds: range, *, most_findings: int = MOST_FINDINGS) -> Report:
    """A whole run, in children. Stops early at that many findings."""
    report = Report()
    start = seeds.start
    while start < seeds.stop and len(report.findings) < most_findings:
        start = _watch(range(start, seeds.stop), report, most_findings=most_findings)
    return report


def _watch(seeds: range, report: Report, *, most_findings: int) -> int:
    """Run one child until it is done or is lost; the seed to go on from."""
    context = multiprocessing.get_context("fork")
    here: Synchronized[int] = context.Value("q", seeds.start)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(seeds, here, theirs), daemon=True)
    child.start()
    theirs.close()
    at, since = seeds.start, time.monotonic()
    told = seeds.start
    with contextlib.suppress(EOFError):
        while True:
            if ours.poll(1.0):
                part: Report = ours.recv()
                report.add(part)
                told += part.count
                sys.stderr.write(f"{report.count} inputs, {len(report.findings)} findings, next seed {told}\n")
                if told >= seeds.stop or len(report.findings) >= most_findings:
                    break
            if here.value != at:
                at, since = here.value, time.monotonic()
            elif time.monotonic() - since > HANG:
                child.kill()
                break
    hung = time.monotonic() - since > HANG
    child.terminate() if told >= seeds.stop or len(report.findings) >= most_findings else child.kill()
    child.join()
    ours.close()
    if told >= seeds.stop or len(report.findings) >= most_findings:
        return told
    lost = here.value
    target, data = input_of(lost)
    what = f"did not come back within {HANG:.0f} s" if hung else f"took the process down (exit {child.exitcode})"
    report.findings.append(Finding(lost, target.name, what, data))
    report.count += 1
    # What the child counted since its last word is lost: those seeds are tried again, up to the one that killed it.
    if lost > told:
        report.add(_again(range(told, lost)))
    return lost + 1


def _again(seeds: range) -> Report:
    part = Report()
    for seed in seeds:
        try_input(seed, part)
    return part


def _child(seeds: range, here: "Synchronized[int]", pipe: "Connection[Report, Report]") -> None:
    logging.disable(logging.CRITICAL)
    _limit_memory()
    part = Report()
    for seed in seeds:
        here.value = seed
        try_input(seed, part)
        if part.count >= REPORT_EVERY or seed == seeds.stop - 1:
            pipe.send(part)
            part = Report()


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, hard))


def words(report: Report, *, start: int, seconds: float) -> str:
    """The figures of a run, for people."""
    lines = [f"{'reader':<16}{'still good':>12}{'refused':>12}"]
    for target in targets():
        refused = sum(n for name, n in report.refused.items() if name.startswith(f"{target.name}: "))
        lines.append(f"{target.name:<16}{report.taken[target.name]:>12,}{refused:>12,}")
    lines.append("")
    lines += [f"  {n:>9,}  {name}" for name, n in sorted(report.refused.items())]
    for finding in report.findings:
        lines.append(f"\nseed {finding.seed}, {finding.target}: {finding.what}\n  {finding.data[:400]!r}")
    lines.append(
        f"\n{report.count:,} inputs from seed {start} in {seconds:.0f} s: {len(report.findings)} findings; slowest "
        f"{report.slowest * 1e3:.0f} ms, most memory {report.largest / 2**20:.1f} MiB (one in {MEASURED} measured)"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="give bad bytes to every reader of foreign bytes")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--findings", type=int, default=MOST_FINDINGS, help="stop after so many")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    report = fuzz(range(chosen.start, chosen.start + chosen.count), most_findings=chosen.findings)
    sys.stdout.write(words(report, start=chosen.start, seconds=time.monotonic() - began) + "\n")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
