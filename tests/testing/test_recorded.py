"""What a run of pytest leaves behind: a line for each test, with the worst of its phases."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.testing.recorded import Ended, read_ended

TESTS = """
import pytest

@pytest.fixture
def broken(): raise RuntimeError("no set-up")

@pytest.fixture
def dirty():
    yield
    raise RuntimeError("no clean-up")

def test_right(): pass

def test_wrong(): assert False

def test_skipped(): pytest.skip("not here")

@pytest.mark.xfail(strict=True)
def test_known_to_fail(): assert False

def test_without_set_up(broken): pass

def test_without_clean_up(dirty): pass

@pytest.mark.parametrize("number", [1, 2])
def test_each(number): assert number == 1
"""


def test_each_test_leaves_the_worst_of_its_phases(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "kvferry.testing.recorded"]
    command += ["--test-results", "results.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=300)
    assert "passed" in done.stdout, done.stderr
    ended = read_ended([tmp_path / "results.jsonl", tmp_path / "no-such-file"])
    assert {name.removeprefix("test_some.py::"): one.outcome for name, one in ended.items()} == {
        "test_right": "passed",
        "test_wrong": "failed",
        "test_skipped": "skipped",
        "test_known_to_fail": "skipped",
        "test_without_set_up": "failed",
        "test_without_clean_up": "failed",
        "test_each[1]": "passed",
        "test_each[2]": "failed",
    }


def test_the_last_run_of_a_test_counts(tmp_path: Path) -> None:
    first, later = tmp_path / "first.jsonl", tmp_path / "later.jsonl"
    lines = [msgspec.json.encode(Ended(test, "failed", 1.0)) for test in "ab"]
    first.write_bytes(b"\n".join(lines))
    later.write_bytes(msgspec.json.encode(Ended("a", "passed", 2.0)) + b"\n")
    assert read_ended([first, later]) == {"a": Ended("a", "passed", 2.0), "b": Ended("b", "failed", 1.0)}


def test_without_the_option_nothing_is_written(request: pytest.FixtureRequest) -> None:
    recorder = request.config.pluginmanager.get_plugin("kvferry-recorder")
    assert (recorder is None) == (request.config.getoption("--test-results") is None)
