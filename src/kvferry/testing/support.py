"""What the support page says of a thing, and what of that the recorded run has shown.

An :class:`Entry` is a claim: a thing, the state it is said to be in, and the tests that show it. The page does not
print the claim but what came of its tests in the run that the page is made from (:func:`standing`): the claim where all
of them passed there, *fails* where one did not, and the command that runs them where that run did not. So a page cannot
say more than was run. :mod:`kvferry.testing.support_rows` has the entries.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvferry.testing.cell_run import CellOutcome
from kvferry.testing.cells import CELLS, Cell
from kvferry.testing.recorded import Ended

WORKS: Final = "works"
REFUSED: Final = "refused"
UNTESTED: Final = "untested"


@dataclass(frozen=True, slots=True)
class Run:
    """What was recorded."""

    tests: Mapping[str, Ended] = field(default_factory=dict)
    """By node id."""
    cells: Mapping[str, CellOutcome] = field(default_factory=dict)
    """By name."""

    def cases_of(self, test: str) -> list[Ended]:
        """A test's cases: itself, or one for each of its parameters."""
        return [one for name, one in self.tests.items() if name == test or name.startswith(f"{test}[")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One claim."""

    what: str
    state: str
    tests: tuple[str, ...] = ()
    """Node ids; without a parameter, all cases of the test."""
    cells: Callable[[Cell], bool] | None = None
    """Which cells show it; where these ran, tests beside them need not have."""
    remark: str = ""
    command: str = "make test"
    """What runs the tests where the recorded run did not."""
    elsewhere: bool = False
    """Whether only that command shows it: the same tests have another meaning in the recorded run."""

    def __post_init__(self) -> None:
        shown = bool(self.tests) or self.cells is not None
        if shown == (self.state == UNTESTED):
            raise ValueError(f"{self.what}: {self.state} with tests {self.tests}")


@dataclass(frozen=True, slots=True)
class Grid:
    """Claims of two dimensions: a row of entries for each thing, one for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]


def standing(entry: Entry, run: Run) -> str:
    """The state that the page prints."""
    if entry.state == UNTESTED:
        return _said(UNTESTED, entry.remark)
    if entry.elsewhere:
        return _outside(entry)
    cells = [run.cells[cell.name] for cell in CELLS if entry.cells is not None and entry.cells(cell)]
    failed = [outcome.cell for outcome in cells if outcome.problems]
    found = {test: run.cases_of(test) for test in entry.tests}
    cases = [case for each in found.values() for case in each]
    failed += [case.test for case in cases if case.outcome == "failed"]
    if failed:
        return _said("**fails**", ", ".join(f"`{name}`" for name in failed))
    if not cells and not all(any(case.outcome == "passed" for case in each) for each in found.values()):
        return _outside(entry)
    skipped = sum(case.outcome == "skipped" for case in cases)
    left = f"{len(cases) - skipped} of {len(cases)} cases, the others were skipped" if skipped else ""
    return _said(entry.state, "; ".join(part for part in (entry.remark, left) if part))


def _outside(entry: Entry) -> str:
    shown = f"shown by `{entry.command}`"
    return _said(shown if entry.state == WORKS else f"{entry.state}; {shown}", entry.remark)


def where(entry: Entry) -> str:
    """Its tests, for the page."""
    named = [f"`{test}`" for test in entry.tests]
    if entry.cells is not None:
        numbers = [str(number) for number, cell in enumerate(CELLS, start=1) if entry.cells(cell)]
        named.append(f"cells {', '.join(numbers)}")
    return ", ".join(named)


def table(entries: Iterable[Entry], run: Run) -> Iterator[str]:
    """The rows of a table."""
    yield "| what | state | test |"
    yield "|---|---|---|"
    for entry in entries:
        yield f"| {entry.what} | {standing(entry, run)} | {where(entry)} |"


def squares(grid: Grid, run: Run) -> Iterator[str]:
    """The rows of a grid: each state with the numbers of its cells and letters that stand for its tests below it.

    Where cells show it, tests that were not run are left out.
    """
    letters: dict[str, str] = {}
    yield f"| part | {' | '.join(grid.columns)} |"
    yield "|" + "---|" * (len(grid.columns) + 1)
    for what, entries in grid.rows:
        yield f"| {what} | {' | '.join(_square(entry, run, letters) for entry in entries)} |"
    if letters:
        yield ""
    yield from (f"* {letter}: `{test}`" for test, letter in letters.items())


def _square(entry: Entry, run: Run, letters: dict[str, str]) -> str:
    said = standing(entry, run)
    shown = [str(number) for number, cell in enumerate(CELLS, start=1) if entry.cells is not None and entry.cells(cell)]
    for test in entry.tests if not shown else filter(run.cases_of, entry.tests):
        shown.append(letters.setdefault(test, _letter(len(letters))))
    return f"{said} ({', '.join(shown)})" if shown else said


def _letter(count: int) -> str:
    """a to z, then aa, ab and so on."""
    return (_letter(count // 26 - 1) if count >= 26 else "") + chr(ord("a") + count % 26)


def _said(state: str, remark: str) -> str:
    return f"{state}: {remark}" if remark else state
