"""Inject every fault of :mod:`kvferry.testing.faults` into real processes and write ``docs/faults.md``.

python scripts/faults.py [--jobs N] [--only WORD]... [--out FILE]

With ``--only`` the faults whose names contain one of the words are run and nothing is written. Exit status 1 when a
byte was wrong, a block lost, a resource leaked or a fault went otherwise than it must.
"""

import argparse
import datetime
import os
import platform
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvferry.testing.fault_bench import Row
from kvferry.testing.faults import Fault, catalogue, run_fault
from kvferry.testing.faults.catalogue import unavailable

PAGE = Path(__file__).resolve().parents[1] / "docs" / "faults.md"

HEAD = """# Faults, injected

Every row is one run of `make faults`: a producer and a consumer in processes of their own, one fault, one transfer more
afterwards, and an audit of both sides. `seconds to notice` counts from the fault to the first report of the side that
lives; `blocks back` until every block of the transfer is back in the pools of the sides that live. *Wrong* counts bytes
that were not what they must be in a request reported as done, and bytes that landed in blocks that had gone back
(blocks are overwritten when they go back, on both sides, so that a late read or write shows). *Lost* counts blocks that
did not come home, *leaked* threads and file descriptors above those before the fault.

This page is written by the command from what it saw; nothing in it is edited by hand.

"""

TAIL = """
## Where the seconds go

With the default options, for a peer that is cut off without a word (link down, black hole, a stopped process):

| side | what happens | seconds |
|---|---|--:|
| consumer | no heartbeat of the producer's libzmq for `silence_timeout`; the request fails | up to 4 |
| consumer | the engine that receives from it is destroyed, so nothing lands any more; blocks go back | up to 1 more |
| producer | its keep-alive, sent every 2 s, finds a connection that libzmq dropped after the same silence | up to 6 |
| producer | the write is told to stop (`stop_timeout`) | 2 more |
| producer | still in doubt, it waits for writes to other consumers to end first (`fence_after`) | 3 more |
| producer | the engine is destroyed, so nothing is read any more; blocks go back | up to 1 more |
| producer | meanwhile the cache is kept for another consumer (`lost_consumer_grace`), in parallel | 5 |

So the producer's blocks are back after 12 s at the latest, unless destroying the engine takes longer than a second.
Less is not proven: a shorter silence would take a busy peer for a dead one, and a fence without waiting would fail the
writes to every other consumer, since one engine serves them all. A peer that is killed is noticed as soon as a write or
a keep-alive meets its closed connection.

Over `cma` a writer that is stopped cannot be proven quiet before it ends or goes on, because it may be between two
system calls: its blocks stay held, up to `quarantine_max_fraction` of all, above which new fetches are refused
([protocol.md](protocol.md), rule 4).
"""


def attempt(fault: Fault) -> tuple[Fault, Row | str]:
    """Run one; its row, or what went wrong."""
    began = time.monotonic()
    try:
        found: Row | str = run_fault(fault)
    except Exception as error:  # one fault that breaks the bench must not hide the others
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    good = isinstance(found, Row) and found.good
    print(f"{'ok  ' if good else 'BAD '} {time.monotonic() - began:5.1f} s  {fault.name}", flush=True)
    if isinstance(found, Row):
        print(f"      {line(found)}", flush=True)
    if not good:
        print(f"      {found}", flush=True)
    return fault, found


def line(row: Row) -> str:
    """One row of the page."""
    noticed = "" if row.noticed is None else f"{row.noticed:.1f}"
    back = "" if row.back is None else f"{row.back:.1f}"
    return (
        f"| {row.fault} | {row.means} | {row.transport} | {row.phase} | {row.producer} | {row.consumer} "
        f"| {noticed} | {back} | {row.wrong} | {row.lost} | {row.leaked} |"
    )


def page(rows: list[Row], skipped: list[str], seconds: float) -> str:
    """The whole page."""
    heads = (
        "fault", "by what means", "transport", "phase", "producer said", "consumer said", "seconds to notice",
        "blocks back", "bytes wrong", "blocks lost", "leaked",
    )  # fmt: skip
    wrong, lost, leaked = (sum(getattr(row, name) for row in rows) for name in ("wrong", "lost", "leaked"))
    table = [f"| {' | '.join(heads)} |", "|---|---|---|---|---|---|--:|--:|--:|--:|--:|", *map(line, rows)]
    total = f"\n{len(rows)} faults, {wrong} bytes wrong, {lost} blocks lost, {leaked} resources leaked.\n"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release().partition('-')[0]}"
    made = f"\nMade on {datetime.date.today()} in {seconds:.0f} s, {machine}.\n"
    return HEAD + "\n".join([*table, total, *(f"Skipped: {one}\n" for one in skipped), made]) + TAIL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--out", type=Path, default=PAGE)
    chosen = parser.parse_args()
    faults = [one for one in catalogue() if not chosen.only or any(word in one.name for word in chosen.only)]
    reasons = {one: unavailable(one) for one in faults}
    began = time.monotonic()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        results = list(pool.map(attempt, [one for one, why in reasons.items() if why is None]))
    rows = [found for _, found in results if isinstance(found, Row)]
    bad = [fault.name for fault, found in results if not (isinstance(found, Row) and found.good)]
    if not chosen.only:
        skipped = [f"{one.name}: {why}" for one, why in reasons.items() if why is not None]
        chosen.out.write_text(page(rows, skipped, time.monotonic() - began))
    print(f"{len(rows)} rows, {len(bad)} bad: {bad}" if bad else f"{len(rows)} rows, all good")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
