"""The troubleshooting pages have every reason, and quote only messages that the source can say."""

import re
from functools import cache
from pathlib import Path

import pytest

from kvferry.errors import ConfigReason, PlanReason, ProtocolReason, TransportReason

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "troubleshooting.zh-CN.md"]
ENGLISH = PAGES[0]
OTHERS_SAY = {
    "Unsupported connector type: FerryConnector",
    "ModuleNotFoundError: No module named 'kvferry'",
    "operator torchvision::nms does not exist",
    "No available memory for the cache blocks",
    "Local segment descriptor not found",
    "Logging before InitGoogleLogging()",
}
"""Messages of vLLM, torch and the engine."""


@cache
def said_by_the_source() -> str:
    """All source text, with the pieces of a message that was broken over lines put together."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "kvferry").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def sections(page: Path) -> list[str]:
    return re.findall(r"^### `([a-z-]+)`", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def quoted(page: Path, *, first: str = "| ") -> set[str]:
    """What stands in backquotes in the first column of the tables, in rows that begin with ``first``."""
    found: set[str] = set()
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(first):
            found |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_reason_has_an_entry_and_no_other_has(page: Path) -> None:
    reasons = [*ConfigReason, *TransportReason, *ProtocolReason]
    assert sorted(sections(page)) == sorted(reason.value for reason in reasons)
    linked = re.findall(r"\[`([a-z-]+)`\]\(refusals\.md#([a-z-]+)\)", page.read_text(encoding="utf-8"))
    assert linked == [(reason.value, reason.value) for reason in PlanReason]


def test_messages_that_are_quoted_are_those_of_the_source() -> None:
    missing = []
    for message in quoted(ENGLISH, first="| `") - OTHERS_SAY:
        pieces = [piece for piece in re.split(r"\b[A-Z]{4,}\b|\.\.\.", message) if piece.strip()]
        missing += [message for piece in pieces if piece.strip() not in said_by_the_source()]
    assert missing == []


def test_both_pages_quote_the_same_messages() -> None:
    assert quoted(PAGES[0]) == quoted(PAGES[1])
