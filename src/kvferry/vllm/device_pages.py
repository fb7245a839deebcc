"""Reading pages on a device for digests: rows are gathered there, and their sums are made there.

Which rows is said by the layout, as for memory of the CPU (:mod:`kvferry.runtime.page_reading`); here vLLM's own
tensors give access to it. To compare pages, only 16 bytes of each row come to the CPU. The work goes to a stream that
is not the model's, so it neither waits for the model nor holds it up: what it reads is done, as the runtime sees to
(pages that are published and valid, pages that have come). A call returns when its result is on the CPU.

A thread keeps its stream. Torch deals out the same 32 streams of a device over and over, the model's perhaps among
them, and keeps the memory that was used on one for that one alone: a new stream for each call would in time hold 32
times what one needs.

Every step is an operation that torch has for each kind of device, so memory of the CPU can be read in this way too;
that is how it is tested where there is no device.
"""

import functools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Binding, BoundLayout, Component, Placed
from kvferry.runtime.page_reading import SUMS, WORD, Box, CellShape, PageReader, Rows, sum_keys
from kvferry.vllm.layouts.extract import Caches, tensors_of

CHUNK_BYTES: Final = 2 << 20
"""Of rows gathered at once, or one row where that is more. Making sums takes five times as much on the device, for
each hashing thread, and four times a row once for all (the keys)."""

_UNITS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""What bytes are gathered as: the widest element that all rows begin and end on."""


@dataclass(frozen=True, slots=True)
class _Span:
    """One allocation, which torch owns."""

    start: int
    stop: int
    storage: "torch.UntypedStorage"


class DevicePages:
    """Pages in tensors of one device."""

    def __init__(self, tensors: "Iterable[torch.Tensor]", binding: Binding) -> None:
        storages = {one.data_ptr(): one for one in (tensor.untyped_storage() for tensor in tensors)}
        self._spans = [_Span(start, start + one.nbytes(), one) for start, one in storages.items()]
        self._binding = binding
        self._keys = functools.lru_cache(maxsize=64)(self._keys_for)
        self._of_thread = threading.local()

    def rows(self, placed: Placed, rows: Rows, box: Box) -> NDArray[np.uint8]:
        """Their bytes, ``[row, byte]``."""
        memory = self._memory_of(placed, box)
        with self._stream(memory.device):
            return np.concatenate([_gathered(memory, part).cpu().numpy() for part in _parts(memory, rows)])

    def sums(self, placed: Placed, rows: Rows, box: Box) -> NDArray[np.uint8]:
        """Their sums, ``[row, 16]``, as :func:`kvferry.runtime.page_reading.row_sums` makes them of bytes."""
        memory = self._memory_of(placed, box)
        with self._stream(memory.device):
            keys = self._keys(-(-_row_bytes(memory) // WORD), memory.device)  # held until all that reads it is done
            sums = torch.cat([_summed(_gathered(memory, part), keys) for part in _parts(memory, rows)]).cpu()
        found: NDArray[np.uint8] = sums.numpy().astype("<i8", copy=False).view(np.uint8)
        return found

    def _stream(self, device: "torch.device") -> "torch.Stream":
        """That of the calling thread."""
        streams = self._of_thread.__dict__
        if device not in streams:
            streams[device] = torch.Stream(device=device)
        stream: torch.Stream = streams[device]
        return stream

    def _memory_of(self, placed: Placed, box: Box) -> "torch.Tensor":
        """A component, cut to ``box``: ``[block, kernel block, row, *global axes by name, unit of content]``."""
        component = placed.component
        begin = self._binding.bases[placed.storage] + component.address
        end = begin + component.stop - component.address
        span = next((one for one in self._spans if one.start <= begin and end <= one.stop), None)
        if span is None:
            raise PlanError(
                PlanReason.OUTSIDE_REGION,
                f"layer {component.layer} component {component.component} lies at [{begin:#x}, {end:#x}), in none of "
                f"the {len(self._spans)} allocations of the engine's cache",
            )
        cells, unit = CellShape.of(component), _unit_of(component, span, begin)
        size = (*cells.shape[:-1], cells.shape[-1] // unit)
        stride = (*(one // unit for one in cells.strides[:-1]), 1)
        blank = torch.empty(0, dtype=_UNITS[unit], device=span.storage.device)
        whole = blank.set_(span.storage, (begin - span.start) // unit, size, stride)
        return whole[(slice(None), slice(None), slice(None), *box)]

    @staticmethod
    def _keys_for(words: int, device: "torch.device") -> "torch.Tensor":
        return torch.from_numpy(sum_keys(words)).to(device)


def device_pages_of(kv_caches: Caches, bound: BoundLayout) -> PageReader | None:
    """The reader of a rank's pages on a device; ``None`` where they are in memory of the CPU."""
    if bound.placement.on_host:
        return None
    return DevicePages((tensor for cache in kv_caches.values() for tensor in tensors_of(cache)), bound.binding)


def _unit_of(component: Component, span: _Span, begin: int) -> int:
    cells = CellShape.of(component)
    numbers = (span.start, begin, cells.shape[-1], *cells.strides[:-1])
    return next(unit for unit in _UNITS if all(number % unit == 0 for number in numbers))


def _gathered(memory: "torch.Tensor", rows: Rows) -> "torch.Tensor":
    """Some rows as bytes ``[row, byte]``, one after the other, on the device."""
    index = tuple(torch.from_numpy(one).to(memory.device) for one in (rows.block, rows.kernel_block, rows.row))
    return memory[index].reshape(rows.count, -1).view(torch.uint8)


def _summed(rows: "torch.Tensor", keys: "torch.Tensor") -> "torch.Tensor":
    """Sums ``[row, sum]`` of bytes ``[row, byte]``."""
    lacking = -rows.shape[1] % WORD
    whole = torch.nn.functional.pad(rows, (0, lacking)) if lacking else rows
    words = whole.view(torch.int32).to(torch.int64)
    return torch.stack([(words * keys[:, place]).sum(1) for place in range(SUMS)], dim=1)


def _row_bytes(memory: "torch.Tensor") -> int:
    return memory[0, 0, 0].numel() * memory.element_size()


def _parts(memory: "torch.Tensor", rows: Rows) -> Iterator[Rows]:
    """The rows in parts of about :data:`CHUNK_BYTES`; refused where the memory has no such row.

    A device that is asked for a place which its tensor does not have is lost for all who use it.
    """
    for index, count in zip((rows.block, rows.kernel_block, rows.row), memory.shape, strict=False):
        if index.min() < 0 or index.max() >= count:
            raise PlanError(
                PlanReason.INVALID_REQUEST,
                f"{index.min()} to {index.max()} are not all among the {count} that the cache has",
            )
    step = max(1, CHUNK_BYTES // _row_bytes(memory))
    for begin in range(0, rows.count, step):
        yield rows.at(slice(begin, begin + step))
