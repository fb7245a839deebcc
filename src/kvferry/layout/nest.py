"""Loop nests of bytes: the geometry that checking and planning share.

A nest is a set of loops ``(count, stride)`` around a contiguous run of bytes; it names the set of offsets
``sum(i_k * stride_k) + [0, run)``. Since a set has no order, loops are folded in whatever order folds best:

* a loop whose stride equals the run lengthens the run;
* two loops are one where the outer stride is the inner count times the inner stride.

A folded nest is *nested* when, in order of stride, every stride is at least the reach of all loops inside it. Nested
implies disjoint, so most layouts are proven without enumerating anything. The reverse does not hold (loops of 2 with
stride 3 and 3 with stride 2 interleave and may be disjoint), so what is not nested is enumerated and sorted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Loop:
    """``count`` steps of ``stride`` bytes."""

    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Nest:
    """Loops in order of stride around a run of ``run`` bytes; always folded."""

    loops: tuple[Loop, ...]
    run: int

    @property
    def runs(self) -> int:
        """How many runs the nest has."""
        return prod(loop.count for loop in self.loops)

    @property
    def reach(self) -> int:
        """Bytes from the first to one past the last."""
        return sum((loop.count - 1) * loop.stride for loop in self.loops) + self.run

    @property
    def is_nested(self) -> bool:
        """Whether the strides alone prove that no two runs share a byte."""
        reach = self.run
        for loop in self.loops:
            if loop.stride < reach:
                return False
            reach += (loop.count - 1) * loop.stride
        return True

    def offsets(self) -> Int64s:
        """Start of every run, int64, unsorted."""
        return spread(((loop.count, loop.stride) for loop in self.loops), 0)


def nest_of(loops: Iterable[Loop], run: int) -> Nest:
    """Fold ``loops`` around ``run`` bytes.

    >>> nest_of([Loop(12, 768), Loop(64, 12)], 12)
    Nest(loops=(), run=9216)
    >>> nest_of([Loop(3, 100), Loop(2, 10)], 10)
    Nest(loops=(Loop(count=3, stride=100),), run=20)
    """
    folded: list[Loop] = []
    for loop in sorted((x for x in loops if x.count > 1), key=lambda x: (x.stride, x.count)):
        if not folded and loop.stride == run:
            run *= loop.count
        elif folded and loop.stride == folded[-1].count * folded[-1].stride:
            folded[-1] = Loop(folded[-1].count * loop.count, folded[-1].stride)
        else:
            folded.append(loop)
    return Nest(tuple(folded), run)


def spread(loops: Iterable[tuple[int, int]], origin: int) -> Int64s:
    """Every ``origin + sum(i_k * stride_k)``, last loop fastest, int64 of shape ``[prod(counts)]``."""
    out = np.full(1, origin, dtype=np.int64)
    for count, stride in loops:
        steps = np.arange(count, dtype=np.int64) * stride
        out = (out[:, None] + steps[None, :]).ravel()
    return out
