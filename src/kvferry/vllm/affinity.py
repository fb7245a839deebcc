"""Threads of ours are not pinned to the core on which vLLM computes.

vLLM's CPU backend pins a worker's main thread to one core, and a thread inherits the pinning of the one that starts
it. Ours would then get that core only while the model leaves it idle: with two engines on two cores, the first
connection took a minute, and peers were taken for lost that were only starved.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_any_core() -> Iterator[None]:
    """Inside, a calling thread that is pinned to one core may start threads that run wherever its parent may.

    The parent process is asked, not the machine, so that an operator's own limits stay. A thread with several cores
    is left alone: those may be the ones near a device.
    """
    pinned = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(pinned) != 1:
        yield
        return
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)
