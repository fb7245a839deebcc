"""A run that decides does not skip what it should have run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.testing.skips import OF_ANOTHER_RUN, OF_THE_MACHINE, skips_fail

TESTS = Path(__file__).resolve().parents[1]

LOST = """
import pytest

@pytest.mark.skipif(True, reason="the engine is not installed")
def test_by_a_mark(): pass

def test_by_its_own_word(): pytest.importorskip("no_such_package")

@pytest.fixture
def engine(): pytest.skip("no engine")

def test_by_a_fixture(engine): pass

@pytest.mark.xfail(strict=True)
def test_that_is_known_to_fail(): assert False

@pytest.mark.skipif(True, reason="needs two CPUs")
def test_of_the_machine(): pass

def test_of_another_run(): pytest.skip("runs with --cells all")

def test_that_runs(): pass
"""


WHOLE = """
import pytest
pytest.importorskip("no_such_package")

def test_never(): pass
"""


def outcomes(folder: Path, ci: str | None) -> tuple[int, str]:
    """Exit status and last line of a run of its own."""
    (folder / "test_lost.py").write_text(LOST)
    (folder / "test_whole.py").write_text(WHOLE)
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ({"CI": ci} if ci else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "kvferry.testing.skips"]
    command += ["--continue-on-collection-errors", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False, timeout=60)
    *_, last = (done.stdout or done.stderr).splitlines()
    return done.returncode, last.partition(" in ")[0]


def test_under_ci_a_skip_fails_unless_its_reason_lies_in_the_machine(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "true") == (1, "1 failed, 1 passed, 2 skipped, 1 xfailed, 3 errors")


def test_elsewhere_it_is_a_skip(tmp_path: Path) -> None:
    assert outcomes(tmp_path, None) == (0, "1 passed, 6 skipped, 1 xfailed")


@pytest.mark.parametrize(
    ("value", "decides"), [("true", True), ("1", True), ("false", False), ("0", False), ("", False)]
)
def test_what_counts_as_ci(value: str, decides: bool) -> None:
    assert skips_fail({"CI": value}) is decides
    assert skips_fail({}) is False


def test_each_reason_of_the_machine_is_one_of_a_test() -> None:
    """A reason that no test gives any more would let a new one through that means something else."""
    sources = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__).resolve()]
    sources.append((TESTS.parent / "src/kvferry/testing/transport_conformance.py").read_text())
    for reason in OF_THE_MACHINE | OF_ANOTHER_RUN:
        assert any(f'"{reason}"' in source for source in sources), reason
