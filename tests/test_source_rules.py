"""Rules of the source that no linter has."""

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import getmembers, isclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "kvferry"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NEEDS_VLLM = tuple(PACKAGE.glob("vllm/**/*.py"))
IMPORTED = [path for path in SOURCES if "testing" not in path.parts and path.name != "__main__.py"]
FINALIZER = "__del__"


def naming(tree: ast.AST, name: str) -> Iterator[int]:
    """Lines where this name is defined, bound, imported, looked up or spelled: each a way to give it to a class."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=found)
                | ast.AsyncFunctionDef(name=found)
                | ast.Name(id=found)
                | ast.Attribute(attr=found)
                | ast.keyword(arg=found)
                | ast.Constant(value=str(found))
                | ast.alias(name=found)
            ) if found == name:
                yield getattr(node, "lineno", 0)


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __del__(self): ...",
        "class A:\n    class B:\n        async def __del__(self): ...",
        "def close(self): ...\nclass A:\n    __del__ = close",
        "class A: ...\nA.__del__ = print",
        "class A: ...\nsetattr(A, '__del__', print)",
        "A = type('A', (), {'__del__': print})",
        "A = type('A', (), dict(__del__=print))",
    ],
)
def test_each_way_to_give_a_class_a_finalizer_is_seen(source: str) -> None:
    assert list(naming(ast.parse(source), FINALIZER))


def test_no_source_gives_a_class_a_finalizer() -> None:
    """Work that is left to the garbage collector happens at any time, in any thread, or never."""
    assert len(SOURCES) > 150
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in SOURCES
        for line in naming(ast.parse(path.read_text(encoding="utf-8")), FINALIZER)
    ]
    assert found == []


def classes(path: Path) -> Iterator[type]:
    name = ".".join(("kvferry", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    module = import_module(name)
    yield from (one for _, one in getmembers(module, isclass) if one.__module__ == name)


def inheriting(paths: list[Path]) -> list[str]:
    return [one.__qualname__ for path in paths for one in classes(path) if hasattr(one, FINALIZER)]


def test_a_finalizer_of_a_base_is_seen() -> None:
    assert hasattr(type("Derived", (type("Base", (), {FINALIZER: print}),), {}), FINALIZER)


def test_no_class_inherits_a_finalizer() -> None:
    """From a base of another package, whose source is not among those above."""
    assert inheriting([path for path in IMPORTED if path not in NEEDS_VLLM and not _speaks_mooncake(path)]) == []


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_no_class_for_vllm_inherits_a_finalizer() -> None:
    pytest.importorskip("vllm")
    assert inheriting([path for path in IMPORTED if path in NEEDS_VLLM]) == []


def _speaks_mooncake(path: Path) -> bool:
    """Whether it cannot be imported here."""
    return path.name == "mooncake.py" and find_spec("mooncake") is None
