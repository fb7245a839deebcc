"""Mutation check of ``kvferry.plan`` and ``kvferry.layout``: ``make mutants``.

Each mutant is the source with one small fault: a comparison, an operator or a constant changed, a condition negated, a
statement left out. The fast tests of both rooms, and a run of the planner against the oracle over ``ORACLE_SEEDS``, are
run on it; a mutant that no test notices *survives*. Nothing on disk is changed: every mutant runs in a fork of this
process that loads the one changed module from memory, after a parent that has imported everything but kvferry itself
and knows what the oracle expects. Results are appended to a file, so a run that was stopped goes on where it was. A
result is of one text of its module and one of the tests: after an edit of either, the mutant is tried again.

Messages, annotations and sizes (constants in capitals) are left alone: they have no right value to be held to.
"""

import argparse
import ast
import copy
import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import hypothesis
import numpy as np  # noqa: F401 - imported before the forks, so that no fork does it
import pytest

from kvferry.testing.oracle import expect, judge
from kvferry.testing.strategies import random_case

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("plan", "layout")
ORACLE_SEEDS = range(150)
TESTS = ("tests/plan", "tests/layout")
ORACLE = ("kvferry.testing.oracle", "kvferry.testing.strategies", "kvferry.testing.fuzz_plan")
LEFT_OUT = (
    "test_docs.py",
    "test_fewest.py",
    "test_linear.py",
    "test_memory.py",
    "test_oracle.py",
    "test_oracle_self.py",
    "test_pairs.py",
    "test_upstream_counts.py",
)
"""Slow, or about something else."""
CPU_SECONDS_EACH = 20
MEMORY_EACH = 4 << 30

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip

CALL_HABITS = {"strict", "repr", "compare", "hash", "kind"}
"""Keywords of ``zip``, ``field`` and ``argsort`` that no right result depends on."""


@dataclass(frozen=True)
class Mutant:
    module: str
    number: int
    """Among the mutants of the module."""
    line: int
    change: str


@dataclass(frozen=True)
class Texts:
    """Digests of what an outcome follows from."""

    module: str
    """The source that was changed: in another one, the same number is another mutant."""
    tests: str
    """The test files and what they use of the project, except the source of the module."""


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    texts: Texts
    outcome: str
    """``killed``, ``timeout`` or ``survived``."""
    seconds: float


# ------------------------------------------------------------------------------------------------------ making mutants


class _Sites(ast.NodeVisitor):
    """Every place that can be changed: (node, what to do to a copy of it, in words)."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.AST, str]] = []

    def add(self, node: ast.AST, change: str) -> None:
        self.found.append((node, change))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A message."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "drop")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Our own invariant: true, or the test fails."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not _is_size(node.target):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(_is_size(target) or ast.unparse(target) == "__all__" for target in node.targets):
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in CALL_HABITS:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node, "drop")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "drop")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "drop")

    def visit_If(self, node: ast.If) -> None:
        self.add(node, "negate")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node, "negate")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if type(node.ops[0]) in COMPARISONS:
            self.add(node, "compare")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.add(node, "and/or")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS:
            self.add(node, "operator")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.Invert):
            self.add(node, "not")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.add(node, "+1")
        elif type(node.value) is bool:
            self.add(node, "flip")


def _is_size(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.isupper()


def _changed(node: ast.AST, change: str) -> ast.AST:
    new = copy.deepcopy(node)
    match new:
        case ast.If() | ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
        case ast.Compare():
            new.ops[0] = COMPARISONS[type(new.ops[0])]()
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        case ast.BinOp():
            new.op = OPERATORS[type(new.op)]()
        case ast.UnaryOp():
            return new.operand
        case ast.Constant():
            new.value = not new.value if change == "flip" else new.value + 1
        case _:
            return ast.Pass()
    return new


class _Replace(ast.NodeTransformer):
    def __init__(self, number: int, sites: Sequence[tuple[ast.AST, str]]) -> None:
        self._node, self._change = sites[number]

    def visit(self, node: ast.AST) -> ast.AST:
        return _changed(node, self._change) if node is self._node else self.generic_visit(node)


def sites_of(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    finder = _Sites()
    for statement in tree.body:
        finder.visit(statement)
    return finder.found


def mutants_of(module: str) -> Iterator[Mutant]:
    alike: Counter[tuple[int, str]] = Counter()
    for number, (node, change) in enumerate(sites_of(ast.parse(source_of(module)))):
        old = ast.unparse(node)
        shown = (
            change if len(old) > 70 else f"{old}  ->  {ast.unparse(ast.fix_missing_locations(_changed(node, change)))}"
        )
        line, said = getattr(node, "lineno", 0), f"negate {old[:70]}" if change == "negate" else shown
        alike[line, said] += 1
        # Two of one line may read alike, and each has a result of its own.
        yield Mutant(module, number, line, said if alike[line, said] == 1 else f"{said} (no. {alike[line, said]})")


def mutated(mutant: Mutant) -> str:
    tree = ast.parse(source_of(mutant.module))
    return ast.unparse(ast.fix_missing_locations(_Replace(mutant.number, sites_of(tree)).visit(tree)))


def path_of(module: str) -> Path:
    return ROOT / "src" / Path(*module.split(".")).with_suffix(".py")


def package_of(module: str) -> Path:
    return ROOT / "src" / Path(*module.split(".")) / "__init__.py"


@cache
def source_of(module: str) -> str:
    """As it was when the run began, also when somebody edits meanwhile."""
    return path_of(module).read_text()


def digest_of(sources: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for source in sources:
        whole.update(f"{len(source)}\n{source}".encode())
    return whole.hexdigest()[:16]


@cache
def used_by_tests() -> tuple[Path, ...]:
    """The test files, those beside them, and all of the project that they import, directly or not."""
    found: set[Path] = set()
    left = [path for folder in TESTS for path in (ROOT / folder).rglob("*.py") if path.name not in LEFT_OUT]
    left += [path_of(name) for name in ORACLE]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += imported_by(path)
    return tuple(sorted(found))


def imported_by(path: Path) -> list[Path]:
    """Files of the project that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    ours = {".".join(name.split(".")[:stop]) for name in names for stop in range(1, name.count(".") + 2)}
    places = [place for name in ours if name.startswith("kvferry") for place in (path_of(name), package_of(name))]
    return [place for place in places if place.exists()]


@cache
def texts_of(module: str) -> Texts:
    """Digests of a module and of what it is tried with, as they were when they were first asked for."""
    others = [path for path in used_by_tests() if path != path_of(module)]
    tests = digest_of(f"{path.relative_to(ROOT)}\n{path.read_text()}" for path in others)
    return Texts(digest_of([source_of(module)]), tests)


def modules() -> list[str]:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / "src/kvferry" / room).glob("*.py")):
            if path.stem != "__init__":
                found.append(f"kvferry.{room}.{path.stem}")
    return found


# ----------------------------------------------------------------------------------------------------- running one


class _FromMemory(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a text."""

    def __init__(self, module: str, source: str) -> None:
        self._module, self._source = module, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(path_of(name)))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(path_of(module.__name__)), "exec"), module.__dict__)


def expectations() -> list[tuple[object, object]]:
    cases = [random_case(random.Random(seed)) for seed in ORACLE_SEEDS]
    return [(case, expect(case.producers, case.consumers, case.request)) for case in cases]


def oracle_objects(known: list[tuple[object, object]]) -> bool:
    """Whether the oracle has anything against the plans of this process."""
    from kvferry.testing.fuzz_plan import kvferry_planner

    for case, expected in known:
        if judge(expected, kvferry_planner(case.producers, case.consumers, case.request)):
            return True
    return False


def tests_for(module: str) -> list[str]:
    """The test files, those named for the module first."""
    room, name = module.split(".")[1:]
    files = sorted(
        str(path.relative_to(ROOT))
        for folder in TESTS
        for path in (ROOT / folder).glob("test_*.py")
        if path.name not in LEFT_OUT
    )
    return sorted(files, key=lambda f: (name not in f, room not in f, f))


def noticed(module: str, known: list[tuple[object, object]]) -> bool:
    """In the fork: whether anything fails."""
    hypothesis.settings.register_profile("mutants", max_examples=50, derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    files = tests_for(module)
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--noconftest"]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    # The oracle first: most faults show in its first cases, in milliseconds.
    return oracle_objects(known) or pytest.main([*quiet, *files]) != 0


def try_unchanged(known: list[tuple[object, object]]) -> None:
    """What every mutant is compared with: nothing fails on the source as it is."""
    if child := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            raise RuntimeError("the tests fail on the source as it is: mutants would prove nothing")
        return
    code = 1
    try:
        _be_modest()
        code = int(noticed("kvferry.plan.bind", known))
    finally:
        os._exit(code)


def try_mutant(mutant: Mutant, known: list[tuple[object, object]]) -> Result:
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_in_fork(mutant, known)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcome = {0: "survived", -signal.SIGXCPU: "timeout", -signal.SIGKILL: "timeout"}.get(code, "killed")
    return Result(mutant, texts_of(mutant.module), outcome, round(time.monotonic() - start, 2))


def _be_modest() -> None:
    """Print nothing, and end by force where the fault makes tests endless or huge."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_EACH, CPU_SECONDS_EACH + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_EACH, MEMORY_EACH))


def _run_in_fork(mutant: Mutant, known: list[tuple[object, object]]) -> None:
    code = 1
    try:
        sys.meta_path.insert(0, _FromMemory(mutant.module, mutated(mutant)))
        _be_modest()
        code = int(noticed(mutant.module, known))
    finally:
        os._exit(code)


# ---------------------------------------------------------------------------------------------------------- the whole


Identity = tuple[str, str, int]
"""Of a mutant: its module, the digest of the module's source, its number in that source."""


def identity(mutant: Mutant) -> Identity:
    """Which fault in which text. The line and the words of it may be those of another fault after an edit."""
    return mutant.module, texts_of(mutant.module).module, mutant.number


def done_before(path: Path, *, again: bool = False) -> dict[Identity, Result]:
    """Outcomes that still stand: of the sources and the tests as they are now.

    ``again``: tests were only added, so that what they killed before stays killed.
    """
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "texts" not in record:
            continue  # written by an earlier version, which did not say what it was of
        result = Result(Mutant(**record["mutant"]), Texts(**record["texts"]), record["outcome"], record["seconds"])
        now = texts_of(result.mutant.module)
        if result.texts == now or (again and result.texts.module == now.module and result.outcome != "survived"):
            found[identity(result.mutant)] = result
    return found


def report(results: Sequence[Result]) -> str:
    lines = ["| module | mutants | killed | timeout | survived |", "|---|---|---|---|---|"]
    for module in sorted({result.mutant.module for result in results}):
        counts = Counter(result.outcome for result in results if result.mutant.module == module)
        numbers = [sum(counts.values()), counts["killed"], counts["timeout"], counts["survived"]]
        lines.append(f"| {module.removeprefix('kvferry.')} | " + " | ".join(map(str, numbers)) + " |")
    alive = [result.mutant for result in results if result.outcome == "survived"]
    lines += ["", *(f"survived: {m.module}:{m.line}  {m.change}" for m in alive)]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="mutation check of plan/ and layout/")
    parser.add_argument("--only", default="", help="modules whose name contains this")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each module at most, drawn by a seed")
    parser.add_argument("--resume", type=Path, default=ROOT / "build/mutants.jsonl", help="file of results")
    parser.add_argument("--again", action="store_true", help="tests were only added: try none that was killed")
    parser.add_argument("--list", action="store_true", help="say how many there are")
    chosen = parser.parse_args(arguments)
    os.chdir(ROOT)
    todo: list[Mutant] = []
    for module in modules():
        if chosen.only in module:
            texts_of(module)
            every = list(mutants_of(module))
            if chosen.sample and len(every) > chosen.sample:
                every = sorted(random.Random(module).sample(every, chosen.sample), key=lambda m: m.number)
            todo += every
    if chosen.list:
        print("\n".join(f"{count:5} {module}" for module, count in Counter(m.module for m in todo).items()), len(todo))
        return 0
    loaded = [name for name in sys.modules if name.startswith(("kvferry.plan", "kvferry.layout"))]
    if loaded:
        raise RuntimeError(f"a fork would not load the mutant: {loaded} are imported already")
    known = expectations()
    try_unchanged(known)
    before, results = done_before(chosen.resume, again=chosen.again), []
    chosen.resume.parent.mkdir(parents=True, exist_ok=True)
    for number, mutant in enumerate(todo, 1):
        result = before.get(identity(mutant))
        if result is None:
            result = try_mutant(mutant, known)
            with chosen.resume.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            if result.outcome == "survived":
                print(f"[{number}/{len(todo)}] survived: {mutant.module}:{mutant.line}  {mutant.change}", flush=True)
        results.append(result)
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
