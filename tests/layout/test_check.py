"""The memory rule, judged against a dictionary of every byte, and by the numbers of faults seen in the field."""

from collections import defaultdict
from itertools import combinations, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Axis, Component, Content, ContextParallel, Group, Layout, Region, check_layout
from kvferry.testing.layouts import ONE_RANK, at, page, worker


def every_byte(component: Component, block: int) -> list[int]:
    steps = [range(axis.count) for axis in component.axes]
    return [
        component.address
        + block * component.block_stride
        + kernel * component.page_stride
        + sum(x * axis.stride for x, axis in zip(where, component.axes, strict=True))
        + byte
        for kernel in range(component.pages)
        for where in product(*steps)
        for byte in range(component.content.nbytes)
    ]


def obeys_memory_rule(components: tuple[Component, ...]) -> bool:
    holders: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, component in enumerate(components):
        for block in range(component.num_blocks):
            for byte in every_byte(component, block):
                holders[byte].append((place, block))
    for listed in holders.values():
        for (c, b), (other, block) in combinations(listed, 2):
            if (c, b) == (other, block) or components[c].group == components[other].group or b != block:
                return False
    return True


@st.composite
def components(draw: st.DrawFn) -> tuple[Component, ...]:
    made = []
    for place in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 2))
        axes = [Axis("token", 0, rows, rows, draw(st.integers(1, 12)))]
        if draw(st.booleans()):
            axes.append(Axis("head", 0, 2, 2, draw(st.integers(1, 30))))
        made.append(
            Component(
                f"l{place}",
                place,
                "kv",
                draw(st.integers(0, 1)),
                draw(st.integers(0, 40)),
                draw(st.integers(1, 3)),
                draw(st.sampled_from([4, 8, 12, 13, 24, 30])),
                tuple(axes),
                Content(draw(st.integers(1, 4)), "x"),
                1,
                0,
                4 // rows,
            )
        )
    return tuple(made)


@settings(max_examples=400)
@given(components())
def test_memory_rule_against_every_byte(drawn: tuple[Component, ...]) -> None:
    layout = Layout("e", ONE_RANK, (), (Group("attention", 4), Group("attention", 4)), drawn)
    if obeys_memory_rule(drawn):
        check_layout(layout)
    else:
        with pytest.raises(PlanError) as refused:
            check_layout(layout)
        assert refused.value.reason is PlanReason.OVERLAPPING_MEMORY


def test_l01_whole_page_length_at_kernel_stride_is_refused() -> None:
    """768 tokens in 12 kernel blocks of 64: a length of 884,736 at a stride of 73,728 overlaps twelvefold."""
    wrong = page("l0", tokens=768, nbytes=1152, num_blocks=480, block_stride=73_728)
    with pytest.raises(PlanError, match="transfer length 884736 exceeds block stride 73728") as refused:
        check_layout(worker([wrong]))
    assert refused.value.reason is PlanReason.OVERLAPPING_MEMORY
    check_layout(worker([page("l0", tokens=64, nbytes=1152, kernel_blocks=12, num_blocks=40)]))


def test_l12_two_views_of_one_base_keep_their_own_lengths() -> None:
    groups = (Group("attention", 1), Group("attention", 1))
    short = page("swa", tokens=1, nbytes=19_008, block_stride=32_768, address=0x1000)
    long = page("state", tokens=1, nbytes=32_768, block_stride=32_768, address=0x1000, group=1)
    check_layout(worker([short, long], groups=groups))
    same_group = msgspec.structs.replace(long, group=0)
    with pytest.raises(PlanError, match="overlapping-memory"):
        check_layout(worker([short, same_group], groups=groups))


def test_groups_that_overlay_with_unequal_strides_are_refused() -> None:
    groups = (Group("attention", 1), Group("attention", 1))
    one = page("a", tokens=1, nbytes=8, block_stride=16)
    other = page("b", tokens=1, nbytes=8, block_stride=32, group=1)
    with pytest.raises(PlanError, match="share byte .* in different blocks"):
        check_layout(worker([one, other], groups=groups))


@pytest.mark.parametrize("regions", [[Region(0, 60)], [Region(8, 56)], [Region(0, 30), Region(31, 33)]])
def test_a_component_outside_its_regions_is_refused(regions: list[Region]) -> None:
    with pytest.raises(PlanError) as refused:
        check_layout(worker([page("l0", tokens=4, nbytes=2, num_blocks=8)], regions=regions))
    assert refused.value.reason is PlanReason.OUTSIDE_REGION


def test_touching_regions_and_gaps_in_padding_are_inside() -> None:
    padded = page("l0", tokens=4, nbytes=2, num_blocks=3, block_stride=100)
    check_layout(worker([padded], regions=[Region(0, 5), Region(5, 3), Region(100, 8), Region(200, 8)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 1}, "group 1, but there are 1 groups"),
        ({"tokens_per_row": 2}, "= 8, but block_tokens of group 0 is 4"),
        ({"tokens_per_row": msgspec.UNSET}, "tokens_per_row is missing"),
        ({"kernel_blocks": 3, "kernel_stride": 0}, "kernel_stride is 0"),
        ({"axes": (Axis("head", 0, 1, 1, 8),)}, "no token axis"),
        ({"axes": (Axis("token", 0, 4, 8, 8),)}, "the token axis is local"),
        ({"address": 2**63 - 8}, "past 2\\*\\*63 - 1"),
    ],
)
def test_contradictions_are_named(change: dict[str, object], message: str) -> None:
    base = page("l0", tokens=4, nbytes=8, num_blocks=1)
    with pytest.raises(PlanError, match=message) as refused:
        check_layout(Layout("e", ONE_RANK, (), (Group("attention", 4),), (msgspec.structs.replace(base, **change),)))
    assert refused.value.reason is PlanReason.INVALID_LAYOUT


def test_a_layer_listed_twice_is_refused() -> None:
    one = page("l0", tokens=4, nbytes=8)
    with pytest.raises(PlanError, match="listed twice"):
        check_layout(worker([one, at(one, 4096)]))


def test_a_huge_pool_is_checked_without_enumerating_it() -> None:
    comb = page("l0", heads=(0, 4, 4), tokens=16, nbytes=64, num_blocks=2**33, kernel_blocks=4, order="token-major")
    check_layout(worker([comb]))


def test_interleave_is_a_multiple_of_the_tokens_of_a_row() -> None:
    one = page("l0", tokens=8, nbytes=2, row_tokens=4)
    for interleave, said in ((4, None), (2, "interleave 2 is no multiple of tokens_per_row 4")):
        groups = [Group("attention", 8, context_parallel=ContextParallel(0, 2, interleave))]
        if said is None:
            check_layout(worker([one], groups=groups))
            continue
        with pytest.raises(PlanError, match=said):
            check_layout(worker([one], groups=groups))


def test_what_would_take_too_long_to_prove_is_refused() -> None:
    """Two layers whose combs of bytes interleave, not in frames of one size: more runs than may be enumerated."""
    axes = (Axis("token", 0, 1 << 21, 1 << 21, 4),)
    combs = [
        Component(f"l{i}", i, "kv", 0, i * 2, 2, (1 << 23) + i * 64, axes, Content(1, "x"), 1, 1 << 23, 1)
        for i in range(2)
    ]
    with pytest.raises(PlanError, match="would enumerate 8388608 runs") as refused:
        check_layout(worker(combs, groups=[Group("attention", 1 << 21)]))
    assert refused.value.reason is PlanReason.UNSUPPORTED
