"""Under CI a skipped test is a failed one, unless its reason lies in the machine.

A test that skips itself where a package is missing is a kindness to somebody who has installed half of the project. On
the machine that decides whether a change is right it hides a set-up that was lost: everything is green, and nothing was
run. So with ``CI=true`` in the environment each skip fails, of a test or of a whole module, but for those of
:data:`OF_THE_MACHINE`, where no set-up could make up for what is missing, and :data:`OF_ANOTHER_RUN`.

These are hooks for pytest: a ``conftest.py`` imports them, or ``-p kvferry.testing.skips`` loads them.
"""

import os
from collections.abc import Generator, Mapping
from typing import Final

import pytest

VARIABLE: Final = "CI"

OF_THE_MACHINE: Final = frozenset(
    {
        "needs two CPUs",
        "no IPv6 here",
        "this host has RDMA devices",
        "this engine is built for CUDA",
        "vLLM has no 8-bit cache on a CPU without AVX-512",
        "closing a receiver of this transport is no fence, and it says so",
    }
)
"""Reasons for which a test may be skipped anywhere."""

OF_ANOTHER_RUN: Final = frozenset(
    {
        "runs with --cells all",
        "vllm-router is not installed: `make test-vllm` and `make load-routers` do it",
        "this release of vLLM sends its regions with each pull",
    }
)
"""What tests say that are left to ``make test-vllm`` or ``make test-release``: nothing is missing of this one."""


def skips_fail(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this run decides."""
    return environ.get(VARIABLE, "").lower() not in ("", "0", "false")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself whole."""
    report = yield
    _hold(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test, by a mark, a fixture or its own word."""
    report = yield
    _hold(report)
    return report


def _hold(report: pytest.CollectReport | pytest.TestReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not skips_fail():
        return
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = said.removeprefix("Skipped: ")
    if reason in OF_THE_MACHINE | OF_ANOTHER_RUN:
        return
    report.outcome = "failed"
    report.longrepr = f"skipped, which is a failure with {VARIABLE} set, for a lost set-up looks the same: {reason}"
