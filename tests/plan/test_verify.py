"""The brute check of finished plans."""

import pytest

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Region
from kvferry.plan import Descriptors, verify_descriptors

HERE, THERE = [Region(100, 50), Region(150, 50)], [Region(1000, 100)]


@pytest.mark.parametrize(
    ("src", "dst", "said"),
    [
        (99, 1000, r"source \[99, 109\)"),
        (141, 1000, r"source \[141, 151\)"),
        (191, 1000, r"source \[191, 201\)"),
        (100, 999, r"destination \[999, 1009\)"),
        (100, 1091, r"destination \[1091, 1101\)"),
    ],
)
def test_outside_one_region(src: int, dst: int, said: str) -> None:
    with pytest.raises(PlanError, match=said) as refused:
        verify_descriptors(Descriptors.of([src], [dst], [10]), src=HERE, dst=THERE)
    assert refused.value.reason is PlanReason.OUTSIDE_REGION


def test_the_edges_of_regions_belong_to_them() -> None:
    rows = Descriptors.of([100, 140, 150, 190], [1000, 1010, 1080, 1090], [10] * 4)
    verify_descriptors(rows, src=HERE, dst=THERE)
    verify_descriptors(rows, src=HERE[::-1], dst=THERE)
    verify_descriptors(Descriptors.empty(), src=[], dst=[])


@pytest.mark.parametrize("second", [1000, 1001, 1009])
def test_a_byte_written_twice(second: int) -> None:
    with pytest.raises(PlanError, match=f"write byte {second}") as refused:
        verify_descriptors(Descriptors.of([120, 100], [second, 1000], [10, 10]), src=HERE, dst=THERE)
    assert refused.value.reason is PlanReason.OVERLAPPING_MEMORY
