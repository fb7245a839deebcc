"""Context parallel against a list of positions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout import ContextParallel
from kvferry.plan.shares import held_by, local_index, meets


@st.composite
def shares(draw: st.DrawFn) -> ContextParallel:
    size = draw(st.integers(1, 5))
    return ContextParallel(draw(st.integers(0, size - 1)), size, draw(st.integers(1, 6)))


def positions_of(share: ContextParallel, stop: int) -> list[int]:
    return [p for p in range(stop) if (p // share.interleave) % share.size == share.rank]


SMALL = [ContextParallel(r, size, turn) for size in (1, 2, 3, 4) for turn in (1, 2, 3, 4, 6) for r in range(size)]


@pytest.mark.parametrize("one", SMALL, ids=lambda s: f"{s.rank}of{s.size}by{s.interleave}")
def test_two_shares_meet_where_a_position_is_held_by_both(one: ContextParallel) -> None:
    for other in SMALL:
        period = one.interleave * one.size * other.interleave * other.size
        common = set(positions_of(one, period)) & set(positions_of(other, period))
        assert meets(one, other) == bool(common), other


def test_a_rank_that_holds_everything_meets_any() -> None:
    assert meets(None, ContextParallel(1, 2, 4))
    assert meets(None, None)


@given(shares())
def test_local_index_counts_the_positions_held(share: ContextParallel) -> None:
    held = positions_of(share, 120)
    assert local_index(np.array(held, dtype=np.int64), share).tolist() == list(range(len(held)))
    every = np.arange(120, dtype=np.int64)
    assert every[held_by(every, share)].tolist() == held


def test_l38_which_producers_a_rank_reads_from() -> None:
    """P dcp4, D dcp2, interleave 1: D0 reads {P0, P2}, D1 {P1, P3}."""
    reads = [[p for p in range(4) if meets(ContextParallel(p, 4, 1), ContextParallel(d, 2, 1))] for d in range(2)]
    assert reads == [[0, 2], [1, 3]]
