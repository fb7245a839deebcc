"""What a runtime's first thread is given, all its threads have: those of ZeroMQ and of the transfer engine too."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.runtime import ConsumerRuntime, ProducerRuntime

from .worlds import World, local_side, options_for

HERE = Path("/proc/self/task")


def cpus_of(task: str) -> set[int]:
    return os.sched_getaffinity(int(task))


def tasks() -> set[str]:
    return {path.name for path in HERE.iterdir()}


@pytest.mark.mooncake
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(("role", "at_least"), [(ProducerRuntime, 4), (ConsumerRuntime, 1)])
def test_all_threads_of_a_runtime_run_where_the_first_one_does(
    role: type[ProducerRuntime] | type[ConsumerRuntime], at_least: int
) -> None:
    pytest.importorskip("mooncake.engine")  # its import starts threads of its own, which belong to nobody
    mine = os.sched_getaffinity(0)
    chosen = {max(mine)}
    before = tasks()
    side = local_side(World.build("small"), engine="e", epoch="e")
    options = replace(options_for("mooncake"), enter_thread=lambda: os.sched_setaffinity(0, chosen))
    runtime = role(side, options)
    try:
        new = tasks() - before
        assert len(new) >= at_least
        assert {task: cpus_of(task) for task in new} == dict.fromkeys(new, chosen)
        assert cpus_of(str(threading.get_native_id())) == mine
    finally:
        runtime.close()
