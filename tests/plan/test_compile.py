"""Plans by value: the numbers of faults seen in the field, the law of parts, sides that cannot be planned."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import (
    Axis,
    Binding,
    BoundLayout,
    Component,
    Content,
    ContextParallel,
    Group,
    Layout,
    Placement,
    Region,
    bind_layout,
)
from kvferry.plan import BlockTable, Descriptors, TransferRequest, compile_plan
from kvferry.plan import bind as bind_room
from kvferry.plan import strands as strands_room
from kvferry.testing.layouts import at, page, side_by_side, state, worker

Triples = list[tuple[int, int, int]]


def table(blocks: list[int | None], first_token: int | None = 0) -> BlockTable:
    return BlockTable.of(blocks, first_token=first_token)


def moved(producers: list[Layout], consumers: list[Layout], request: TransferRequest) -> dict[tuple[int, int], Triples]:
    """Descriptors of each pair that moves something, held to the brute check."""
    ends = [[bind_layout(layout) for layout in side] for side in (producers, consumers)]
    plan = compile_plan([b.placement for b in ends[0]], [b.placement for b in ends[1]])
    plan.check(request)
    found = {}
    for producer, consumer in plan.pairs():
        descriptors = bound(plan, ends[0][producer], ends[1][consumer], request, (producer, consumer))
        if descriptors.count:
            found[producer, consumer] = triples(descriptors)
    return found


def bound(plan, src: BoundLayout, dst: BoundLayout, request: TransferRequest, pair: tuple[int, int]) -> Descriptors:  # type: ignore[no-untyped-def]
    compiled = plan.pair(*pair)
    return compiled.bind(request, src=src.binding, dst=dst.binding, verify="paranoid")


def triples(descriptors: Descriptors) -> Triples:
    columns = (descriptors.src, descriptors.dst, descriptors.nbytes)
    return list(zip(*(c.tolist() for c in columns), strict=True))


def one_pair(p: Component, d: Component, request: TransferRequest) -> Triples:
    return moved([worker([p])], [worker([d])], request).get((0, 0), [])


@pytest.mark.parametrize(("logical", "kernel"), [(768, 64), (544, 32)])
def test_l01_kernel_blocks_are_one_run_where_contiguous_else_disjoint_runs(logical: int, kernel: int) -> None:
    ratio = logical // kernel
    dense = page("l0", tokens=kernel, nbytes=1152, kernel_blocks=ratio)
    length = kernel * 1152
    padded = page("l0", tokens=kernel, nbytes=1152, kernel_blocks=ratio, kernel_stride=length + 64, address=1 << 30)
    request = TransferRequest(0, logical, (table([5]),), (table([3]),))
    whole = one_pair(dense, at(dense, 1 << 30), request)
    assert whole == [(5 * ratio * length, (1 << 30) + 3 * ratio * length, ratio * length)]
    if logical == 768:
        assert whole[0][2] == 884_736
    runs = one_pair(dense, padded, request)
    assert runs == [
        ((5 * ratio + i) * length, (1 << 30) + (3 * ratio + i) * (length + 64), length) for i in range(ratio)
    ]


def test_l02_logical_ids_are_scaled_to_kernel_rows() -> None:
    rows = page("l0", tokens=1, nbytes=16, kernel_blocks=64, num_blocks=8)
    assert one_pair(rows, at(rows, 1 << 20), TransferRequest(0, 64, (table([3]),), (table([1]),))) == [
        (192 * 16, (1 << 20) + 64 * 16, 64 * 16)
    ]


def test_l06_state_and_attention_use_their_own_tables() -> None:
    groups = [Group("attention", 8), Group("state", 8)]
    full = page("fa", tokens=4, nbytes=4, kernel_blocks=2, num_blocks=8, kernel_stride=24)
    gdn = state("gdn", nbytes=100, num_blocks=8, address=10_000, group=1)
    here = worker([full, gdn], groups=groups)
    there = worker([at(full, 50_000), at(gdn, 60_000)], groups=groups)
    request = TransferRequest(0, 16, (table([1, 2]), table([7], None)), (table([1, 2]), table([7], None)))
    assert moved([here], [there], request)[0, 0] == [
        *((48 * b + 24 * k, 50_000 + 48 * b + 24 * k, 16) for b in (1, 2) for k in (0, 1)),
        (10_700, 60_700, 100),
    ]


def test_l07_length_stride_and_offset_are_three_numbers() -> None:
    a = page("a", tokens=1, nbytes=600, num_blocks=10, block_stride=1000)
    b = page("b", tokens=1, nbytes=300, num_blocks=10, block_stride=1000, address=600)
    here, there = worker([a, b]), worker([at(a, 20_100), at(b, 40_100)])
    request = TransferRequest(0, 1, (table([3]),), (table([3]),))
    assert moved([here], [there], request)[0, 0] == [(3000, 23_100, 600), (3600, 43_100, 300)]


def test_l09_consecutive_ids_join_only_where_stride_is_length_on_both_sides() -> None:
    loose, tight = (page("l0", tokens=4, nbytes=25, block_stride=s) for s in (160, 100))
    request = TransferRequest(0, 8, (table([3, 4]),), (table([3, 4]),))
    assert one_pair(loose, at(loose, 10_000), request) == [(480, 10_480, 100), (640, 10_640, 100)]
    assert one_pair(tight, at(loose, 10_000), request) == [(300, 10_480, 100), (400, 10_640, 100)]
    assert one_pair(tight, at(tight, 10_000), request) == [(300, 10_300, 200)]


def test_l14_split_halves_are_two_descriptors_far_apart() -> None:
    halves = [page("l0", tokens=4, nbytes=8, component=c, address=a) for c, a in (("k", 0), ("v", 4096))]
    there = [at(c, 100_000 + c.address) for c in halves]
    request = TransferRequest(0, 4, (table([2]),), (table([2]),))
    assert moved([worker(halves)], [worker(there)], request)[0, 0] == [(64, 100_064, 32), (4160, 104_160, 32)]


@pytest.mark.parametrize(("heads", "ranks", "expected"), [(2, 4, [0, 0, 1, 1]), (2, 8, [0] * 4 + [1] * 4)])
def test_l19_heads_are_grouped_never_cycled(heads: int, ranks: int, expected: list[int]) -> None:
    p = page("l0", heads=(0, heads, heads), tokens=4, nbytes=8)
    ds = [page("l0", heads=(r * heads // ranks, 1, heads), tokens=4, nbytes=8) for r in range(ranks)]
    request = TransferRequest(0, 4, (table([0]),), (table([0]),))
    found = moved([worker([p])], [worker([d]) for d in ds], request)
    assert [found[0, r][0][0] // 32 for r in range(ranks)] == expected


def test_l20_sections_of_a_convolution_state_are_merged_one_by_one() -> None:
    sections = {"conv.q": 4, "conv.k": 4, "conv.v": 8}

    def rank(index: int, size: int, base: int) -> Layout:
        parts, offset = [], base
        for name, total in sections.items():
            share = total // size
            parts.append(state("gdn", component=name, part=(share * index, share, total), nbytes=1, address=offset,
                               block_stride=16 // size))  # fmt: skip
            offset += share
        return worker(parts)

    request = TransferRequest(4, 4, (table([0], None),), (table([0], None),))
    found = moved([rank(0, 2, 1000), rank(1, 2, 2000)], [rank(0, 1, 5000)], request)
    assert found == {
        (0, 0): [(1000, 5000, 2), (1002, 5004, 2), (1004, 5008, 4)],
        (1, 0): [(2000, 5002, 2), (2002, 5006, 2), (2004, 5012, 4)],
    }


def test_l27_l28_positions_pair_blocks_never_counts() -> None:
    one = page("l0", tokens=16, nbytes=1, num_blocks=40)
    surplus = TransferRequest(0, 32, (table([10, 11, 12]),), (table([20, 21]),))
    assert one_pair(one, at(one, 10_000), surplus) == [(160, 10_320, 32)]
    big = page("l0", tokens=64, nbytes=1, num_blocks=40)
    request = TransferRequest(1984, 2048, (table(list(range(32))),), (table([5, 9], 1984),))
    assert one_pair(big, at(big, 100_000), request) == [(31 * 64, 100_000 + 5 * 64, 64)]


def test_blocks_for_tokens_to_come_are_not_touched() -> None:
    """Look-ahead blocks of either side, and a token that a proxy added on one: the range says what moves."""
    one = page("l0", tokens=16, nbytes=1, num_blocks=40)
    plain = TransferRequest(0, 17, (table([10, 11]),), (table([20, 21]),))
    expected = [(160, 10_320, 17)]
    assert one_pair(one, at(one, 10_000), plain) == expected
    for producer, consumer in (([10, 11], [20, 21, 22, 23]), ([10, 11, 12], [20, 21]), ([10, 11, 12], [20, 21, 22])):
        request = TransferRequest(0, 17, (table([*producer]),), (table([*consumer]),))
        assert one_pair(one, at(one, 10_000), request) == expected


@pytest.mark.parametrize(("stop", "entry"), [(16, 0), (17, 1), (32, 1), (33, 2)])
def test_a_state_is_that_of_its_last_token(stop: int, entry: int) -> None:
    """An engine that computes the last token again wants the state before it: after 16 of 17 tokens, of entry 0."""
    one = state("l0", nbytes=8, num_blocks=40)
    here, there = (worker([at(one, base)], groups=[Group("state", 16)]) for base in (0, 10_000))
    request = TransferRequest(0, stop, (table([10, 11, 12]),), (table([20, 21, 22]),))
    assert moved([here], [there], request) == {(0, 0): [((10 + entry) * 8, 10_000 + (20 + entry) * 8, 8)]}
    alone = TransferRequest(0, stop, (table([10, 11, 12]),), (table([5], None),))
    assert moved([here], [there], alone) == {(0, 0): [((10 + entry) * 8, 10_040, 8)]}


def test_missing_positions_are_refused_and_nothing_is_planned() -> None:
    one = page("l0", tokens=16, nbytes=1)
    request = TransferRequest(0, 64, (table([1, 2, None, 4]),), (table([1, 2, 3, 4]),))
    with pytest.raises(PlanError, match="needs position 32") as refused:
        one_pair(one, at(one, 10_000), request)
    assert refused.value.reason is PlanReason.MISSING_POSITIONS


def test_window_is_clipped_by_position_and_full_attention_is_not() -> None:
    groups = [Group("attention", 16), Group("attention", 16, sliding_window=128)]
    full = page("full", tokens=16, nbytes=4, num_blocks=32)
    window = page("swa", tokens=16, nbytes=4, num_blocks=32, group=1, address=100_000)
    here, there = worker([full, window], groups=groups), worker([at(full, 1 << 20), at(window, 2 << 20)], groups=groups)
    for stop, entries in ((320, 8), (310, 9)):
        tables = (table(list(range(20))), table(list(range(20))))
        runs = moved([here], [there], TransferRequest(0, stop, tables, tables))[0, 0]
        assert [n for _, _, n in runs] == [stop * 4, 128 * 4]
        assert entries == -(-stop // 16) - (stop - 128) // 16


def test_pages_cut_in_the_middle_carry_the_rest_only_where_that_is_cheaper() -> None:
    columns = page("l0", heads=(0, 4, 4), tokens=8, nbytes=2)
    request = TransferRequest(0, 11, (table([1, 2]),), (table([5, 6]),))
    assert one_pair(columns, at(columns, 10_000), request) == [(64, 10_320, 128)]
    rows = page("l0", heads=(0, 4, 4), tokens=8, nbytes=2, order="token-major")
    assert one_pair(rows, at(rows, 10_000), request) == [(64, 10_320, 88)]
    for stop in (9, 14, 15, 16):
        request = TransferRequest(0, stop, (table([1, 3]),), (table([5, 7]),))
        assert one_pair(rows, at(rows, 10_000), request) == [(64, 10_320, 64), (192, 10_448, (stop - 8) * 8)]


@pytest.mark.parametrize(("limit", "carried"), [(1, True), (0, False)])
def test_units_of_very_many_runs_carry_nothing(limit: int, carried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether carrying would save anything is not counted past a limit: then exactly the needed rows move."""
    monkeypatch.setattr(bind_room, "CARRIED_RUNS_LIMIT", limit)
    columns = page("l0", heads=(0, 4, 4), tokens=8, nbytes=2)
    request = TransferRequest(0, 11, (table([1, 2]),), (table([5, 6]),))
    exact = [(64, 10_320, 70), *((128 + head * 16, 10_384 + head * 16, 6) for head in (1, 2, 3))]
    assert one_pair(columns, at(columns, 10_000), request) == ([(64, 10_320, 128)] if carried else exact)


def test_a_part_of_a_unit_moves_though_the_whole_would_be_too_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is what moves: eight runs in a unit are over the limit, two of them are not."""
    monkeypatch.setattr(strands_room, "ROWS_LIMIT", 7)
    monkeypatch.setattr(bind_room, "CARRIED_RUNS_LIMIT", 7)
    here = page("l0", heads=(0, 2, 2), tokens=4, nbytes=8)
    there = page("l0", heads=(0, 2, 2), tokens=4, nbytes=8, order="token-major", address=10_000)
    part = TransferRequest(0, 1, (table([1]),), (table([2]),))
    assert one_pair(here, there, part) == [(64, 10_128, 8), (96, 10_136, 8)]
    with pytest.raises(PlanError, match="limit-exceeded: one block would need 8 descriptors, over 7"):
        one_pair(here, there, TransferRequest(0, 4, (table([1]),), (table([2]),)))


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (5, 20), (8, 20)])
def test_what_lies_before_a_window_is_carried_where_that_is_cheaper(start: int, stop: int) -> None:
    """Window 6: positions 14 to 19. Columns of a whole block are one run; none of its positions is before start."""
    groups = [Group("attention", 8, sliding_window=6)]
    columns = page("l0", heads=(0, 4, 4), tokens=8, nbytes=2)
    here, there = (worker([c], groups=groups) for c in (columns, at(columns, 10_000)))
    request = TransferRequest(start, stop, (table([0, 2, 4]),), (table([1, 3, 5]),))
    assert moved([here], [there], request)[0, 0] == [(128, 10_192, 64), (256, 10_320, 64)]


def test_two_classes_are_carried_together_where_only_both_are_one_run() -> None:
    """Each head of a kernel block is 32 bytes of keys by column and 32 of values by row: whole, it is one run."""

    def layout(base: int) -> Layout:
        keys = (Axis("head", 0, 2, 2, 64), Axis("dim", 0, 4, 4, 8), Axis("token", 0, 4, 4, 2))
        values = (Axis("head", 0, 2, 2, 64), Axis("token", 0, 4, 4, 8))
        parts = [
            Component("l0", 0, name, 0, base + offset, 8, 256, axes, Content(nbytes, "x"), 2, 128, 1)
            for name, offset, axes, nbytes in (("k", 0, keys, 2), ("v", 32, values, 8))
        ]
        return worker(parts, groups=[Group("attention", 8)])

    far = 1 << 20
    here, there = layout(0), layout(far)
    request = TransferRequest(0, 10, (table([1, 3]),), (table([5, 7]),))
    assert moved([here], [there], request)[0, 0] == [(256, far + 1280, 256), (768, far + 1792, 128)]
    # Before the start nothing is carried, so there both are what is needed and no more.
    request = TransferRequest(6, 8, (table([1]),), (table([5]),))
    assert [n for _, _, n in moved([here], [there], request)[0, 0]] == [4, 4, 4, 4, 16, 4, 4, 4, 4, 16]


def test_a_class_carries_nothing_that_saves_nothing() -> None:
    """Columns are carried whole, which saves three descriptors; rows of another layer end where the request ends."""
    columns = page("l0", heads=(0, 4, 4), tokens=8, nbytes=2)
    rows = page("l1", heads=(0, 4, 4), tokens=8, nbytes=2, order="token-major", address=4096, block_stride=128)
    request = TransferRequest(0, 11, (table([1, 3]),), (table([5, 7]),))
    found = moved([worker([columns, rows])], [worker([at(columns, 10_000), at(rows, 20_000)])], request)
    assert [(src, n) for src, _, n in found[0, 0]] == [(64, 64), (192, 64), (4096 + 128, 64), (4096 + 384, 24)]


def test_positions_before_start_are_never_written() -> None:
    columns = page("l0", heads=(0, 2, 2), tokens=8, nbytes=2)
    request = TransferRequest(3, 8, (table([1]),), (table([5]),))
    assert one_pair(columns, at(columns, 10_000), request) == [(38, 10_166, 10), (54, 10_182, 10)]


@given(st.integers(0, 100), st.integers(0, 100), st.lists(st.integers(0, 100), max_size=5), st.booleans())
def test_law_of_parts(a: int, b: int, cuts: list[int], head_major: bool) -> None:
    """Parts by token range write together what the whole writes, and nothing else but what they may carry."""
    start, stop = min(a, b), max(a, b)
    order = "head-major" if head_major else "token-major"
    p = page("l0", heads=(0, 2, 2), tokens=4, nbytes=2, num_blocks=16, kernel_blocks=4, order=order)
    d = page("l0", heads=(0, 2, 2), tokens=8, nbytes=2, num_blocks=16, order=order, address=1 << 16)
    tables = ((table([3, 9, 1, 4, 0, 7, 12]),), (table([13, 2, 8, 3, 5, 1, 11, 0, 9, 14, 6, 4, 7]),))
    edges = [start, *sorted(c for c in cuts if start < c < stop), stop]

    def bytes_of(low: int, high: int) -> set[tuple[int, int]]:
        runs = one_pair(p, d, TransferRequest(low, high, *tables))
        return {(s + i, t + i) for s, t, n in runs for i in range(n)}

    parts = set().union(*(bytes_of(low, high) for low, high in pairwise(edges)))
    assert bytes_of(start, stop) <= parts
    assert len({dst for _, dst in parts}) == len(parts)


def test_seams_cut_descriptors_and_only_there() -> None:
    one = page("l0", tokens=4, nbytes=25, num_blocks=4)
    here = worker([one], regions=[Region(0, 130), Region(130, 270)])
    there = worker([at(one, 1000)], regions=[Region(1000, 90), Region(1090, 310)])
    request = TransferRequest(0, 16, (table([0, 1, 2, 3]),), (table([0, 1, 2, 3]),))
    assert moved([here], [there], request)[0, 0] == [(0, 1000, 90), (90, 1090, 40), (130, 1130, 270)]


@pytest.mark.parametrize("kinds", [("cpu", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_touching_regions_are_a_seam_whatever_memory_they_are_of(kinds: tuple[str, str]) -> None:
    """Two layers one behind the other on both sides: one run of bytes, but in two regions."""
    layers = side_by_side([page(f"l{i}", tokens=4, nbytes=8, num_blocks=1) for i in range(2)], base=0)

    def here(base: int) -> Layout:
        regions = [Region(base, 32, kinds[0]), Region(base + 32, 32, kinds[1])]
        return worker([at(c, base + c.address) for c in layers], regions=regions)

    request = TransferRequest(0, 4, (table([0]),), (table([0]),))
    one = worker([at(c, 8192 + c.address) for c in layers], regions=[Region(8192, 64)])
    cut = [(4096, 8192, 32), (4128, 8224, 32)]
    assert moved([here(4096)], [here(8192)], request)[0, 0] == cut
    assert moved([here(4096)], [one], request)[0, 0] == cut
    assert [n for _, _, n in moved([one], [here(4096)], request)[0, 0]] == [32, 32]


def test_replicas_share_the_load_and_every_consumer_is_served_once() -> None:
    mla = page("l0", tokens=4, nbytes=8)
    producers = [worker([at(mla, 1000 * i)]) for i in range(2)]
    consumers = [worker([at(mla, 100_000 + 1000 * i)]) for i in range(5)]
    request = TransferRequest(0, 4, (table([0]),), (table([0]),))
    assert sorted(moved(producers, consumers, request)) == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3)]


def test_k_counts_consumers_that_need_the_set_over_all_layers() -> None:
    """Two replicas hold both layers, each consumer stage one of them: stage 1 is the second to need the set."""
    layers = side_by_side([page("l0", tokens=4, nbytes=8), page("l1", tokens=4, nbytes=8)], base=0)
    stages = [worker([layers[0]]), worker([layers[1]])]
    request = TransferRequest(0, 4, (table([0]),), (table([0]),))
    assert sorted(moved([worker(layers), worker(layers)], stages, request)) == [(0, 0), (1, 1)]


def test_partly_overlapping_producers_are_cut_into_cells() -> None:
    p0, p1 = (page("l0", heads=(s, 3, 5), tokens=2, nbytes=1) for s in (0, 2))
    d = page("l0", heads=(0, 5, 5), tokens=2, nbytes=1, address=1000)
    request = TransferRequest(0, 2, (table([0]),), (table([0]),))
    assert moved([worker([p0]), worker([p1])], [worker([d])], request) == {
        (0, 0): [(0, 1000, 6)],
        (1, 0): [(2, 1006, 4)],
    }


def dealt(rank: int, base: int, interleave: int) -> Layout:
    """A rank of two that deal out positions; rows of two tokens."""
    share = ContextParallel(rank, 2, interleave)
    one = page("l0", tokens=8, nbytes=2, row_tokens=2, address=base)
    return worker([one], groups=[Group("attention", 8, context_parallel=share)])


@pytest.mark.parametrize(("start", "stop", "missing"), [(0, 2, None), (4, 6, None), (0, 3, 2), (3, 9, 3), (5, 8, 6)])
def test_a_context_parallel_rank_that_is_not_given_is_missed_where_it_is_needed(
    start: int, stop: int, missing: int | None
) -> None:
    """Of two ranks only the first is there: positions 2, 3, 6, 7, ... are nobody's."""
    whole = page("l0", tokens=8, nbytes=2, row_tokens=2, address=1 << 20)
    request = TransferRequest(start, stop, (table([1, 2]),), (table([4, 5, 6, 7]),))
    sides = [dealt(0, 0, 2)], [worker([whole])]
    if missing is None:
        assert len(moved(*sides, request)[0, 0]) == 1
        return
    with pytest.raises(PlanError, match=f"needs position {missing}, which context_parallel rank 1 of 2 holds") as error:
        moved(*sides, request)
    assert error.value.reason is PlanReason.MISSING_POSITIONS


@pytest.mark.parametrize(("block", "position"), [(3, 2), (3, 20), (5, 14), (1, 3), (7, 34)])
def test_a_hole_in_the_last_block_of_the_consumer_is_seen(block: int, position: int) -> None:
    """Blocks that are no multiple of what a rank is dealt: the table's last position is half of a deal of two."""
    given = 1 - position // 2 % 2
    here = worker(
        [page("l0", tokens=4, nbytes=2)], groups=[Group("attention", 4, context_parallel=ContextParallel(given, 2, 2))]
    )
    there = worker([page("l0", tokens=block, nbytes=2, address=1 << 20)], groups=[Group("attention", block)])
    asked = table([None] * (position // block) + [2])
    with pytest.raises(PlanError, match=f"needs position {position},") as error:
        moved([here], [there], TransferRequest(position, position + 1, (table([*range(5)]),), (asked,)))
    assert error.value.reason is PlanReason.MISSING_POSITIONS


def test_a_hole_counts_only_where_the_consumer_holds_it() -> None:
    """Rank 1 of the producers is missing; consumer rank 0 of two, dealt alike, does not need it, rank 1 does."""
    request = TransferRequest(0, 16, (table([1, 2]),), (table([4, 5]),))
    assert len(moved([dealt(0, 0, 4)], [dealt(0, 1 << 20, 4)], request)[0, 0]) == 1
    with pytest.raises(PlanError, match="needs position 4,"):
        moved([dealt(0, 0, 4)], [dealt(1, 1 << 20, 4)], request)
    with pytest.raises(PlanError, match="needs position 2,"):
        moved([dealt(0, 0, 2)], [dealt(0, 1 << 20, 4)], request)


def test_ranks_that_a_consumer_shares_no_position_with_are_no_holes() -> None:
    """Producer rank 1 is missing: dealt alike, it has nothing for consumer rank 0; dealt two by two, it has."""
    placements = [bind_layout(dealt(0, 0, interleave)).placement for interleave in (4, 2)]
    for producer, unserved in ((placements[0], []), (placements[1], [ContextParallel(1, 2, 2)])):
        found = compile_plan([producer], [placements[0]]).assignment.holes[0]
        assert [hole.share for hole in found] == unserved


def test_context_parallel_sizes_have_a_limit() -> None:
    """Each rank of the producers is looked for, so their number is bounded; 4,096 are allowed."""

    def rank(size: int) -> Placement:
        share = ContextParallel(0, size, 1)
        return bind_layout(
            worker([page("l0", tokens=1, nbytes=8)], groups=[Group("attention", 1, None, None, share)])
        ).placement

    whole = bind_layout(worker([page("l0", tokens=1, nbytes=8)])).placement
    assert len(compile_plan([rank(4096)], [whole]).assignment.holes[0]) == 4095
    with pytest.raises(PlanError, match="unsupported: context_parallel size 4097 is over the limit of 4096"):
        compile_plan([rank(4097)], [whole])


def test_too_many_units_are_refused_and_far_ones_are_not_many() -> None:
    """Kernel blocks of two tokens with a gap between them: a unit is two tokens."""
    count = 1 << 26
    one = page("l0", tokens=2, nbytes=1, kernel_blocks=count, kernel_stride=3, num_blocks=1)
    tables = (table([0]),), (table([0]),)
    with pytest.raises(PlanError, match="67108864 units of 2 positions each"):
        one_pair(one, at(one, 1 << 40), TransferRequest(0, 2 * count, *tables))
    far = one_pair(one, at(one, 1 << 40), TransferRequest(2 * count - 4, 2 * count, *tables))
    assert far == [(3 * (count - i), (1 << 40) + 3 * (count - i), 2) for i in (2, 1)]


def test_refusals_by_layout_alone() -> None:
    p = page("l0", heads=(0, 1, 2), tokens=4, nbytes=8)
    d = page("l0", heads=(0, 2, 2), tokens=4, nbytes=8)
    placement = {name: bind_layout(worker([c])).placement for name, c in (("p", p), ("d", d))}
    with pytest.raises(PlanError, match=r"missing-coordinates.*head \[1, 2\)"):
        compile_plan([placement["p"]], [placement["d"]])
    other = bind_layout(worker([msgspec.structs.replace(p, layer="l9")])).placement
    with pytest.raises(PlanError, match="missing-layer.*'l0'"):
        compile_plan([other], [placement["d"]])
    wrong = bind_layout(worker([msgspec.structs.replace(d, content=Content(8, "fp8"))])).placement
    with pytest.raises(PlanError, match="incompatible-content.*bytes:8.*fp8"):
        compile_plan([placement["d"]], [wrong])
    optional = bind_layout(worker([msgspec.structs.replace(d, layer="draft", optional=True)])).placement
    assert compile_plan([placement["p"]], [optional]).pairs() == ()


def test_tables_are_checked_whole() -> None:
    one = page("l0", tokens=4, nbytes=8)

    def refused(request: TransferRequest) -> PlanReason:
        with pytest.raises(PlanError) as error:
            one_pair(one, at(one, 10_000), request)
        return error.value.reason

    good = (table([0, 1]),)
    assert refused(TransferRequest(0, 4, (table([0, 8]),), good)) is PlanReason.INVALID_REQUEST
    assert refused(TransferRequest(0, 4, (table([0, 1, 1]),), good)) is PlanReason.DUPLICATE_BLOCKS
    assert refused(TransferRequest(0, 4, good, (table([0, 1], 2),))) is PlanReason.INVALID_REQUEST
    assert refused(TransferRequest(0, 4, good, (table([0, 1], None),))) is PlanReason.INVALID_REQUEST
    assert refused(TransferRequest(0, 4, good * 2, good)) is PlanReason.INVALID_REQUEST


def test_a_block_of_two_overlaid_groups_is_refused() -> None:
    groups = [Group("attention", 4)] * 2
    a = page("a", tokens=4, nbytes=8, block_stride=64)
    b = page("b", tokens=4, nbytes=8, block_stride=64, address=32, group=1)
    here, there = worker([a, b], groups=groups), worker([at(a, 4096), at(b, 4128)], groups=groups)
    apart = (table([1]), table([2]))
    assert moved([here], [there], TransferRequest(0, 4, apart, apart))[0, 0] == [(64, 4160, 32), (160, 4256, 32)]
    with pytest.raises(PlanError, match=r"duplicate-blocks.*groups \[0, 1\]"):
        moved([here], [there], TransferRequest(0, 4, (table([1]), table([1])), apart))


def test_too_many_copies_before_the_last_join_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers apart and four scattered blocks: twelve."""
    layers = side_by_side([page(f"l{i}", tokens=4, nbytes=8) for i in range(3)], base=0, gap=100)
    away = [at(c, c.address + (1 << 20)) for c in layers]
    request = TransferRequest(0, 16, (table([0, 2, 4, 6]),), (table([6, 4, 2, 0]),))
    monkeypatch.setattr(bind_room, "COPIES_LIMIT", 12)
    assert len(moved([worker(layers)], [worker(away)], request)[0, 0]) == 12
    monkeypatch.setattr(bind_room, "COPIES_LIMIT", 11)
    with pytest.raises(PlanError, match="3 runs in each of 4 units, over 11") as refused:
        moved([worker(layers)], [worker(away)], request)
    assert refused.value.reason is PlanReason.LIMIT_EXCEEDED


def test_too_many_descriptors_are_refused() -> None:
    one = page("l0", tokens=4, nbytes=8, block_stride=100)
    ends = [bind_layout(worker([c])) for c in (one, at(one, 10_000))]
    pair = compile_plan([ends[0].placement], [ends[1].placement]).pair(0, 0)
    assert pair is not None
    request = TransferRequest(0, 12, (table([0, 1, 2]),), (table([0, 1, 2]),))
    assert pair.bind(request, src=ends[0].binding, dst=ends[1].binding, max_descriptors=3).count == 3
    with pytest.raises(PlanError, match="limit-exceeded: 3 descriptors, over the limit of 2"):
        pair.bind(request, src=ends[0].binding, dst=ends[1].binding, max_descriptors=2)


def test_the_paranoid_check_is_made_when_asked_for() -> None:
    """A placement that nobody has checked: two layers on one address, and every byte of it written twice."""
    parts = [page(f"l{i}", tokens=4, nbytes=8, num_blocks=2, address=i * 4096) for i in range(2)]
    src, dst = (bind_layout(worker(parts, regions=[Region(0, 64), Region(4096, 64)])) for _ in range(2))
    first, second = dst.placement.placed
    unchecked = Placement(
        dst.placement.groups, dst.placement.storages, (first, msgspec.structs.replace(second, storage=0))
    )
    pair = compile_plan([src.placement], [unchecked]).pair(0, 0)
    assert pair is not None
    request = TransferRequest(0, 4, (table([1]),), (table([1]),))
    assert pair.bind(request, src=src.binding, dst=dst.binding).count == 2
    with pytest.raises(PlanError, match="two descriptors write byte"):
        pair.bind(request, src=src.binding, dst=dst.binding, verify="paranoid")


def test_one_call_checks_and_binds_a_pair() -> None:
    here, there = page("l0", tokens=4, nbytes=8), page("l1", tokens=4, nbytes=8, address=4096)
    sources, target = [bind_layout(worker([c])) for c in (here, there)], bind_layout(worker([at(there, 1 << 20)]))
    plan = compile_plan([s.placement for s in sources], [target.placement])
    request = TransferRequest(0, 4, (table([2]),), (table([3]),))
    binding = target.binding
    assert plan.bind(request, 0, 0, src=sources[0].binding, dst=binding).count == 0
    assert triples(plan.bind(request, 1, 0, src=sources[1].binding, dst=binding)) == [(4096 + 64, (1 << 20) + 96, 32)]
    with pytest.raises(PlanError, match="out of range"):
        plan.bind(TransferRequest(0, 4, (table([8]),), (table([3]),)), 1, 0, src=sources[1].binding, dst=binding)


@pytest.mark.parametrize("bases", [(0, 4096), ()])
def test_a_binding_of_another_worker_is_refused(bases: tuple[int, ...]) -> None:
    ends = [bind_layout(worker([page("l0", tokens=4, nbytes=8)])) for _ in range(2)]
    pair = compile_plan([ends[0].placement], [ends[1].placement]).pair(0, 0)
    assert pair is not None
    request = TransferRequest(0, 4, (table([1]),), (table([1]),))
    right, wrong = ends[0].binding, Binding(bases)
    for src, dst in ((wrong, right), (right, wrong)):
        with pytest.raises(PlanError, match=f"{len(bases)} bases, the placement 1 storages"):
            pair.bind(request, src=src, dst=dst)


def test_a_placement_without_memory_cannot_be_planned() -> None:
    one = page("l0", tokens=4, nbytes=8)
    bound, bare = bind_layout(worker([one])).placement, bind_layout(worker([one], regions=[])).placement
    for producer, consumer, name in ((bare, bound, "producer 0"), (bound, bare, "consumer 0")):
        with pytest.raises(PlanError, match=f"{name} has no regions"):
            compile_plan([producer], [consumer])


def test_all_files_of_a_side_have_equal_groups() -> None:
    here = bind_layout(worker([page("l0", tokens=4, nbytes=8)])).placement
    other = bind_layout(worker([page("l1", tokens=8, nbytes=8)])).placement
    with pytest.raises(PlanError, match="groups of producer 1 are"):
        compile_plan([here, other], [here])


def test_a_side_needs_a_layout() -> None:
    placement = bind_layout(worker([page("l0", tokens=4, nbytes=8)])).placement
    for producers, consumers, name in (([], [placement], "producer"), ([placement], [], "consumer")):
        with pytest.raises(PlanError, match=f"the {name} side has no layout"):
            compile_plan(producers, consumers)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_a_layer_in_groups_that_deal_positions_out_in_two_ways_is_refused(order: tuple[int, ...]) -> None:
    """One rank has head 0 at all positions, two have head 1 at every other four: right in principle."""

    def rank(head: int, group: int, number: int) -> Placement:
        groups = [Group("attention", 4), Group("attention", 4, context_parallel=ContextParallel(number, 2, 4))]
        part = page("l0", heads=(head, 1, 2), tokens=4, nbytes=8, group=group)
        return bind_layout(worker([part], groups=groups)).placement

    ranks = rank(0, 0, 0), rank(1, 1, 0), rank(1, 1, 1)
    whole = bind_layout(worker([page("l0", heads=(0, 2, 2), tokens=4, nbytes=8)])).placement
    with pytest.raises(PlanError, match="unsupported: layer 'l0' component 'kv' lies in groups .* out in 2 ways"):
        compile_plan([ranks[place] for place in order], [whole])
