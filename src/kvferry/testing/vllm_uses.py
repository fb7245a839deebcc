"""What of vLLM's classes a folder of ours uses, read from the annotations of its own source.

Where a parameter says that it is a ``Request``, every attribute taken from it is a use of ``Request``; where an
attribute is itself of a class that the release declares (``vllm_config.parallel_config``), the next one is a use of
that. Names, attributes set on ``self``, what a loop runs over and what a method of the same class returns are followed;
what is annotated as ``Any``, or comes out of another call, is not: the contract's test lists those by hand.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Fields = Mapping[str, Mapping[str, str]]
"""By class, the annotation of each field and property."""


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """One attribute of one class, and how it is called, if it is."""

    owner: str
    name: str
    place: str = field(compare=False)
    """File and line."""
    arguments: tuple[int, tuple[str, ...]] | None = field(default=None, compare=False)
    """Positional ones, and the names of the others; ``None`` where it is not called, or with a star."""


def uses_of(folder: Path, fields: Fields) -> Iterator[Use]:
    """All uses of the classes in ``fields`` by the files of ``folder``."""
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        place = str(file.relative_to(folder))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                own = _kept_on_self(node, fields)
                for inner in _functions(node.body):
                    yield from _Reader(fields, own, place).read(inner)
            elif isinstance(node, ast.FunctionDef):
                yield from _Reader(fields, {}, place).read(node)


def class_of(annotation: str) -> str:
    """The class that an annotation means: without quotes, modules, ``None``.

    >>> class_of("'torch.Tensor | None'"), class_of("Optional[KVCacheConfig]"), class_of("list[int]")
    ('Tensor', 'KVCacheConfig', 'list[int]')
    """
    text = annotation.strip("'\"").replace('"', "").replace("'", "")
    inner = re.fullmatch(r"Optional\[(.*)\]", text)
    parts = [part.strip() for part in (inner[1] if inner else text).split("|")]
    known = [part for part in parts if part != "None"]
    return known[0].split(".")[-1] if len(known) == 1 and "[" not in known[0] else (known or [""])[0]


def element_of(annotation: str) -> str:
    """The class of what a list of this annotation holds.

    >>> element_of("list[KVCacheGroupSpec]"), element_of("tuple[Request, ...]"), element_of("int")
    ('KVCacheGroupSpec', 'Request', '')
    """
    found = re.fullmatch(r"(?:list|tuple|Sequence|Iterable)\[([\w.]+)(?:, \.\.\.)?\]", class_of(annotation))
    return found[1].split(".")[-1] if found else ""


def _functions(body: Iterable[ast.stmt]) -> Iterator[ast.FunctionDef]:
    return (node for node in body if isinstance(node, ast.FunctionDef))


def _parameters(node: ast.FunctionDef) -> dict[str, str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {arg.arg: ast.unparse(arg.annotation) for arg in every if arg.annotation is not None}


def _kept_on_self(owner: ast.ClassDef, fields: Fields) -> dict[str, str]:
    """Types of attributes: declared in the class body or in a method, or set to a parameter that has a type.

    What a method of its own returns is kept under its name with brackets.
    """
    kept = {f"{one.name}()": ast.unparse(one.returns) for one in _functions(owner.body) if one.returns is not None}
    for node in ast.walk(owner):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name)):
                kept[name] = ast.unparse(node.annotation)
            case _:
                continue
    for function in _functions(owner.body):
        reader = _Reader(fields, kept, "", names=_parameters(function))
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                    if annotation := reader.type_of(node.value):
                        kept.setdefault(name, annotation)
                case _:
                    continue
    return kept


@dataclass(slots=True)
class _Reader:
    """Reads one function."""

    fields: Fields
    own: Mapping[str, str]
    place: str
    names: dict[str, str] = field(default_factory=dict)

    def read(self, function: ast.FunctionDef) -> Iterator[Use]:
        """Its uses; names are bound first, wherever they are used."""
        self.names = _parameters(function)
        for inner in ast.walk(function):
            if isinstance(inner, ast.FunctionDef) and inner is not function:
                self.names |= _parameters(inner)
        for node in ast.walk(function):
            self._bind(node)
        called = {id(node.func): node for node in ast.walk(function) if isinstance(node, ast.Call)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (owner := class_of(self.type_of(node.value))) in self.fields:
                yield Use(owner, node.attr, f"{self.place}:{node.lineno}", _arguments(called.get(id(node))))

    def type_of(self, node: ast.expr) -> str:
        """Its annotation, or nothing."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name, "")
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self.own:
                return self.own[name]
            case ast.Attribute(value=inner, attr=name):
                return self.fields.get(class_of(self.type_of(inner)), {}).get(name, "")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return self.own.get(f"{name}()", "")
            case ast.Subscript(value=inner):
                return element_of(self.type_of(inner))
            case _:
                return ""

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._know(name, self.type_of(value))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=False):
                    if isinstance(target, ast.Name):
                        self._know(target.id, self.type_of(value))
            case ast.For(target=ast.Name(id=name), iter=many) | ast.comprehension(target=ast.Name(id=name), iter=many):
                self._know(name, element_of(self.type_of(many)))
            case _:
                return

    def _know(self, name: str, annotation: str) -> None:
        if annotation:
            self.names[name] = annotation


def _arguments(call: ast.Call | None) -> tuple[int, tuple[str, ...]] | None:
    if call is None or any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    names = [keyword.arg for keyword in call.keywords]
    return None if None in names else (len(call.args), tuple(str(name) for name in names))
