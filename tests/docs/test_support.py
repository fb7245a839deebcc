"""The support page: every cell and every claim is on it, nothing on it fails, and every test that it names exists."""

import re
from pathlib import Path

import pytest

from kvferry.testing.cells import CELLS, FORBIDDEN
from kvferry.testing.support_rows import FROM_UPSTREAM, OWN, PARTS, ROWS, STAGES, TO_UPSTREAM

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "support.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)", PAGE)))


@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_every_cell_is_there_and_works(cell: object) -> None:
    name = cell.name  # type: ignore[attr-defined]
    (row,) = [line for line in PAGE.splitlines() if f"| `{name}` |" in line]
    assert "| works |" in row


def test_every_claim_is_there_and_none_fails() -> None:
    assert [entry.what for entry in ROWS if f"\n| {entry.what} | " not in PAGE] == []
    for part in PARTS.values():
        assert PAGE.count(f"\n| {part} | ") == len([OWN, FROM_UPSTREAM, TO_UPSTREAM, STAGES])
    assert "**fails**" not in PAGE


def test_every_reason_for_what_cannot_be_is_there() -> None:
    assert [rule.why for rule in FORBIDDEN if f"* {rule.why}" not in PAGE] == []


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_every_test_that_is_named_exists(file: str, test: str) -> None:
    assert re.search(rf"def {test}\b", (ROOT / file).read_text())


def test_tests_are_named() -> None:
    assert len(NAMED) > 40
