"""How digests see memory: the rows of one component, read where they lie.

A reader gathers rows, cut to a box of coordinates, in canonical order: one after the other, inside a row by the axes'
names. It gives their bytes, or of each row its *sums*: 16 bytes that stand for it. Of memory on a device the sums are
made there (:mod:`kvferry.vllm.device_pages`), so that no page has to leave it to be compared.

**Sums.** A row is filled up with zeros to whole words: little-endian, signed, 32 bits. Sum ``j`` is the sum over words
``i`` of ``word[i] * key[i][j]``, modulo 2**64. The keys are odd and fixed (SplitMix64), so a row with one other word
always has other sums. Rows that differ in more words have both sums equal with a chance of at most 2**-64, taken over
the keys, of which a fault knows nothing: at most 2**-(63 - v) for each of the two, where 2**v, 31 being the largest v,
divides the differences of all words. Someone who looks for equal sums finds them. They are the work of a few vector
operations on any device, with the same result everywhere, which a cryptographic hash is not.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import TOKEN, Axis, Binding, Component, Placed

Int64s = NDArray[np.int64]
Box = tuple[slice, ...]
"""Of each global axis of a component, in their order, which of its own coordinates: counted from its first."""

WORD: Final = 4
"""Bytes of what a sum is made of."""
SUMS: Final = 2
"""Of each row; 8 bytes each."""

_SUMMED_BYTES: Final = 1 << 20
"""Of rows that are widened to 64 bits at once: what a cache of the CPU holds."""

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one component in one memory, in order of position."""

    block: Int64s
    kernel_block: Int64s
    row: Int64s
    position: Int64s
    """Of the first hashed token of each row; of a state, the number of tokens that it is the state of."""

    @property
    def count(self) -> int:
        """How many."""
        return int(self.block.size)

    def at(self, index: "slice | Int64s") -> "Rows":
        """Some of them."""
        return Rows(self.block[index], self.kernel_block[index], self.row[index], self.position[index])


class PageReader(Protocol):
    """Reads one rank's pages, at least one row at a time. Used by several threads at once."""

    def rows(self, placed: Placed, rows: Rows, box: Box) -> NDArray[np.uint8]:
        """Their bytes, ``[row, byte]``, in memory of the CPU."""

    def sums(self, placed: Placed, rows: Rows, box: Box) -> NDArray[np.uint8]:
        """What stands for them, ``[row, 16]``, in memory of the CPU."""


class HostPages:
    """Pages in memory of the CPU."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def rows(self, placed: Placed, rows: Rows, box: Box) -> NDArray[np.uint8]:
        """Gathered by NumPy, without Python's lock."""
        component = placed.component
        cells = cells_of(component, self._binding.bases[placed.storage] + component.address)
        found = cells[(slice(None), slice(None), slice(None), *box)][rows.block, rows.kernel_block, rows.row]
        return np.ascontiguousarray(found).reshape(rows.count, -1)

    def sums(self, placed: Placed, rows: Rows, box: Box) -> NDArray[np.uint8]:
        """By :func:`row_sums`."""
        return row_sums(self.rows(placed, rows, box))


def row_sums(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The sums of rows ``[row, byte]``, as little-endian bytes ``[row, 16]``."""
    step = max(1, _SUMMED_BYTES // rows.shape[1])
    sums = np.concatenate([_summed(rows[begin : begin + step]) for begin in range(0, rows.shape[0], step)])
    found: NDArray[np.uint8] = sums.astype("<i8", copy=False).view(np.uint8)
    return found


def _summed(rows: NDArray[np.uint8]) -> Int64s:
    lacking = -rows.shape[1] % WORD
    whole = np.pad(rows, ((0, 0), (0, lacking))) if lacking else np.ascontiguousarray(rows)
    words = whole.view("<i4").astype(np.int64)
    return words @ sum_keys(words.shape[1])


@functools.lru_cache(maxsize=64)
def sum_keys(words: int) -> Int64s:
    """The keys of rows of so many words, ``[word, sum]``; those of a longer row begin with them."""
    return (split_mix(words * SUMS) | np.uint64(1)).view(np.int64).reshape(words, SUMS)


def split_mix(count: int, *, state: int = 0) -> NDArray[np.uint64]:
    """The first numbers of SplitMix64 from a state: equal on every machine and in every version of NumPy."""
    value = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN + np.uint64(state)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class CellShape:
    """A component as an array ``[block, kernel block, row, *global axes by name, content byte]``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""

    @classmethod
    def of(cls, component: Component) -> "CellShape":
        """As the layout says."""
        axes = (token_axis(component), *component.global_axes)
        return cls(
            (component.num_blocks, component.pages, *(a.count for a in axes), component.content.nbytes),
            (component.block_stride, component.page_stride, *(a.stride for a in axes), 1),
        )


def cells_of(component: Component, address: int) -> NDArray[np.uint8]:
    """The component, which begins at ``address`` of the CPU's memory, as :class:`CellShape` says."""
    cells = CellShape.of(component)
    memory: Any = (ctypes.c_uint8 * (component.stop - component.address)).from_address(address)
    return np.ndarray(cells.shape, np.uint8, buffer=memory, strides=cells.strides)


def token_axis(component: Component) -> Axis:
    """The axis of rows; a state is one row."""
    return component.token_axis or Axis(TOKEN, 0, 1, 1, 1)
