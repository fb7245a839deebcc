"""Context parallel: which positions a rank holds, and where in its own table they lie.

A rank of a share ``(rank, size, interleave)`` holds the positions ``p`` with ``(p // interleave) % size == rank``, in
order. So position ``p`` is number ``p // (interleave * size) * interleave + p % interleave`` of those the rank holds,
and table entry ``p // (block_tokens * size)``. None stands for a rank that holds every position.
"""

from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import ContextParallel
from kvferry.layout.nest import Int64s


def meets(one: ContextParallel | None, other: ContextParallel | None) -> bool:
    """Whether any position is held by both.

    The rank's share of ``one`` begins at ``rank * interleave`` modulo its period; seen modulo the period of ``other``
    these starts are all numbers congruent to it modulo the gcd of the periods. One of them must fall where a stretch of
    ``one`` reaches the stretch of ``other``: a window of ``one.interleave + other.interleave - 1`` numbers.
    """
    if one is None or other is None:
        return True
    step = gcd(one.interleave * one.size, other.interleave * other.size)
    lowest = other.rank * other.interleave - one.interleave + 1
    highest = (other.rank + 1) * other.interleave - 1
    first = lowest + (one.rank * one.interleave - lowest) % step
    return first <= highest


def held_by(positions: Int64s, share: ContextParallel) -> NDArray[np.bool_]:
    """Boolean mask of the ``positions`` that the rank holds."""
    return np.equal(positions // share.interleave % share.size, share.rank)


def local_index(positions: Int64s, share: ContextParallel | None) -> Int64s:
    """Number of each position among those the rank holds; the positions must be held by it."""
    if share is None:
        return positions
    return positions // (share.interleave * share.size) * share.interleave + positions % share.interleave
