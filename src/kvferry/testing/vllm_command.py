"""vLLM's own command line in a process that the forge has forked: ``vllm serve`` without its minute of importing.

Nothing of vLLM is left out: the API server, its engine cores (one for each data parallel rank) and their workers are
processes as in a deployment. The one difference is how they come about: vLLM spawns them on a CPU, so that each would
import it all again; here they are forked.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence


def run_command(arguments: Sequence[str]) -> None:
    """Be ``vllm ARGUMENTS``: the leader of a process group, with all that is printed in the log."""
    os.setsid()
    os.dup2(2, 1)
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the forge's: engines with their core in one process
    fork_children()
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main

    main()


def fork_children() -> None:
    """Let this process's engine cores, their coordinator and workers be forked from it."""
    from vllm.v1.engine import coordinator
    from vllm.v1.engine import utils as engine_cores
    from vllm.v1.executor import multiproc_executor

    for module in (coordinator, engine_cores, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
