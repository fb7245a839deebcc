"""The edges of the checks, by value: the last case that is allowed, the first that is not, and what each names."""

import msgspec
import pytest

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Axis, Component, Content, Group, Region, check_layout
from kvferry.layout import check as room
from kvferry.layout.check import clusters_of
from kvferry.testing.layouts import at, page, worker


def one_axis(*, rows: int, stride: int, nbytes: int, blocks: int = 1, block_stride: int = 1000) -> Component:
    """A component of plain rows, at address 100."""
    axes = (Axis("token", 0, rows, rows, stride),)
    return Component("l0", 0, "kv", 0, 100, blocks, block_stride, axes, Content(nbytes, "x"), 1, 0, 1)


def refused(components: list[Component], groups: list[Group]) -> str:
    """The message, without its reason, after the memory rule has refused."""
    with pytest.raises(PlanError) as caught:
        check_layout(worker(components, groups=groups))
    assert caught.value.reason is PlanReason.OVERLAPPING_MEMORY
    return caught.value.message


def test_two_kernel_blocks_need_a_stride_and_one_byte_is_one() -> None:
    """The stride may be left at 0 by one kernel block, and by no other number of them."""
    alone = page("l0", tokens=1, nbytes=1, kernel_blocks=1, block_stride=8)
    two = page("l0", tokens=1, nbytes=1, kernel_blocks=2, kernel_stride=1, block_stride=8)
    check_layout(worker([msgspec.structs.replace(alone, kernel_stride=0)]))
    check_layout(worker([two]))
    with pytest.raises(PlanError, match="kernel_stride is 0 with kernel_blocks 2") as caught:
        check_layout(worker([msgspec.structs.replace(two, kernel_stride=0)]))
    assert caught.value.reason is PlanReason.INVALID_LAYOUT


def test_a_component_that_fills_its_region_is_inside_without_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ENUMERATION_LIMIT", 0)
    dense = page("l0", tokens=4, nbytes=8, num_blocks=2, address=64)
    check_layout(worker([dense], regions=[Region(64, 64)]))
    with pytest.raises(PlanError, match="would enumerate 1 runs, over 0"):
        check_layout(worker([dense], regions=[Region(64, 63)]))


def test_what_is_enumerated_to_find_a_region_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks in regions of their own: nested, so nothing else of the check enumerates them."""
    padded = page("l0", tokens=3, nbytes=1, num_blocks=3, block_stride=100)
    layout = worker([padded], regions=[Region(0, 3), Region(100, 3), Region(200, 3)])
    monkeypatch.setattr(room, "ENUMERATION_LIMIT", 3)
    check_layout(layout)
    monkeypatch.setattr(room, "ENUMERATION_LIMIT", 2)
    with pytest.raises(PlanError, match="would enumerate 3 runs, over 2"):
        check_layout(layout)


def test_ranges_that_touch_are_no_cluster() -> None:
    first, second = (page("l0", tokens=4, nbytes=8, num_blocks=2, address=address) for address in (0, 64))
    assert clusters_of([second, first]) == ((first,), (second,))
    assert clusters_of([at(second, 63), first]) == ((first, at(second, 63)),)


def test_a_cluster_reaches_as_far_as_its_longest_range() -> None:
    """The third lies beyond the second, and inside the first."""
    long = page("l0", tokens=4, nbytes=8, num_blocks=4)
    short, late = (page("l1", tokens=4, nbytes=8, num_blocks=1, address=address) for address in (8, 80))
    after = at(late, 128)
    assert clusters_of([after, late, short, long]) == ((long, short, late), (after,))


def test_clusters_are_found_without_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of unequal strides, ranges that touch."""
    monkeypatch.setattr(room, "ENUMERATION_LIMIT", 0)
    check_layout(worker([page("l0", tokens=4, nbytes=8, num_blocks=2), page("l1", tokens=4, nbytes=8, address=64,
                                                                            block_stride=40)]))  # fmt: skip


def test_the_byte_that_one_component_holds_twice_is_named() -> None:
    """Two heads at 8 bytes, three rows at 4: byte 8 is of both heads."""
    axes = (Axis("head", 0, 2, 2, 8), Axis("token", 0, 3, 3, 4))
    twice = Component("l0", 0, "kv", 0, 100, 1, 1000, axes, Content(2, "x"), 1, 0, 1)
    assert "byte 108 is held twice: no two of" in refused([twice], [Group("attention", 3)])


@pytest.mark.parametrize(("block_stride", "hint"), [(22, False), (21, True)])
def test_the_block_stride_is_blamed_only_when_a_block_is_longer(block_stride: int, hint: bool) -> None:
    """Three rows of 8 bytes at 7: 22 bytes in a block."""
    rows = one_axis(rows=3, stride=7, nbytes=8, blocks=2, block_stride=block_stride)
    said = refused([rows], [Group("attention", 3)])
    assert "a stride of 7 below a run of 8 bytes" in said
    assert (f"transfer length 22 exceeds block stride {block_stride}" in said) is hint


def test_the_two_that_overlap_are_named_among_others() -> None:
    """One block of three components and then three of unequal strides: neither the first nor the last is at fault."""
    for stride in (400, 401):
        listed = [page(f"l{i}", tokens=1, nbytes=8, block_stride=400, address=a, num_blocks=2) for i, a in
                  enumerate((0, 16, 23, 40))]  # fmt: skip
        listed[3] = msgspec.structs.replace(listed[3], block_stride=stride)
        said = refused(listed, [Group("attention", 1)])
        assert said.startswith("layer 'l1' component 'kv' and layer 'l2' component 'kv': byte 23 belongs to blocks 0")


@pytest.mark.parametrize(("at_long", "at_short"), [(0, 1), (1, 0)], ids=["the long run first", "the short ones first"])
def test_two_runs_of_one_block_may_meet_one_run_of_another_group(at_long: int, at_short: int) -> None:
    """Blocks of unequal strides: runs that meet are looked at one by one, and each has the number of its block."""
    groups = [Group("attention", 1), Group("attention", 2)]
    long = page("l0", tokens=1, nbytes=8, num_blocks=2, block_stride=64, address=at_long)
    axes = (Axis("token", 0, 2, 2, 6),)
    short = Component("l1", 1, "kv", 1, at_short, 2, 62, axes, Content(2, "x"), 1, 0, 1)
    check_layout(worker([long, short], groups=groups))
    # Long enough for both runs of block 0, and for the first run of the other's block 1 too.
    longer = page("l0", tokens=1, nbytes=64, num_blocks=2, block_stride=100, address=at_long)
    assert "in different blocks" in refused([longer, short], groups)
