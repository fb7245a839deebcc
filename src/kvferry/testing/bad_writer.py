"""A vLLM producer whose first writes are wrong: its transport misbehaves, nothing else is changed.

For tests of what a whole engine does when bytes arrive that nobody computed. It must be installed in the engine's
process before the engine is built.
"""

from dataclasses import replace
from typing import Any

from kvferry.runtime import RuntimeOptions
from kvferry.testing.faulty import Corrupt, FaultyTransport, Misdeeds
from kvferry.vllm import worker
from kvferry.vllm.endpoint import read_options as read

ALL_OF_IT = 1 << 30
"""More bytes than a row has."""


def install_bad_writes(count: int) -> None:
    """Make the next ``count`` writes of this process's producer say that they are done, with one row spoilt in each."""
    misdeeds = Misdeeds(*[Corrupt(nbytes=ALL_OF_IT)] * count)

    def read_options(*args: Any, **options: Any) -> RuntimeOptions:
        found = read(*args, **options)
        return replace(found, make_transport=lambda: FaultyTransport(found.make_transport(), misdeeds))

    worker.read_options = read_options  # type: ignore[attr-defined]  # the name that the worker calls
