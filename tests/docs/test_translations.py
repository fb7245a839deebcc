"""A translated page has what its original has: headings, rows of tables, links, commands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORIGINALS = ["README.md", "docs/deployment.md", "docs/troubleshooting.md"]
FENCE = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)


def texts(name: str) -> tuple[str, str]:
    original = ROOT / name
    return original.read_text(encoding="utf-8"), original.with_suffix(".zh-CN.md").read_text(encoding="utf-8")


def shape(text: str) -> list[str]:
    """Headings by their depth and rows by their columns, in order; code left out."""
    plain = FENCE.sub("", text)
    lines = [line for line in plain.splitlines() if line.startswith(("#", "|"))]
    return [line.split(" ")[0] if line.startswith("#") else f"row of {line.count(' | ')}" for line in lines]


def links(text: str) -> set[str]:
    """Pages that are linked to, without language and heading; a page's link to its other language left out."""
    found = re.findall(r"\]\(([^)#\s]*)(?:#[^)\s]*)?\)", FENCE.sub("", text))
    return {link.replace(".zh-CN.md", ".md") for link in found if link}


def commands(text: str) -> list[str]:
    """Lines of code that begin with a prompt, without comments."""
    lines = "\n".join(FENCE.findall(text)).splitlines()
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines if re.match(r"^(?:[a-z]*)\$ ", line)]


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_translation_has_the_same_shape(name: str) -> None:
    original, translation = texts(name)
    assert shape(translation) == shape(original)


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_translation_links_to_the_same_pages(name: str) -> None:
    original, translation = texts(name)
    own = {Path(name).name}
    assert links(translation) - own == links(original) - own


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_translation_gives_the_same_commands(name: str) -> None:
    original, translation = texts(name)
    assert commands(translation) == commands(original)
