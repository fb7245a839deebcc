"""The fold must name the same bytes; what it calls nested must be disjoint."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout import Loop, nest_of
from kvferry.layout.nest import Nest

loops = st.lists(st.builds(Loop, st.integers(1, 4), st.integers(1, 40)), max_size=4)
runs = st.integers(1, 9)


def every_byte(loops: list[Loop], run: int) -> list[int]:
    steps = [[i * loop.stride for i in range(loop.count)] for loop in loops]
    return sorted(sum(combination) + byte for combination in product(*steps) for byte in range(run))


@given(loops, runs)
def test_fold_keeps_every_byte_as_often_as_it_was(loops: list[Loop], run: int) -> None:
    nest = nest_of(loops, run)
    folded = sorted(int(start) + byte for start in nest.offsets() for byte in range(nest.run))
    assert folded == every_byte(loops, run)
    assert nest.runs * nest.run == len(folded)
    assert nest.reach == folded[-1] + 1


@given(loops, runs)
def test_nested_is_disjoint(loops: list[Loop], run: int) -> None:
    every = every_byte(loops, run)
    if nest_of(loops, run).is_nested:
        assert len(set(every)) == len(every)


def test_interleaved_combs_are_not_nested_yet_disjoint() -> None:
    comb = [Loop(2, 3), Loop(3, 2)]
    assert not nest_of(comb, 1).is_nested
    assert every_byte(comb, 1) == [0, 2, 3, 4, 5, 7]


@pytest.mark.parametrize(
    ("listed", "run", "folded"),
    [
        ([Loop(12, 768), Loop(64, 12)], 12, Nest((), 9216)),
        ([Loop(2, 30), Loop(3, 10)], 5, Nest((Loop(6, 10),), 5)),
        ([Loop(2, 50), Loop(1, 7), Loop(5, 10)], 10, Nest((), 100)),
        ([Loop(2, 31), Loop(3, 10)], 5, Nest((Loop(3, 10), Loop(2, 31)), 5)),
    ],
)
def test_what_is_folded(listed: list[Loop], run: int, folded: Nest) -> None:
    assert nest_of(listed, run) == folded


def test_a_stride_equal_to_the_reach_below_it_is_nested() -> None:
    """Three steps of 10 around 5 bytes reach to 25: a loop of that stride, which is no fold of them, clears them."""
    tight, loose = nest_of([Loop(2, 25), Loop(3, 10)], 5), nest_of([Loop(2, 24), Loop(3, 10)], 5)
    assert (tight.loops, tight.runs, tight.reach, tight.is_nested) == ((Loop(3, 10), Loop(2, 25)), 6, 50, True)
    assert not loose.is_nested
    # 50 would fold into the loop of 25; a third loop at 51 clears both, and at 49 it does not.
    assert nest_of([Loop(2, 25), Loop(3, 10), Loop(3, 51)], 5).is_nested
    assert not nest_of([Loop(2, 25), Loop(3, 10), Loop(3, 49)], 5).is_nested
