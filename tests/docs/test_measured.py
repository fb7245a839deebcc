"""Pages that a command has written from what it saw: they are of this version's faults and worlds, and all was well."""

from pathlib import Path

from kvferry.testing.explore import WORLDS
from kvferry.testing.explore_world import luck_of
from kvferry.testing.faults import catalogue

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(page: str) -> list[list[str]]:
    """The cells of all table rows that begin like a row of the first table."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_world_was_explored_to_its_end() -> None:
    page = (DOCS / "model-check.md").read_text()
    found = [row[:3] for row in rows(page)[1:]]
    assert found == [[str(ranks), str(requests), luck_of(luck)] for ranks, requests, luck in WORLDS.values()]
    assert "cut off" not in page


def test_every_fault_has_its_row_and_cost_nothing() -> None:
    page = (DOCS / "faults.md").read_text()
    table = [row for row in rows(page)[1:] if len(row) == 11]
    assert len(table) + page.count("Skipped: ") == len(catalogue())
    assert len(table) >= 40
    assert {tuple(row[-3:]) for row in table} == {("0", "0", "0")}
    assert f"{len(table)} faults, 0 bytes wrong, 0 blocks lost, 0 resources leaked." in page
