"""Box algebra against sets of points."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.boxes import Box, Interval, intersect, remainder, subtract, volume

intervals = st.tuples(st.integers(0, 4), st.integers(1, 4)).map(lambda p: Interval(p[0], p[0] + p[1]))
boxes = st.tuples(intervals, intervals)


def points(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(i.start, i.stop) for i in box)))


@given(boxes, boxes)
def test_intersection_is_that_of_the_points(one: Box, other: Box) -> None:
    met = intersect(one, other)
    assert (points(met) if met else set()) == points(one) & points(other)


@given(boxes, boxes)
def test_subtraction_leaves_disjoint_boxes_of_the_right_points(one: Box, hole: Box) -> None:
    parts = list(subtract(one, hole))
    assert set().union(*(points(p) for p in parts)) == points(one) - points(hole)
    assert sum(volume(p) for p in parts) == len(points(one) - points(hole))


@given(st.lists(boxes, max_size=4), boxes)
def test_remainder_empties_when_everything_is_taken(holes: list[Box], whole: Box) -> None:
    left = [whole]
    for hole in holes:
        left = remainder(left, hole)
    expected = points(whole).difference(*(points(h) for h in holes))
    assert sum(volume(p) for p in left) == len(expected)


def test_a_component_without_global_axes_is_one_point() -> None:
    assert volume(()) == 1
    assert intersect((), ()) == ()
    assert list(subtract((), ())) == []
