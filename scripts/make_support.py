"""Write ``docs/support.md``: what works with what, each entry with its test.

python scripts/make_support.py --results build/cells.jsonl --tests build/tests.jsonl

``make test-vllm`` records both files and then runs this. Nothing on the page is taken on trust: *works* stands where
the tests of an entry passed in the recorded run, *fails* where one did not, and the command to run where that run did
not have them (:mod:`kvferry.testing.support`; the entries are in :mod:`kvferry.testing.support_rows`). The page is not
written when a cell has no result.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvferry.testing.cell_run import CellOutcome
from kvferry.testing.cells import CELLS, FORBIDDEN
from kvferry.testing.recorded import Ended, read_ended
from kvferry.testing.support import Entry, Grid, Run, squares, table
from kvferry.testing.support_rows import (
    FROM_UPSTREAM,
    MODE_ENTRIES,
    OWN,
    RARE_PARTS,
    RELEASES,
    STAGES,
    TO_UPSTREAM,
    WITH_UPSTREAM,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"

HEAD = """# What works with what

*Works* means that the tests of the entry passed in the run that wrote this page. What a cell shows: a prefill and a
decode engine, real vLLM on the CPU; digests of the moved pages equal at both ends for every request (where vLLM's own
connector sends: equal to those that the same prompt left between two kvferry engines); the answers those of one engine
that does both (token by token where that engine agrees with itself alone and in a batch and computes in float32, else
by teacher-forced log probabilities: within 0.002 in float32, 0.5 in bfloat16); every block back in all pools. What its
name says is looked for too: kernel blocks in the tensors of every rank, the steps in which the prefill engine computed
each prompt, what a repeated prompt found in the prefix caches (less is computed, less moves), the transport that moved.
*Refused*: with an error by name, before a byte moves; the tests show that. *Layout read*: the cache's layout is read
right, and no pair of engines was run. *Untested* is what it says. *Shown by* a command: the tests were not part of that
run; the command runs them. GPU memory, RDMA and NVLink are untested throughout.

Most tests in `tests/vllm` run real engines. Those of `test_modes.py` and `test_scheduler.py` run vLLM's own scheduler
and block pool with scripted steps in place of a model; those in `layouts` build caches with vLLM's own code and compute
nothing. `tests/runtime` and `tests/router` are without vLLM, but for `test_serve.py` (`vllm serve`).

Written on {date} from the records of {tests} tests that passed and of {cells} cells, {machine}, vLLM {vllm}.
"""

GRIDS: tuple[tuple[str, str, Grid], ...] = (
    ("Model part and tensor parallel sizes", "kvferry at both ends. 1-2: one rank at prefill, two at decode.", OWN),
    (
        "Prefill by vLLM's MooncakeConnector, decode by kvferry",
        "By tensor parallel sizes. More of it: [upstream.md](upstream.md).",
        FROM_UPSTREAM,
    ),
    ("Prefill by kvferry, decode by vLLM's MooncakeConnector", "By tensor parallel sizes.", TO_UPSTREAM),
    (
        "Pipeline stages, data parallel ranks",
        "2-1: two stages at prefill, one at decode. (The tests make buffers that vLLM 0.32 leaves out on a CPU\n"
        "without a compiler.)",
        STAGES,
    ),
)

TABLES: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    ("More with vLLM's MooncakeConnector at one end", WITH_UPSTREAM),
    ("Parts of models in no cell", RARE_PARTS),
    ("Modes", MODE_ENTRIES),
    ("Releases of vLLM", RELEASES),
)


def main() -> int:
    """Write the page, or say what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="of the cells: pytest --cell-results")
    parser.add_argument("--tests", type=Path, nargs="*", default=[], help="of all tests: pytest --test-results")
    given = parser.parse_args()
    run = Run(tests=read_ended(given.tests), cells=read_outcomes(given.results))
    missing = [cell.name for cell in CELLS if cell.name not in run.cells]
    if missing:
        sys.stderr.write(f"no result of {len(missing)} cells, so the page stays as it is: {', '.join(missing)}\n")
        return 1
    PAGE.write_text("\n".join(page(run)) + "\n")
    return 0


def read_outcomes(path: Path) -> dict[str, CellOutcome]:
    """The last line of each cell."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return {one.cell: one for one in (msgspec.json.decode(line, type=CellOutcome) for line in lines)}


def page(run: Run) -> Iterator[str]:
    """Its lines."""
    yield HEAD.format(
        date=datetime.now(UTC).date(),
        tests=_passed(run.tests),
        cells=len(run.cells),
        machine=f"{os.cpu_count()} cores of {platform.machine()}",
        vllm=version("vllm").split("+")[0],
    )
    yield "Numbers are those of the [cells](#the-cells), letters those of the tests below each table.\n"
    for title, lead, grid in GRIDS:
        yield f"## {title}\n\n{lead}\n"
        yield from squares(grid, run)
        yield ""
    for title, entries in TABLES:
        yield f"## {title}\n"
        yield from table(entries, run)
        yield ""
    yield from _cells(run.cells)


def _passed(tests: Mapping[str, Ended]) -> int:
    return sum(one.outcome == "passed" for one in tests.values())


def _cells(outcomes: Mapping[str, CellOutcome]) -> Iterator[str]:
    yield "## The cells\n"
    yield "Every pair of values of two factors that can occur does, in some cell (`kvferry.testing.cells`; `core`: in"
    yield "`make test` too). A cell's test is `tests/vllm/test_cells.py::test_cell[NAME]`. What is in no cell:\n"
    for rule in FORBIDDEN:
        yield f"* {rule.why}"
    yield "\n| | name | core | result | seconds |"
    yield "|---|---|---|---|---|"
    for number, cell in enumerate(CELLS, start=1):
        outcome = outcomes[cell.name]
        result = "works" if not outcome.problems else f"**fails**: {'; '.join(outcome.problems)}"
        yield f"| {number} | `{cell.name}` | {'core' if cell.core else ''} | {result} | {outcome.seconds:.0f} |"


if __name__ == "__main__":
    raise SystemExit(main())
