"""How far a device has got with its work, and which device a thread works on.

The engines that move caches read and write memory outside the device's streams. What vLLM has *submitted* when it
calls the connector is not yet *done*: a page that is published may still be computed, and a block that a fetch is to
fill may still be written for the request that had it before (vLLM plans a step ahead) or be zeroed. So the worker takes
a mark at such a point, and the runtime (:mod:`kvferry.runtime.gate`) lets no byte move until the mark is passed. Nobody
waits on vLLM's thread. On the CPU the work is done when the call returns, and there are no marks.

What is current on a device is kept for each thread. A thread that touches a device's memory without having chosen it
works on device 0, and costs a context there; so every thread of ours enters first.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from kvferry.errors import ConfigError, ConfigReason
from kvferry.runtime import Ready

CPU = "cpu"


class Fence(Protocol):
    """The memory's device."""

    def mark(self) -> Ready | None:
        """A mark behind all work submitted until now by this thread; ``None`` where that is done already."""

    @property
    def enter_thread(self) -> Callable[[], None] | None:
        """Makes the device current in the thread that calls it; ``None`` where there is nothing to choose."""


class HostFence:
    """Memory of the CPU."""

    enter_thread = None

    def mark(self) -> None:
        """Work is done when the call that asked for it returns."""


class DeviceFence:
    """Memory of one device, which torch knows under ``device``."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def mark(self) -> Ready:
        """An event on the current stream; asked, never waited for."""
        event = torch.Event(device=self._device)
        event.record()
        return event.query

    @property
    def enter_thread(self) -> Callable[[], None]:
        """Sets the device index of the calling thread."""
        return lambda: torch.accelerator.set_device_index(self._device)


def fence_of(memories: Iterable[str]) -> Fence:
    """The fence for the memories of one rank's layout: the CPU's, a device's, or a refusal of two devices.

    >>> fence_of(["cpu"]).mark() is None
    True
    >>> fence_of(["cuda:0", "cuda:1"])
    Traceback (most recent call last):
    ...
    kvferry.errors.ConfigError: unsupported-model: the cache of one rank lies on cuda:0 and cuda:1; ...
    """
    devices = sorted(set(memories) - {CPU})
    if not devices:
        return HostFence()
    if len(devices) > 1:
        raise ConfigError(
            ConfigReason.UNSUPPORTED_MODEL,
            f"the cache of one rank lies on {' and '.join(devices)}; kvferry awaits the work of one device a rank",
        )
    return DeviceFence(devices[0])
