"""The connector's threads get the CPUs back that vLLM's binding of computing threads took from them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from kvferry.vllm.cpus import cpus_beside

ALL = frozenset(range(8))

STARTED = """
import os, sys
from kvferry.vllm.cpus import with_cpus
first = min(os.sched_getaffinity(0))
if sys.argv[1] == "bound":
    os.environ["GOMP_CPU_AFFINITY"] = str(first)
    os.sched_setaffinity(0, {first})
enter = with_cpus(None)
if enter is not None:
    enter()
print(sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize("name", ["GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND"])
def test_a_bound_worker_gives_its_starters_cpus(name: str) -> None:
    assert cpus_beside({name: "true"}, bound={3}, starter=ALL) == ALL


@pytest.mark.parametrize(
    ("environ", "bound", "starter"),
    [
        ({}, {3}, ALL),  # nobody bound it but the operator
        ({"GOMP_CPU_AFFINITY": ""}, {3}, ALL),
        ({"OMP_PROC_BIND": "true"}, ALL, ALL),  # bound to all there is
        ({"OMP_PROC_BIND": "true"}, {3}, frozenset()),  # the starter is gone
        ({"OMP_PROC_BIND": "true"}, {3, 4}, {0, 1}),  # somebody moved it elsewhere on purpose
    ],
)
def test_otherwise_nothing_is_changed(environ: dict[str, str], bound: set[int], starter: frozenset[int]) -> None:
    assert cpus_beside(environ, bound=bound, starter=starter) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_in_a_process_that_was_started_and_then_bound() -> None:
    assert started("bound") == str(sorted(os.sched_getaffinity(0)))


def test_in_a_process_that_was_pinned_by_its_operator() -> None:
    one = min(os.sched_getaffinity(0))
    assert started("free", prefix=("taskset", "-c", str(one))) == f"[{one}]"


def started(how: str, prefix: tuple[str, ...] = ()) -> str:
    command = [*prefix, sys.executable, "-W", "ignore", "-c", STARTED, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()[-1]
