"""The memory rule, judged against a dictionary of every byte, and by the numbers of faults seen in the field."""

from collections import defaultdict
from itertools import combinations, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Axis, Component, Content, ContextParallel, Group, Layout, Region, check_layout
from kvferry.layout import check as room
from kvferry.testing.layouts import ONE_RANK, at, page, state, worker


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": (Axis("token", 0, 4, 4, 8),)}, "a state has no token axis"),
        ({"kernel_blocks": 2, "kernel_stride": 64}, "a state component has kernel_blocks 1, not 2"),
    ],
)
def test_contradictions_of_a_state_are_named(change: dict[str, object], message: str) -> None:
    one = msgspec.structs.replace(state("l0", nbytes=8), **change)
    with pytest.raises(PlanError, match=message) as refused:
        check_layout(worker([one], groups=[Group("state", 16)]))
    assert refused.value.reason is PlanReason.INVALID_LAYOUT


def test_the_last_byte_that_there_may_be() -> None:
    last = page("l0", tokens=4, nbytes=8, num_blocks=1, address=2**63 - 1 - 32)
    check_layout(worker([last], regions=[Region(last.address, 32)]))
    with pytest.raises(PlanError, match="past 2"):
        check_layout(Layout("e", ONE_RANK, (), (Group("attention", 4),), (at(last, last.address + 1),)))


def test_regions_that_overlap_are_refused_and_touching_ones_are_not() -> None:
    one = page("l0", tokens=4, nbytes=8, num_blocks=2)
    check_layout(worker([one], regions=[Region(32, 32), Region(0, 32)]))
    with pytest.raises(PlanError, match=r"regions \[0, 33\) and \[32, 64\) overlap") as refused:
        check_layout(worker([one], regions=[Region(32, 32), Region(0, 33)]))
    assert refused.value.reason is PlanReason.INVALID_LAYOUT


@pytest.mark.parametrize(("regions", "first"), [
    ([Region(8, 100), Region(200, 32)], 0),  # begins below the first region
    ([Region(0, 32), Region(100, 31)], 100),  # ends one byte past the second
    ([Region(0, 32), Region(101, 31)], 100),  # begins one byte before it
])  # fmt: skip
def test_the_first_byte_outside_is_named(regions: list[Region], first: int) -> None:
    one = page("l0", tokens=4, nbytes=8, num_blocks=2, block_stride=100)
    check_layout(worker([one], regions=[Region(0, 32), Region(100, 32)]))
    with pytest.raises(PlanError, match=rf"spans \[0, 132\); its bytes \[{first}, {first + 32}\) lie in no") as refused:
        check_layout(worker([one], regions=regions))
    assert refused.value.reason is PlanReason.OUTSIDE_REGION


def entangled(blocks: int) -> Component:
    """Two heads and three tokens at strides that interleave: nothing but enumeration shows that they are disjoint."""
    axes = (Axis("head", 0, 2, 2, 3), Axis("token", 0, 3, 3, 2))
    return Component("l0", 0, "kv", 0, 0, blocks, 100, axes, Content(1, "x"), 1, 100, 1)


def combs(blocks: int) -> list[Component]:
    """Two layers that take turns byte by byte; so many runs in each block of each."""
    return [
        Component(f"l{i}", i, "kv", 0, i, blocks, 100, (Axis("token", 0, 3, 3, 2),), Content(1, "x"), 1, 100, 1)
        for i in range(2)
    ]


def unlike_combs(blocks: int) -> list[Component]:
    """The same, with blocks of unequal strides, so that all of them are enumerated."""
    one, other = combs(blocks)
    return [one, msgspec.structs.replace(other, block_stride=102)]


@pytest.mark.parametrize(
    ("components", "regions", "runs"),
    [
        ([entangled(2)], None, 12),
        ([entangled(2)], [Region(0, 9), Region(100, 9)], 12),
        (combs(2), None, 6),
        (unlike_combs(2), None, 12),
    ],
    ids=["within one", "in regions", "one block", "all blocks"],
)
def test_what_is_enumerated_is_bounded(
    components: list[Component], regions: list[Region] | None, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = worker(components, groups=[Group("attention", 3)], regions=regions)
    monkeypatch.setattr(room, "ENUMERATION_LIMIT", runs)
    check_layout(layout)
    monkeypatch.setattr(room, "ENUMERATION_LIMIT", runs - 1)
    with pytest.raises(PlanError, match=f"would enumerate {runs} runs, over {runs - 1}") as refused:
        check_layout(layout)
    assert refused.value.reason is PlanReason.UNSUPPORTED


def test_what_needs_no_enumeration_is_not_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides that nest, ranges that follow each other in one block's frame, components in one region."""
    monkeypatch.setattr(room, "ENUMERATION_LIMIT", 0)
    first = page("l0", tokens=4, nbytes=8, block_stride=72)
    second = page("l1", tokens=4, nbytes=8, block_stride=72, address=32)
    check_layout(worker([first, second]))
    far = [at(first, 1 << 20), at(second, (1 << 20) + 32)]
    check_layout(worker(far))
    # A frame that is full to its last byte, whose components are listed out of order.
    check_layout(worker([at(second, 40), first]))


def test_the_message_names_both_and_the_byte() -> None:
    one = page("l0", tokens=4, nbytes=8, block_stride=64)
    with pytest.raises(PlanError, match=r"layer 'l0' component 'kv' and layer 'l1' component 'kv': byte 24 belongs"):
        check_layout(worker([one, page("l1", tokens=4, nbytes=8, block_stride=64, address=24)]))
    short = page("l0", tokens=4, nbytes=8, block_stride=31)
    with pytest.raises(PlanError, match=r"layer 'l0' component 'kv': .*; transfer length 32 exceeds block stride 31:"):
        check_layout(worker([short]))
    twice = Component("l0", 0, "kv", 0, 0, 2, 100, (Axis("token", 0, 3, 3, 7),), Content(8, "x"), 1, 100, 1)
    with pytest.raises(PlanError, match=r"a stride of 7 below a run of 8 bytes: no two of") as refused:
        check_layout(worker([twice], groups=[Group("attention", 3)]))
    assert "exceeds" not in refused.value.message


def test_groups_may_meet_only_in_blocks_of_one_number() -> None:
    """Blocks of unequal strides: run by run, the number of both blocks must be the same."""
    groups = [Group("attention", 1), Group("attention", 1)]
    one = page("l0", tokens=1, nbytes=8, num_blocks=2, block_stride=64)
    check_layout(worker([one, page("l1", tokens=1, nbytes=4, num_blocks=2, block_stride=66, group=1)], groups=groups))
    said = "groups 1 and 0 share byte 64 in different blocks"
    with pytest.raises(PlanError, match=said):
        check_layout(
            worker([one, page("l1", tokens=1, nbytes=4, num_blocks=3, block_stride=32, group=1)], groups=groups)
        )
