"""A result of the mutation check is of one fault in one text, and found again for no other."""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = "kvferry.plan.thing"
BEFORE = "def low(a, b):\n    return a < b\n\n\ndef both(a, b):\n    return a < b\n"
AFTER = "def both(a, b):\n    return a < b\n\n\ndef high(a, b):\n    return a < b\n"
"""The same words on the same lines, and other faults."""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, over a small project of its own."""
    spec = importlib.util.spec_from_file_location("mutants_of_a_test", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants_of_a_test", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ORACLE", ())
    write(module, tmp_path / "src/kvferry/__init__.py", "")
    write(module, tmp_path / "src/kvferry/plan/thing.py", BEFORE)
    write(module, tmp_path / "src/kvferry/plan/other.py", "LEAST = 1\n")
    write(module, tmp_path / "src/kvferry/plan/__init__.py", "from kvferry.plan.other import LEAST\n")
    write(module, tmp_path / "src/kvferry/testing/unused.py", "")
    write(module, tmp_path / "tests/plan/test_thing.py", "from kvferry.plan.thing import low\n")
    return module


def write(check: ModuleType, path: Path, text: str) -> None:
    """As somebody who edits between two runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for known in (check.source_of, check.texts_of, check.used_by_tests):
        known.cache_clear()


def record(check: ModuleType, results: Path, outcome: str = "killed") -> None:
    """The outcome of every mutant of the module, as a run writes it down."""
    made = [check.Result(one, check.texts_of(MODULE), outcome, 0.1) for one in check.mutants_of(MODULE)]
    results.write_text("".join(json.dumps(asdict(one)) + "\n" for one in made))


def known(check: ModuleType, results: Path, **options: bool) -> int:
    """How many mutants of the module as it is now need not be tried."""
    before = check.done_before(results, **options)
    return sum(check.identity(one) in before for one in check.mutants_of(MODULE))


def test_a_stopped_run_goes_on(check: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert known(check, results) == 0
    record(check, results)
    assert known(check, results) == len(list(check.mutants_of(MODULE))) > 1


def test_after_an_edit_no_mutant_is_taken_for_another(check: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    record(check, results)
    words = [(one.line, one.change) for one in check.mutants_of(MODULE)]
    write(check, tmp_path / "src/kvferry/plan/thing.py", AFTER)
    assert [(one.line, one.change) for one in check.mutants_of(MODULE)] == words
    assert known(check, results) == known(check, results, again=True) == 0
    write(check, tmp_path / "src/kvferry/plan/thing.py", BEFORE)
    assert known(check, results) == len(words)


@pytest.mark.parametrize("edited", ["tests/plan/test_thing.py", "src/kvferry/plan/other.py"])
def test_what_was_tried_with_other_tests_is_tried_again(check: ModuleType, tmp_path: Path, edited: str) -> None:
    results = tmp_path / "results.jsonl"
    record(check, results)
    write(check, tmp_path / edited, "LEAST = 2\n")
    assert known(check, results) == 0


def test_an_edit_of_what_no_test_uses_changes_nothing(check: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    record(check, results)
    write(check, tmp_path / "src/kvferry/testing/unused.py", "LEAST = 2\n")
    assert known(check, results) > 0


def test_where_tests_were_only_added_the_killed_stay_killed(check: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    for outcome, stands in (("killed", True), ("timeout", True), ("survived", False)):
        record(check, results, outcome)
        write(check, tmp_path / "tests/plan/test_more.py", f"# {outcome}\n")
        assert (known(check, results, again=True) > 0) is stands


def test_results_that_do_not_say_what_they_are_of_count_for_nothing(check: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    old = [{"mutant": asdict(one), "outcome": "killed", "seconds": 0.1} for one in check.mutants_of(MODULE)]
    results.write_text("".join(json.dumps(one) + "\n" for one in old))
    assert known(check, results) == 0


def test_the_projects_own_modules_are_tried_with_their_tests_and_the_oracle(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "ROOT", ROOT)
    monkeypatch.setattr(check, "ORACLE", ("kvferry.testing.oracle",))
    check.used_by_tests.cache_clear()
    used = {str(path.relative_to(ROOT)) for path in check.used_by_tests()}
    assert {"tests/plan/pairs.py", "src/kvferry/plan/bind.py", "src/kvferry/testing/oracle_request.py"} <= used
    assert not [path for path in used if path.startswith(("src/kvferry/vllm", "src/kvferry/runtime"))]
