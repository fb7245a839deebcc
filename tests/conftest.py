"""What tests with real engines share: models are built once, and vLLM is imported once for all engines of a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvferry.testing import recorded
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engines import warm_forge
from kvferry.testing.recorded import pytest_configure
from kvferry.testing.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_configure", "pytest_make_collect_report", "pytest_runtest_makereport"]

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of tests/vllm/test_cells.py, and where results are kept."""
    recorded.pytest_addoption(parser)
    group = parser.getgroup("kvferry")
    group.addoption("--cells", choices=["core", "all"], default="core", help="cells of real engines: the core, or all")
    group.addoption("--cell-results", metavar="FILE", help="add a JSON line for each cell to this file")


@pytest.fixture(autouse=True)
def tables_of_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal that a run was started from must not decide how wide the tables of its answers are."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this run builds its tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineForge]:
    """The warm process that engines are forked from."""
    with warm_forge(tmp_path_factory.mktemp("forge") / "forge.log") as warm:
        yield warm
