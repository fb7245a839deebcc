"""Pages of docs that name tests: each test exists, and the table of pairs leaves none of its tests out."""

import ast
import re
from pathlib import Path

import pytest

from kvferry.testing.case_features import EVERY

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", ["pairs.md", "proof.md", "planner.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert named
    missing = [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)]
    assert missing == []


def test_every_row_of_the_table_of_pairs_names_a_test() -> None:
    lines = (ROOT / "docs" / "pairs.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.endswith("| Test |")]
    assert len(rows) > 30
    assert [row for row in rows if not NAMED.search(row)] == []


def test_the_table_of_features_has_each_and_none_is_rare() -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    found = {name: float(share) for share, name in re.findall(r"^\| ([\d.]+) % \| (.*) \|$", page, flags=re.MULTILINE)}
    assert set(found) == set(EVERY)
    assert min(found.values()) >= 1


def test_every_test_of_pairs_is_in_the_table() -> None:
    file = "tests/plan/test_pairs.py"
    written = {name for name in functions(ROOT / file) if name.startswith("test_")}
    named = {name for where, name in NAMED.findall((ROOT / "docs" / "pairs.md").read_text()) if where == file}
    assert written - named == set()
