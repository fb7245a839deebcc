"""The support page cannot say more than was run."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.testing.cell_run import CellOutcome
from kvferry.testing.cells import CELLS, Model
from kvferry.testing.recorded import Ended
from kvferry.testing.support import REFUSED, UNTESTED, WORKS, Entry, Grid, Run, squares, standing, table, where
from kvferry.testing.support_rows import FROM_UPSTREAM, OWN, ROWS, STAGES, TO_UPSTREAM

ROOT = Path(__file__).resolve().parents[2]
GRIDS = (OWN, FROM_UPSTREAM, TO_UPSTREAM, STAGES)
CLAIMS = (*ROWS, *(entry for grid in GRIDS for _, entries in grid.rows for entry in entries))


def run_of(**outcomes: str) -> Run:
    return Run(tests={name: Ended(name, outcome, 1.0) for name, outcome in outcomes.items()})  # type: ignore[arg-type]


def cells_run(*, wrong: str | None = None) -> Run:
    return Run(cells={c.name: CellOutcome(c.name, "t", 1.0, ("bad",) if c.name == wrong else ()) for c in CELLS})


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"t": "passed"}, "works: quickly"),
        ({"t[a]": "passed", "t[b]": "passed"}, "works: quickly"),
        ({"t[a]": "passed", "t[b]": "failed"}, "**fails**: `t[b]`"),
        ({"t[a]": "passed", "t[b]": "skipped"}, "works: quickly; 1 of 2 cases, the others were skipped"),
        ({"t": "skipped"}, "shown by `make test`: quickly"),
        ({"tt": "passed"}, "shown by `make test`: quickly"),
        ({}, "shown by `make test`: quickly"),
    ],
)
def test_a_claim_is_what_came_of_its_test(outcomes: dict[str, str], said: str) -> None:
    assert standing(Entry(what="x", state=WORKS, tests=("t",), remark="quickly"), run_of(**outcomes)) == said


def test_every_test_of_a_claim_must_have_passed() -> None:
    entry = Entry(what="x", state=WORKS, tests=("t", "u"), command="make test-vllm")
    assert standing(entry, run_of(t="passed", u="passed")) == "works"
    assert standing(entry, run_of(t="passed")) == "shown by `make test-vllm`"
    assert standing(entry, run_of(t="passed", u="failed")) == "**fails**: `u`"


def test_a_refusal_is_shown_too() -> None:
    entry = Entry(what="x", state=REFUSED, tests=("t",), remark="at start-up")
    assert standing(entry, run_of(t="passed")) == "refused: at start-up"
    assert standing(entry, run_of()) == "refused; shown by `make test`: at start-up"


def test_cells_count_like_tests() -> None:
    entry = Entry(what="x", state=WORKS, cells=lambda cell: cell.model is Model.LFM2)
    (first, *_) = [cell for cell in CELLS if cell.model is Model.LFM2]
    assert standing(entry, cells_run()) == "works"
    assert standing(entry, cells_run(wrong=first.name)) == f"**fails**: `{first.name}`"
    assert where(entry).startswith("cells 4, 5")


def test_beside_cells_a_test_that_was_not_run_is_left_out() -> None:
    (first, *_) = CELLS
    entry = Entry(what="x", state=WORKS, cells=lambda cell: cell is first, tests=("t",))
    grid = Grid(("1-1",), (("x", (entry,)),))
    run = cells_run()
    assert [*squares(grid, run)][2:] == ["| x | works (1) |"]
    ran = Run(tests=run_of(t="passed").tests, cells=run.cells)
    assert [*squares(grid, ran)][2:] == ["| x | works (1, a) |", "", "* a: `t`"]
    assert standing(entry, Run(tests=run_of(t="failed").tests, cells=run.cells)) == "**fails**: `t`"


def test_what_another_release_shows_is_not_shown_by_this_one() -> None:
    entry = Entry(what="x", state=WORKS, tests=("t",), command="make test-release", elsewhere=True)
    assert standing(entry, run_of(t="passed")) == "shown by `make test-release`"


def test_a_claim_has_something_that_shows_it() -> None:
    with pytest.raises(ValueError, match="works with tests"):
        Entry(what="x", state=WORKS)
    with pytest.raises(ValueError, match="untested with tests"):
        Entry(what="x", state=UNTESTED, tests=("t",))
    assert standing(Entry(what="x", state=UNTESTED, remark="no engine"), run_of()) == "untested: no engine"


def test_a_table_and_a_grid_say_where() -> None:
    entry = Entry(what="x", state=WORKS, tests=("t", "u"))
    assert [*table([entry], run_of(t="passed", u="passed"))][2:] == ["| x | works | `t`, `u` |"]
    grid = Grid(("1-1", "1-2"), (("x", (entry, Entry(what="x", state=UNTESTED))),))
    assert [*squares(grid, run_of(t="passed", u="passed"))][2:] == [
        "| x | works (a, b) | untested |",
        "",
        "* a: `t`",
        "* b: `u`",
    ]


def test_every_row_that_is_untested_says_why() -> None:
    assert [entry.what for entry in ROWS if entry.state == UNTESTED and not entry.remark] == []


@pytest.mark.vllm
def test_every_test_of_a_claim_is_one() -> None:
    """With its parameters: a claim whose test was renamed would be printed as never run."""
    named = {test for entry in CLAIMS for test in entry.tests}
    files = sorted({test.partition("::")[0] for test in named})
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "--cells", "all"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    collected = set(done.stdout.splitlines())
    assert len(collected) > len(named), done.stdout[-2000:] + done.stderr[-2000:]
    known = collected | {one.partition("[")[0] for one in collected}
    assert sorted(named - known) == []
