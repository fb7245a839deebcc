"""Explore small worlds of the protocol to their ends and write ``docs/model-check.md``.

python scripts/model_check.py [--only WORD] [--out FILE]

With ``--only`` the worlds whose names contain the word are explored and nothing is written. Exit status 1 when a
promise is broken (the steps that lead there are printed) or a world was not explored to its end.
"""

import argparse
import datetime
import os
import platform
import sys
from pathlib import Path

from kvferry.testing.explore import WORLDS, Explored, PromiseBrokenError, explore, small_world
from kvferry.testing.explore_world import luck_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "model-check.md"

HEAD = """# The protocol in small worlds, explored without gaps

Made by `make model-check`. Each row is a *world*: so many producer ranks and requests, one consumer rank, and so much
bad luck. Every order of everything is tried: which message arrives next, when a prompt is computed, when a write ends,
when a fence is done, where in all that the bad luck strikes. The machines are the ones that run in production
(`kvferry.protocol`), not a model of them: each reaction of a machine in each of its states is worked out once by
running it, and the search then looks reactions up. Tests walk through such worlds at random and compare every step
with one whole world of joined machines, and let machines with a mistake in them be found out
(`tests/protocol/test_explore.py`).

In every state of every world:

* each transfer ends at most once on each side, and each ticket's blocks go back at most once;
* no block goes back while a write that touches it may land, and no write begins into a block that has gone back; in
  the worlds where bytes outlive their writer, they land until the engine that receives them is destroyed, whatever
  became of the one that sent them;
* a producer gives no block back while its engine may read it;
* a request is named in an answer only when its write is quiet, and each pull has one last answer;
* no write begins for a transfer that is over;
* the machines' own invariants hold: every record has a deadline, everything is counted and bounded;
* an end is within reach, and in it every transfer has ended, every pull is answered, and every block is back.

What is left out: keep-alive messages, which carry no word; times other than the machines' own deadlines.

"""


def line(name: str, found: Explored) -> str:
    """One row."""
    producers, requests, budget = WORLDS[name]
    numbers = " | ".join(f"{one:,}" for one in (found.states, found.steps, found.ends, found.depth))
    whole = "" if found.whole else " (cut off)"
    return f"| {producers} | {requests} | {luck_of(budget)}{whole} | {numbers} | {found.seconds:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=PAGE)
    chosen = parser.parse_args()
    rows, whole = [], True
    for name in [one for one in WORLDS if chosen.only in one]:
        try:
            found = explore(small_world(name), tell=lambda said: print(f"  {said}", file=sys.stderr))
        except PromiseBrokenError as error:
            print(f"{name}: {error}")
            return 1
        whole &= found.whole
        rows.append(line(name, found))
        print(rows[-1], flush=True)
    if not chosen.only:
        heads = "| producers | requests | bad luck | states | steps | ends | depth | seconds |\n"
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release().partition('-')[0]}"
        made = f"\nMade on {datetime.date.today()}, {machine}, Python {platform.python_version()}, one process.\n"
        chosen.out.write_text(HEAD + heads + "|--:|--:|---|--:|--:|--:|--:|--:|\n" + "\n".join(rows) + "\n" + made)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
