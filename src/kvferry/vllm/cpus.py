"""On which CPUs the connector's threads run, beside threads that are bound to theirs.

vLLM for the CPU binds each computing thread of a worker to one core. The first of them is the worker's main thread, and
whatever thread is started from it inherits its one core: the connector's loop, ZeroMQ's heartbeats, the transfer
engine. vLLM does leave a core free for them, but puts nothing there. On its computing core a heartbeat waits behind the
computation, and where two engines of one host are bound to the same core, behind both: peers then count as lost.

So the connector's first thread gives itself back the CPUs that the worker had before it was bound: those of the process
that started it, which is not bound. All others are started from that one. Nothing else about the binding is touched,
and where vLLM has bound nothing, nothing is done: CPUs that an operator chose stay chosen.
"""

import os
from collections.abc import Callable, Mapping, Set
from typing import Final

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

BINDINGS: Final = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")
"""With one of these variables vLLM tells a worker's OpenMP library to bind."""

Enter = Callable[[], None]


def cpus_beside(environ: Mapping[str, str], *, bound: Set[int], starter: Set[int]) -> frozenset[int] | None:
    """The CPUs for the connector's threads; ``None`` where they are as they should be.

    ``bound``: those of the main thread; ``starter``: those of the process that started this one.

    >>> cpus_beside({"GOMP_CPU_AFFINITY": "0 1"}, bound={0}, starter={0, 1, 2})
    frozenset({0, 1, 2})
    >>> cpus_beside({}, bound={0}, starter={0, 1, 2})
    """
    if not any(environ.get(name) for name in BINDINGS) or not bound < starter:
        return None
    return frozenset(starter)


def with_cpus(enter: Enter | None) -> Enter | None:
    """What each of the connector's threads does first: ``enter``, and take the CPUs that are meant for it."""
    if not hasattr(os, "sched_setaffinity"):  # threads are bound on Linux only
        return enter
    bound = os.sched_getaffinity(0)
    cpus = cpus_beside(os.environ, bound=bound, starter=_of_starter())
    if cpus is None:
        return enter
    logger.info("kvferry: vLLM computes on CPUs %s, the connector's threads use %s", sorted(bound), sorted(cpus))

    def enter_on_cpus() -> None:
        os.sched_setaffinity(0, cpus)
        if enter is not None:
            enter()

    return enter_on_cpus


def _of_starter() -> Set[int]:
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended, or is not ours to look at
        return frozenset()
