"""Pairs of real engines over the covering array of :mod:`kvferry.testing.cells`, each against a single engine.

By itself this runs the cells of the core; ``--cells all`` (``make test-vllm``) runs every one. With ``--cell-results
FILE`` a line is added to the file for each cell; ``scripts/make_support.py`` writes the page from it.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvferry.testing.cell_checks import not_built_as_said
from kvferry.testing.cell_engines import cell_specs
from kvferry.testing.cell_run import Baseline, CellOutcome, run_cell, start_baseline
from kvferry.testing.cells import (
    CELLS,
    FACTORS,
    FORBIDDEN,
    Blocks,
    Cell,
    Split,
    Tp,
    complete,
    every_pair,
    missing_pairs,
    refused,
)
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model

NAMES = [cell.name for cell in CELLS]


class TestArray:
    """The list itself."""

    def test_every_pair_of_values_that_can_occur_does(self) -> None:
        assert missing_pairs(CELLS) == frozenset()

    def test_a_missing_cell_is_noticed_and_can_be_made_up_for(self) -> None:
        less = CELLS[:-1]
        assert missing_pairs(less)
        assert missing_pairs(complete(less)) == frozenset()

    def test_no_cell_is_forbidden_or_there_twice(self) -> None:
        assert [refused(cell) for cell in CELLS if refused(cell)] == []
        assert len(set(NAMES)) == len(NAMES)

    def test_every_value_occurs(self) -> None:
        values = {value for pair in every_pair() for value in pair}
        assert values == {value for factor in FACTORS.values() for value in factor}
        assert all(rule.why for rule in FORBIDDEN)

    def test_the_core_has_what_it_promises(self) -> None:
        core = [cell for cell in CELLS if cell.core]
        assert len({cell.model for cell in core}) == 5
        assert len({cell.model for cell in core if cell.split is Split.ON}) >= 3
        assert {(c.model, c.tp) for c in core} >= {
            ("qwen3", "tp1-2"),
            ("qwen3", "tp2-1"),
            ("qwen3", "tp2-2"),
            ("lfm2", "tp1-2"),
            ("lfm2", "tp2-1"),
        }
        assert {(c.model, c.moves) for c in core} >= {("qwen3", "cma"), ("lfm2", "cma"), ("qwen3_next", "cma")}


@pytest.fixture(scope="module")
def baseline(
    request: pytest.FixtureRequest, model_folder: Path, forge: EngineForge, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Baseline]:
    """The single engine of one model; pytest runs all cells of a model before the next."""
    pytest.importorskip("vllm")
    pytest.importorskip("mooncake")
    logs = tmp_path_factory.mktemp(f"single-{request.param}")
    with start_baseline(request.param, models=model_folder, logs=logs, forge=forge) as one:
        yield one


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        every = metafunc.config.getoption("--cells") == "all"
        chosen = [cell for cell in CELLS if every or cell.core]
        pairs = [pytest.param(cell.model.value, cell, id=cell.name) for cell in chosen]
        metafunc.parametrize(("baseline", "cell"), pairs, indirect=["baseline"], scope="module")


@pytest.mark.vllm
@pytest.mark.mooncake
@pytest.mark.filterwarnings("default")
def test_cell(
    cell: Cell, baseline: Baseline, forge: EngineForge, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    began = time.monotonic()
    problems: tuple[str, ...] = ("did not come to an end",)
    result = None
    try:
        result = run_cell(cell, baseline, logs=tmp_path, forge=forge)
        problems = result.problems
    finally:
        note(request, CellOutcome(cell.name, request.node.nodeid, time.monotonic() - began, problems))
    assert problems == ()
    assert result is not None
    assert result.transfers == result.requests
    assert result.nbytes > 0


@pytest.mark.vllm
@pytest.mark.mooncake
@pytest.mark.filterwarnings("default")
def test_a_cell_that_is_built_otherwise_is_noticed(model_folder: Path, forge: EngineForge, tmp_path: Path) -> None:
    """Each side, and of several ranks each."""
    pytest.importorskip("vllm")
    pytest.importorskip("mooncake")
    cell = CELLS[0]
    specs = cell_specs(cell, build_model(QWEN3, model_folder), tmp_path / "transfers.jsonl")
    with start_engines(specs, logs=tmp_path, forge=forge) as engines:
        assert list(not_built_as_said(cell, engines)) == []
        otherwise = {
            "kernel blocks": replace(cell, split=Split.OFF),
            "blocks of": replace(cell, blocks=Blocks.LARGER),
            "ranks instead": replace(cell, tp=Tp.TWO_ONE),
        }
        told = {what: [p for p in not_built_as_said(other, engines) if what in p] for what, other in otherwise.items()}
    assert [problem.partition(":")[0] for problem in told["kernel blocks"]] == [
        "prefill, rank 0",
        "decode, rank 0",
        "decode, rank 1",
    ]
    assert any(problem.startswith("decode: blocks of {64}") for problem in told["blocks of"])
    assert told["ranks instead"] == ["prefill: 1 ranks instead of 2", "decode: 2 ranks instead of 1"]


def note(request: pytest.FixtureRequest, outcome: CellOutcome) -> None:
    path = request.config.getoption("--cell-results")
    if path is not None:
        with Path(path).open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")
