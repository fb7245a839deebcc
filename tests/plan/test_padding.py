"""Padding moves only where it joins runs of a block that owns its frame, and only when it is asked for."""

from kvferry.layout import Axis, BoundLayout, Component, Content, Group, bind_layout
from kvferry.plan import BlockTable, Descriptors, TransferRequest, compile_plan
from kvferry.testing.layouts import at, page, worker


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


def test_never_past_the_end_of_a_row() -> None:
    p, d = rows_at([0, 1000], base=0, stride=2500), rows_at([0, 1000], base=1 << 20, stride=2500)
    for allow_padding in (False, True):
        assert bound(p, d, [1, 2], allow_padding=allow_padding).nbytes.tolist() == [2000, 2000]


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
