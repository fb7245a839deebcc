"""Padding moves only where it joins runs of a block that owns its frame, and only when it is asked for."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product

import msgspec
import pytest

from kvferry.errors import PlanError
from kvferry.layout import Axis, BoundLayout, Component, Content, Group, bind_layout, parse_layout
from kvferry.plan import BlockTable, Descriptors, Plan, TransferRequest, compile_plan, parse_request
from kvferry.plan import padding as room
from kvferry.testing.layouts import at, page, worker
from kvferry.testing.strategies import random_case

Sides = tuple[list[BoundLayout], list[BoundLayout]]


def ends(components: list[Component], groups: list[Group] | None = None) -> list[BoundLayout]:
    away = [at(c, c.address + (1 << 20)) for c in components]
    return [bind_layout(worker(listed, groups=groups)) for listed in (components, away)]


def bound(
    producers: list[Component], consumers: list[Component], blocks: list[int], *, allow_padding: bool
) -> Descriptors:
    src, dst = bind_layout(worker(producers)), bind_layout(worker(consumers))
    pair = compile_plan([src.placement], [dst.placement]).pair(0, 0)
    assert pair is not None
    table = BlockTable.of(blocks, first_token=0)
    request = TransferRequest(0, len(blocks) * dst.placement.groups[0].block_tokens, (table,), (table,))
    return pair.bind(request, src=src.binding, dst=dst.binding, allow_padding=allow_padding, verify="paranoid")


def rows_at(offsets: list[int], *, base: int, stride: int) -> list[Component]:
    return [page(f"l{i}", tokens=1, nbytes=1000, block_stride=stride, address=base + o) for i, o in enumerate(offsets)]


def test_two_live_pages_of_a_row_are_one_run_when_padding_may_move() -> None:
    p, d = rows_at([0, 1024], base=0, stride=2560), rows_at([0, 1024], base=1 << 20, stride=2560)
    assert bound(p, d, [1], allow_padding=False).nbytes.tolist() == [1000, 1000]
    assert bound(p, d, [1], allow_padding=True).nbytes.tolist() == [2024]


@pytest.mark.parametrize(("limit", "runs"), [(2, [2024]), (1, [1000, 1000])])
def test_a_block_of_very_many_runs_keeps_its_gaps(limit: int, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FRAME_RUNS_LIMIT", limit)
    p, d = rows_at([0, 1024], base=0, stride=2560), rows_at([0, 1024], base=1 << 20, stride=2560)
    assert bound(p, d, [1], allow_padding=True).nbytes.tolist() == runs


def test_never_past_the_end_of_the_last_row() -> None:
    """Rows 2,500 long with 2,000 live bytes: the 500 between two listed blocks may move, those after the last not."""
    p, d = rows_at([0, 1000], base=0, stride=2500), rows_at([0, 1000], base=1 << 20, stride=2500)
    for blocks, runs in (([1, 2], [4500]), ([2, 1], [4500]), ([1, 3], [2000, 2000])):
        assert bound(p, d, blocks, allow_padding=False).nbytes.tolist() == [2000, 2000]
        assert bound(p, d, blocks, allow_padding=True).nbytes.tolist() == runs


def test_a_gap_that_another_layer_lives_in_is_no_padding() -> None:
    """The producer has layers 0 and 2; at the consumer layer 1, from another producer, lies between them."""
    p = rows_at([0, 1000, 2000], base=0, stride=3000)
    d = rows_at([0, 1000, 2000], base=1 << 20, stride=3000)
    src = [bind_layout(worker([p[0], p[2]])), bind_layout(worker([p[1]]))]
    dst = bind_layout(worker(d))
    plan = compile_plan([s.placement for s in src], [dst.placement])
    table = (BlockTable.of([1], first_token=0),)
    pair = plan.pair(0, 0)
    assert pair is not None
    moved = pair.bind(TransferRequest(0, 1, table, table), src=src[0].binding, dst=dst.binding, allow_padding=True)
    assert moved.nbytes.tolist() == [1000, 1000]


@pytest.mark.parametrize("between", [10, 15, 19])
def test_one_live_byte_anywhere_in_a_gap_is_enough(between: int) -> None:
    parts = [page(f"l{i}", tokens=1, nbytes=n, block_stride=40, address=a)
             for i, (a, n) in enumerate(((0, 10), (between, 1), (20, 10)))]  # fmt: skip
    for blocks, runs in (([1], 2), ([1, 2], 3)):
        # Blocks that follow each other are joined over the ten bytes from one to the next, and over no live byte.
        table = (BlockTable.of(blocks, first_token=0),)
        src = [bind_layout(worker([parts[0], parts[2]])), bind_layout(worker([parts[1]]))]
        dst = bind_layout(worker([at(c, c.address + 4096) for c in parts]))
        pair = compile_plan([s.placement for s in src], [dst.placement]).pair(0, 0)
        assert pair is not None
        request = TransferRequest(0, len(blocks), table, table)
        moved = pair.bind(request, src=src[0].binding, dst=dst.binding, allow_padding=True)
        assert moved.count == runs
        assert moved.total_bytes == len(blocks) * 20 + 10 * (len(blocks) - 1)


def test_a_live_byte_counts_wherever_in_its_component_it_is() -> None:
    """The second head of layer 1, from another producer, lies between layers 0 and 2."""
    two_heads = (Axis("head", 0, 2, 2, 24), Axis("token", 0, 1, 1, 4))
    parts = [
        page("l0", tokens=1, nbytes=10, block_stride=40, address=10),
        Component("l1", 1, "kv", 0, 0, 8, 40, two_heads, Content(4, "x"), 1, 40, 1),
        page("l2", tokens=1, nbytes=10, block_stride=40, address=30),
    ]
    src = [bind_layout(worker([parts[0], parts[2]])), bind_layout(worker([parts[1]]))]
    dst = bind_layout(worker([at(c, c.address + 4096) for c in parts]))
    pair = compile_plan([s.placement for s in src], [dst.placement]).pair(0, 0)
    assert pair is not None
    table = (BlockTable.of([1], first_token=0),)
    moved = pair.bind(TransferRequest(0, 1, table, table), src=src[0].binding, dst=dst.binding, allow_padding=True)
    assert moved.nbytes.tolist() == [10, 10]


def test_blocks_of_two_strides_have_no_frames() -> None:
    """Layer 0 steps by 90 bytes, layer 1 by 40: between what moves lie blocks that are not listed."""

    def side(base: int) -> list[Component]:
        return [
            page("l0", tokens=1, nbytes=10, num_blocks=3, block_stride=90, address=base),
            page("l1", tokens=1, nbytes=10, num_blocks=3, block_stride=40, address=base + 20),
        ]

    moved = bound(side(0), side(4096), [0, 2], allow_padding=True)
    assert moved.src.tolist() == [0, 20, 100, 180]
    assert moved.nbytes.tolist() == [10] * 4


def test_blocks_that_reach_into_each_other_have_no_frames() -> None:
    """Combs of two heads, 12 bytes apart in blocks of 8: between blocks 1 and 2 lies the second head of block 0."""

    def comb(first: int, count: int, base: int) -> Component:
        axes = (Axis("head", first, count, 2, 12), Axis("token", 0, 1, 1, 4))
        return Component("l0", 0, "kv", 0, base, 4, 8, axes, Content(4, "x"), 1, 8, 1)

    src = [bind_layout(worker([comb(head, 1, 4096 * head)])) for head in range(2)]
    dst = bind_layout(worker([comb(0, 2, 1 << 20)]))
    pair = compile_plan([s.placement for s in src], [dst.placement]).pair(0, 0)
    assert pair is not None
    table = (BlockTable.of([1, 2], first_token=0),)
    moved = pair.bind(TransferRequest(0, 2, table, table), src=src[0].binding, dst=dst.binding, allow_padding=True)
    assert moved.nbytes.tolist() == [4, 4]


def test_what_lies_between_two_tensors_is_no_padding() -> None:
    """Two layers in one row on one side; on the other two tensors of one region, and somebody else's bytes between."""

    def side(base: int, blocks: int) -> list[Component]:
        return [
            page(f"l{i}", tokens=1, nbytes=10, num_blocks=blocks, block_stride=40, address=base + 20 * i)
            for i in range(2)
        ]

    apart, packed, other = side(0, 1), side(4096, 2), side(8192, 2)
    for p, d in ((apart, packed), (packed, apart)):
        assert bound(p, d, [0], allow_padding=True).nbytes.tolist() == [10, 10]
    assert bound(packed, other, [0], allow_padding=True).nbytes.tolist() == [30]


def test_unequal_gaps_do_not_join() -> None:
    p, d = rows_at([0, 1024], base=0, stride=2560), rows_at([0, 1100], base=1 << 20, stride=2560)
    assert bound(p, d, [1], allow_padding=True).nbytes.tolist() == [1000, 1000]


def test_a_block_that_does_not_own_its_frame_keeps_its_gaps() -> None:
    """Head-major over all blocks: between two heads of a block lie other blocks."""

    def spread(base: int) -> Component:
        axes = (Axis("head", 0, 2, 2, 64), Axis("token", 0, 4, 4, 2))
        return Component("l0", 0, "kv", 0, base, 8, 8, axes, Content(2, "x"), 1, 8, 1)

    assert bound([spread(0)], [spread(1 << 20)], [1], allow_padding=True).nbytes.tolist() == [8, 8]


def test_a_token_range_inside_a_block_moves_no_padding() -> None:
    p = [page(f"l{i}", tokens=4, nbytes=8, block_stride=100, address=i * 40) for i in range(2)]
    src, dst = ends(p)
    pair = compile_plan([src.placement], [dst.placement]).pair(0, 0)
    assert pair is not None
    table = (BlockTable.of([1], first_token=0),)
    whole = pair.bind(TransferRequest(0, 4, table, table), src=src.binding, dst=dst.binding, allow_padding=True)
    assert whole.nbytes.tolist() == [72]
    part = pair.bind(TransferRequest(2, 4, table, table), src=src.binding, dst=dst.binding, allow_padding=True)
    assert part.nbytes.tolist() == [16, 16]


Bytes = set[int]


def live_bytes(end: BoundLayout) -> Iterator[tuple[int, int, Bytes]]:
    """(group, block, its live addresses) of every block of every component, by plain loops."""
    for placed in end.placement.placed:
        one = placed.component
        first = end.binding.bases[placed.storage] + one.address
        counts = [range(one.pages), *(range(axis.count) for axis in one.axes), range(one.content.nbytes)]
        strides = [one.page_stride, *(axis.stride for axis in one.axes), 1]
        inside = [sum(x * s for x, s in zip(where, strides, strict=True)) for where in product(*counts)]
        for block in range(one.num_blocks):
            yield one.group, block, {first + block * one.block_stride + offset for offset in inside}


def bytes_written(descriptors: Descriptors) -> Bytes:
    pairs = zip(descriptors.dst.tolist(), descriptors.nbytes.tolist(), strict=True)
    return {start + i for start, nbytes in pairs for i in range(nbytes)}


def check_padding(plan: Plan, ends: Sides, request: TransferRequest) -> int:
    """Hold every pair to the rule, byte by byte; returns how many descriptors padding has saved."""
    saved = 0
    written: list[Counter[int]] = [Counter() for _ in ends[1]]
    for i, j in plan.pairs():
        pair, src, dst = plan.pair(i, j), ends[0][i], ends[1][j]
        assert pair is not None
        plain, wide = (
            pair.bind(request, src=src.binding, dst=dst.binding, verify="paranoid", allow_padding=allowed)
            for allowed in (False, True)
        )
        saved += plain.count - wide.count
        written[j].update(bytes_written(wide))
        padding = bytes_written(wide) - bytes_written(plain)
        assert len(padding) == wide.total_bytes - plain.total_bytes
        for group, block, addresses in live_bytes(dst):
            if addresses & padding:
                owners = [g for g, table in enumerate(request.consumer) if block in table.ids.tolist()]
                assert owners, "a block that the request does not list was touched"
                assert group not in owners, "live bytes of the request were taken for padding"
    assert all(count == 1 for one in written for count in one.values())
    return saved


@pytest.mark.parametrize("at_origin", [True, False])
def test_a_gap_that_begins_or_ends_with_a_cluster_is_not_in_its_frames(at_origin: bool) -> None:
    """At the producer the bytes between the two runs begin, or end, with those of a layer that nobody reads.

    They are of one cluster with one of the runs; the other run touches that cluster from outside.
    """

    def part(layer: str, address: int, *, blocks: int, group: int = 0) -> Component:
        stride = 16 if blocks == 1 else 128
        return page(layer, tokens=1, nbytes=16, num_blocks=blocks, block_stride=stride, address=address, group=group)

    if at_origin:  # a at 0..16; behind it a cluster of b, from 16 on, and c, from 40 on
        sources = [part("a", 0, blocks=1), part("b", 16, blocks=2, group=1), part("c", 40, blocks=2, group=1)]
        ids, gap = (0, 0), 24
    else:  # a cluster of a and b that ends with block 1 of b, at 184; there c begins
        sources = [part("a", 0, blocks=2), part("b", 40, blocks=2), part("c", 184, blocks=1, group=1)]
        ids, gap = (1, 0), 40
    base = 1 << 20
    targets = [part("a", base, blocks=2), part("c", base + 16 + gap, blocks=2)]
    groups = [Group("attention", 1), Group("attention", 1)]
    src = bind_layout(worker(sources, groups=groups))
    dst = bind_layout(worker(targets))
    pair = compile_plan([src.placement], [dst.placement]).pair(0, 0)
    assert pair is not None
    tables = tuple(BlockTable.of([number], first_token=0) for number in ids)
    request = TransferRequest(0, 1, tables, (BlockTable.of([1], first_token=0),))
    moved = pair.bind(request, src=src.binding, dst=dst.binding, allow_padding=True)
    assert moved.nbytes.tolist() == [16, 16]


def test_random_cases_write_padding_of_listed_blocks_only() -> None:
    saved = []
    for seed in range(400):
        case = random_case(random.Random(seed))
        try:
            sides = tuple(
                [bind_layout(parse_layout(msgspec.json.encode(file))) for file in files]
                for files in (case.producers, case.consumers)
            )
            request = parse_request(msgspec.json.encode(case.request))
            plan = compile_plan(*([end.placement for end in side] for side in sides))
            plan.check(request)
            saved.append(check_padding(plan, (sides[0], sides[1]), request))
        except PlanError:
            continue
    assert min(saved) >= 0
    assert sum(1 for count in saved if count) > 5


def test_the_gap_of_two_groups_that_share_frames_is_looked_at_block_by_block() -> None:
    """Group 0 has the frame's first bytes and group 1 its last; consecutive blocks of both, the gap between is free."""
    groups = [Group("attention", 1)] * 2
    parts = [page("a", tokens=1, nbytes=8, block_stride=32),
             page("b", tokens=1, nbytes=8, block_stride=32, address=20, group=1)]  # fmt: skip
    src, dst = ends(parts, groups)
    pair = compile_plan([src.placement], [dst.placement]).pair(0, 0)
    assert pair is not None

    def runs(a: list[int], b: list[int]) -> list[tuple[int, int]]:
        tables = (BlockTable.of(a, first_token=0), BlockTable.of(b, first_token=0))
        request = TransferRequest(0, 2, tables, tables)
        moved = pair.bind(request, src=src.binding, dst=dst.binding, allow_padding=True)
        return list(zip(moved.src.tolist(), moved.nbytes.tolist(), strict=True))

    # Block 1 is of group 0, block 2 of group 1: what group 1 has in block 1, and group 0 in block 2, nobody owns.
    assert runs([1, 4], [2, 6]) == [(32, 60), (128, 8), (212, 8)]
    assert runs([2, 4], [1, 6]) == [(52, 20), (128, 8), (212, 8)]
