"""Whatever refuses an engine at its start-up has a row in the troubleshooting pages.

The messages are read from the source, not listed here: every ``ConfigError(reason, message)`` in the rooms that an
engine is made of. A message is mostly an f-string, and often its middle is said by the caller of a small function that
returns the error. So a message is a text with holes, and a caller's words are put into the hole that they fill. A row
quotes a piece of it, or several with dots or a name in capitals between them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
ROOMS = ("vllm", "runtime", "control", "transport")
HOLE = "\0"
INTRODUCTIONS = {"the cache group of layer ... cannot be carried"}
"""Rows that only lead to the next ones: what stands behind such words has a row of its own."""
NOT_SEEN = {
    # Options are checked before: such an error is one of a program that builds these settings by itself.
    f"{HOLE} must be above 0",
    # The words come from a table, whose texts are tried by themselves below.
    f"the cache group of layer {HOLE} cannot be carried: {HOLE}: {HOLE}",
}
"""Messages that need no row."""


@dataclass(frozen=True)
class Source:
    """One module."""

    path: Path
    tree: ast.Module

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def constant(self, name: str) -> list[str]:
        """All texts of a constant of this module."""
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if name in {target.id for target in targets if isinstance(target, ast.Name)}:
                return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return []

    def text(self, node: ast.expr, holes: dict[str, str], inside: ast.AST) -> str:
        """``node`` as a text with holes; ``holes`` are those that can be filled, by the name that stands in them."""
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=parts):
                return "".join(self.text(part, holes, inside) for part in parts)
            case ast.FormattedValue(value=value) if isinstance(value, ast.Name):
                return holes.get(value.id, HOLE)
            case ast.Name(id=name):
                return holes.get(name) or self._assigned(name, holes, inside)
            case ast.Call(func=ast.Name(id=name)):
                return next((self._returned(one, holes) for one in self.functions() if one.name == name), HOLE)
            case _:
                return HOLE

    def _assigned(self, name: str, holes: dict[str, str], inside: ast.AST) -> str:
        for node in ast.walk(inside):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return self.text(node.value, holes, ast.Module([], []))
        return HOLE

    def _returned(self, function: ast.FunctionDef | ast.AsyncFunctionDef, holes: dict[str, str]) -> str:
        values = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
        return self.text(values[-1], holes, function) if values else HOLE

    def messages(self) -> Iterator[str]:
        """Of every ``ConfigError`` that is made here."""
        for function in self.functions():
            for call in calls_of("ConfigError", function):
                if any(isinstance(n, ast.Return) and n.value is call for n in ast.walk(function)):
                    yield from self._said_by_callers(function, call.args[1])
                else:
                    yield self.text(call.args[1], {}, function)

    def _said_by_callers(self, maker: ast.FunctionDef | ast.AsyncFunctionDef, template: ast.expr) -> Iterator[str]:
        names = [argument.arg for argument in maker.args.args]
        for function in self.functions():
            for call in calls_of(maker.name, function):
                given = dict(zip(names, call.args, strict=True))
                holes = {name: self.text(value, {}, function) for name, value in given.items()}
                yield self.text(template, holes, maker)


def calls_of(name: str, inside: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(inside):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def sources() -> Iterator[Source]:
    for room in ROOMS:
        for path in sorted((ROOT / "src" / "kvferry" / room).rglob("*.py")):
            yield Source(path, ast.parse(path.read_text(encoding="utf-8")))


def every_message() -> list[str]:
    found = {message for source in sources() for message in source.messages()}
    return sorted(found - NOT_SEEN)


def matcher(phrase: str) -> re.Pattern[str]:
    pieces = [re.escape(piece) for piece in re.split(r"\b[A-Z]{4,}\b|\.\.\.", phrase)]
    return re.compile(".*".join(pieces), flags=re.DOTALL)


def quoted() -> set[str]:
    """What stands in backquotes in the first column of the rows of messages."""
    rows = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row)}


ROWS = [matcher(phrase) for phrase in quoted() - INTRODUCTIONS]


def has_row(message: str) -> bool:
    return any(row.search(message) for row in ROWS)


@pytest.mark.parametrize("message", every_message(), ids=lambda message: message.replace(HOLE, "_")[:50])
def test_a_message_has_a_row(message: str) -> None:
    assert has_row(message)


def test_every_kind_of_cache_that_is_not_carried_has_a_row() -> None:
    (groups,) = [source for source in sources() if source.path.name == "groups.py"]
    texts = groups.constant("_REFUSED")
    reasons = [text for text in texts if " " in text]
    assert len(reasons) >= 6
    assert [reason for reason in reasons if not has_row(reason)] == []


def test_messages_are_found_wherever_they_are_made() -> None:
    """By a class alone, by a function for a caller, over a variable, and by another function."""
    found = every_message()
    assert len(found) > 50
    for piece in (
        "sleep mode unmaps the cache's memory",
        f"layer {HOLE}: its spec has a cache, but no tensor was registered for it",
        "vLLM would not start an engine of these options",
        "kv_connector_extra_config has no option",
        f"option {HOLE} is {HOLE}, must be a number above 0",
        "its layers disagree",
    ):
        assert any(piece in message for message in found), piece


def test_a_message_without_a_row_is_noticed() -> None:
    assert not has_row("layer 'x': a cache that nobody has thought of")
    assert not has_row("the cache group of layer 'x' cannot be carried: nobody has thought of it")
