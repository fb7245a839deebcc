"""Classes of a pair: the largest unit that is uniform on both sides, and what is remembered of parts of it."""

import pytest

from kvferry.layout import Component, ContextParallel, Group, bind_layout
from kvferry.plan import compile_plan
from kvferry.plan import pair as room
from kvferry.plan.assign import Hole
from kvferry.plan.pair import ClassPlan, class_key, hole_key
from kvferry.testing.layouts import at, page, side_by_side, state, worker


def dense(tokens: int, kernels: int, *, row_tokens: int = 1) -> Component:
    return page("l0", tokens=tokens, nbytes=8, kernel_blocks=kernels, row_tokens=row_tokens)


def gapped(tokens: int, kernels: int) -> Component:
    return page("l0", tokens=tokens, nbytes=8, kernel_blocks=kernels, kernel_stride=tokens * 8 + 1)


@pytest.mark.parametrize(
    ("src", "dst", "rows", "whole"),
    [
        (dense(4, 4), dense(4, 4), 16, (True, True)),
        (dense(4, 4), dense(8, 1), 8, (False, True)),
        (dense(1, 16), dense(16, 1), 16, (True, True)),
        (gapped(1, 16), dense(16, 1), 16, (True, True)),
        (gapped(4, 4), dense(16, 1), 4, (False, False)),
        (gapped(4, 4), gapped(6, 2), 2, (False, False)),
        (gapped(16, 1), dense(4, 4), 16, (True, True)),
        (dense(16, 1, row_tokens=4), dense(16, 1, row_tokens=4), 4, (True, True)),
        (dense(16, 2, row_tokens=4), dense(24, 1, row_tokens=4), 2, (False, False)),
    ],
)
def test_the_largest_unit(src: Component, dst: Component, rows: int, whole: tuple[bool, bool]) -> None:
    groups = [Group("attention", c.pages * c.token_axis.count * c.row_tokens) for c in (src, dst) if c.token_axis]
    key = class_key(src, dst, (groups[0], groups[1]))
    assert (key.unit_rows, key.unit_tokens) == (rows, rows * src.row_tokens)
    assert (key.src.unit_map is None, key.dst.unit_map is None) == whole


def test_an_interleave_cuts_units() -> None:
    one = dense(16, 1, row_tokens=2)
    dealt = [Group("attention", 16, context_parallel=ContextParallel(0, 2, turn)) for turn in (8, 4)]
    assert class_key(one, one, (dealt[0], Group("attention", 16))).unit_rows == 4
    assert class_key(one, one, (dealt[0], dealt[1])).unit_rows == 2


@pytest.mark.parametrize(
    ("block", "row_tokens", "own", "missing", "rows"),
    [
        (12, 2, None, 8, 2),  # 6 rows in a block, 4 in a deal
        (12, 1, None, 8, 4),
        (16, 2, None, 4, 2),
        (3, 1, None, 2, 1),
        (12, 2, 4, 12, 2),  # the consumer is dealt to as well
        (24, 2, 12, 8, 2),
    ],
)
def test_units_in_which_a_hole_is_looked_for_lie_in_one_block_and_one_deal(
    block: int, row_tokens: int, own: int | None, missing: int, rows: int
) -> None:
    share = None if own is None else ContextParallel(1, 2, own)
    group = Group("attention", block, context_parallel=share)
    there = bind_layout(worker([dense(block, 1, row_tokens=row_tokens)], groups=[group])).placement
    hole = Hole(0, ContextParallel(0, 2, missing))
    key = hole_key(there, hole)
    assert (key.unit_rows, key.unit_tokens) == (rows, rows * row_tokens)
    assert (key.src.share, key.dst.share, key.src.block_tokens) == (hole.share, share, block)


def classes_of(components: list[Component], groups: list[Group]) -> tuple[ClassPlan, ...]:
    here = bind_layout(worker(components, groups=groups)).placement
    there = bind_layout(worker([at(c, c.address + (1 << 20)) for c in components], groups=groups)).placement
    pair = compile_plan([here], [there]).pair(0, 0)
    assert pair is not None
    return pair.classes


def test_equal_tables_and_strides_are_one_class_whatever_the_inside() -> None:
    """Heads outside tokens and tokens outside heads; a stride, a group or a kind of its own is another class."""
    parts = [
        page("l0", heads=(0, 2, 2), tokens=4, nbytes=8),
        page("l1", heads=(0, 2, 2), tokens=4, nbytes=8, order="token-major"),
        page("l2", heads=(0, 2, 2), tokens=4, nbytes=8, block_stride=80),
        page("l3", heads=(0, 2, 2), tokens=4, nbytes=8, group=1),
        state("l4", nbytes=8, group=2),
    ]
    groups = [Group("attention", 4), Group("attention", 4), Group("state", 4)]
    classes = classes_of(side_by_side(parts, base=0), groups)
    assert [len(one.strands) for one in classes] == [2, 1, 1, 1]
    assert [one.key.kind for one in classes] == ["attention"] * 3 + ["state"]


def test_parts_of_a_unit_are_remembered_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SLICES_KEPT", 2)
    [one] = classes_of([page("l0", heads=(0, 2, 2), tokens=4, nbytes=8)], [Group("attention", 4)])
    assert one.rows(0, 4) is one.full
    kept = [one.rows(0, 1), one.rows(0, 2)]
    assert [one.rows(0, 1), one.rows(0, 2)] == kept
    assert one.rows(0, 1) is kept[0]
    one.rows(0, 3)
    assert len(one._slices) == 1
    assert one.rows(0, 1) is not kept[0]
