"""How each test of a run ended, kept for ``docs/support.md``.

``pytest --test-results FILE`` adds a JSON line to the file for each test when its last phase is over: its node id, and
the worst of what its set-up, its body and its clean-up came to. A run that is cut short leaves the lines of what had
ended.

This is a plug-in of pytest: a ``conftest.py`` takes its two hooks, or ``-p kvferry.testing.recorded`` loads it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec
import pytest

Outcome = Literal["passed", "skipped", "failed"]

_WORSE: Final[dict[Outcome, int]] = {"passed": 0, "skipped": 1, "failed": 2}


class Ended(msgspec.Struct, frozen=True):
    """One line: how one test ended."""

    test: str
    """Its node id."""
    outcome: Outcome
    seconds: float


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    group = parser.getgroup("kvferry")
    group.addoption("--test-results", metavar="FILE", type=Path, help="add a JSON line for each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Record, where that is asked for."""
    path = config.getoption("--test-results")
    if path is not None:
        config.pluginmanager.register(Recorder(path), "kvferry-recorder")


class Recorder:
    """Writes the lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of the test that runs."""
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The test is over."""
        phases, self._reports = self._reports, []
        outcomes: list[Outcome] = [report.outcome for report in phases]
        if not outcomes:
            return
        worst = max(outcomes, key=_WORSE.__getitem__)
        line = Ended(nodeid, worst, round(sum(report.duration for report in phases), 2))
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def read_ended(paths: Iterable[Path]) -> dict[str, Ended]:
    """The last line of each test in these files. A file that does not exist is empty."""
    lines = [line for path in paths if path.exists() for line in path.read_bytes().splitlines()]
    return {one.test: one for one in (msgspec.json.decode(line, type=Ended) for line in lines)}
