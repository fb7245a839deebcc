"""The fold must name the same bytes; what it calls nested must be disjoint."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout import Loop, nest_of

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
