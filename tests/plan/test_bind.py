"""The fast path of the binder skips work, never does other work: held to the plain pass on random cases."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import PlanError
from kvferry.layout import Axis, BoundLayout, Component, Content, bind_layout, parse_layout
from kvferry.plan import BlockTable, TransferRequest, compile_plan, parse_request
from kvferry.plan.bind import Anchored, Copies, Side, copies_of, join, spread_rows, together
from kvferry.plan.units import Places
from kvferry.testing.layouts import worker
from kvferry.testing.strategies import random_case


def ends(files: list[dict[str, object]]) -> list[BoundLayout]:
    return [bind_layout(parse_layout(msgspec.json.encode(file))) for file in files]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_skipping_the_last_join_changes_nothing(seed: int) -> None:
    case = random_case(random.Random(seed))
    try:
        producers, consumers = ends(case.producers), ends(case.consumers)
        plan = compile_plan([p.placement for p in producers], [c.placement for c in consumers])
        request = parse_request(msgspec.json.encode(case.request))
        plan.check(request)
        for i, j in plan.pairs():
            pair = plan.pair(i, j)
            assert pair is not None
            src, dst = (Side(end.placement, end.binding) for end in (producers[i], consumers[j]))
            for part in copies_of(pair.classes, request, src, dst):
                same_after_plain_pass(part)
    except PlanError:
        return


def same_after_plain_pass(part: Copies) -> None:
    if part.settled:
        plain = join(replace(part, settled=False))
        for name in ("src", "dst", "nbytes"):
            assert np.array_equal(getattr(plain, name), getattr(part, name))


@st.composite
def nested(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Lengths of rows, and where rows and units begin: rows inside units, or units inside rows; gaps of 0 to 2."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    if draw(st.booleans()):
        lengths = [lengths[0]] * len(lengths)
    gaps = st.integers(0, 2)
    count = draw(st.integers(1, 4))
    if draw(st.booleans()):
        rows = [0]
        for length in lengths[:-1]:
            rows.append(rows[-1] + length + draw(gaps))
        step = rows[-1] + lengths[-1] + draw(gaps)
        return lengths, rows, [step * i for i in range(count)]
    step = max(lengths) + draw(gaps)
    reach = step * (count - 1) + max(lengths) + draw(gaps)
    return lengths, [reach * i for i in range(len(lengths))], [step * i for i in range(count)]


@st.composite
def rows_and_units(draw: st.DrawFn) -> tuple[Anchored, Places]:
    """The destination is nested like the source, or moved apart; units come in any order and need not all be there."""
    lengths, rows, units = draw(nested())
    stretch = draw(st.sampled_from([1, 1, 3]))
    dst_rows = [r * stretch for r in rows] if draw(st.booleans()) else rows
    dst_units = [u * stretch for u in units] if draw(st.booleans()) else units
    order = draw(st.permutations(range(len(units))))
    kept = order[: draw(st.integers(1, len(order)))]
    moved = draw(st.permutations(kept)) if draw(st.booleans()) else kept
    columns = (np.array(c, dtype=np.int64) for c in (rows, dst_rows, lengths))
    places = (np.array(c, dtype=np.int64) for c in ([units[i] for i in kept], [dst_units[i] for i in moved]))
    return Anchored(*columns), Places(*places)


def check_spread(rows: Anchored, units: Places) -> None:
    """Rows at units, joined, against the maximal runs of all byte pairs; each part against the plain pass."""
    pairs = {
        (src + unit_src + i, dst + unit_dst + i)
        for src, dst, n in zip(rows.src.tolist(), rows.dst.tolist(), rows.nbytes.tolist(), strict=True)
        for unit_src, unit_dst in zip(units.src.tolist(), units.dst.tolist(), strict=True)
        for i in range(n)
    }
    parts = spread_rows(rows, units)
    joined = join(together(parts))
    found = list(zip(joined.src.tolist(), joined.dst.tolist(), joined.nbytes.tolist(), strict=True))
    assert {(s + i, d + i) for s, d, n in found for i in range(n)} == pairs
    assert len(found) == sum((s - 1, d - 1) not in pairs for s, d in pairs)
    assert [s for s, _, _ in found] == sorted(s for s, _, _ in found)
    for part in parts:
        same_after_plain_pass(part)


@settings(max_examples=300, deadline=None)
@given(rows_and_units())
def test_rows_times_units_are_the_maximal_runs_and_settled_only_where_they_are(drawn: tuple[Anchored, Places]) -> None:
    check_spread(*drawn)


def small_nests(lengths: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Where rows and units begin: three units of the rows with every choice of gaps, then units inside rows."""
    for gaps in product(range(2), repeat=len(lengths)):
        rows = [sum(lengths[:i]) + sum(gaps[:i]) for i in range(len(lengths))]
        step = sum(lengths) + sum(gaps)
        yield rows, [0, step, 2 * step]
    for gap, between in product(range(2), repeat=2):
        step = max(lengths) + gap
        far = 2 * step + max(lengths) + between
        yield [far * i for i in range(len(lengths))], [0, step, 2 * step]


@pytest.mark.parametrize("lengths", [x for n in (1, 2, 3) for x in product((1, 2), repeat=n)], ids=str)
def test_all_small_nests(lengths: tuple[int, ...]) -> None:
    """Every pair of nests for source and destination, with all three units, two of them, or all in another order."""
    for src, dst in product(small_nests(lengths), repeat=2):
        for order in ([0, 1, 2], [0, 2], [2, 1, 0]):
            for other in (order, order[::-1]):
                rows = np.array(src[0]) + 7, np.array(dst[0]) + 50, np.array(lengths)
                units = np.array([src[1][i] for i in order]) + 3, np.array([dst[1][i] for i in other]) + 11
                check_spread(Anchored(*rows), Places(*units))


def test_both_nestings_of_equal_rows_are_settled() -> None:
    """Layers apart with scattered blocks, and rows of a packed block: what the last pass costs is saved."""
    rows = np.array([0, 1000, 2000], dtype=np.int64)
    layers = Anchored(rows + 5000, rows + 100, np.full(3, 10, dtype=np.int64))
    scattered = Places(np.array([40, 0, 80], dtype=np.int64), np.array([0, 80, 40], dtype=np.int64))
    far = Places(np.array([3000, 0, 9000, 6000], dtype=np.int64), np.array([0, 3000, 6000, 9000], dtype=np.int64))
    for units in (scattered, far):
        [part] = spread_rows(layers, units)
        assert part.settled
        # What counts is how far units reach, not where they are.
        [moved] = spread_rows(layers, Places(units.src + 10**6, units.dst + 10**7))
        assert moved.settled


def test_columns_that_touch_on_one_side_are_settled_too() -> None:
    """Rows, and blocks, that follow each other without a gap at the source but not at the destination, and back."""
    close, wide = np.arange(3, dtype=np.int64) * 10, np.arange(3, dtype=np.int64) * 1000
    tens = np.full(3, 10, dtype=np.int64)
    for rows, units in (
        (Anchored(close, wide, tens), Places(close * 3, close)),  # a unit's rows touch, and so do units
        (Anchored(wide, close, tens), Places(wide * 3, close * 3)),
        (Anchored(close * 3, wide, tens), Places(close, close[::-1].copy())),  # a row's units touch, and so do rows
        (Anchored(close * 3, close * 3, tens), Places(close, wide)),
    ):
        [part] = spread_rows(rows, units)
        assert part.settled
        check_spread(rows, units)


def test_rows_that_alternate_with_units_are_left_to_the_last_pass() -> None:
    """Two rows in every unit and one far away: neither nest, so nothing is known before they are sorted."""
    rows = np.array([0, 20, 9000], dtype=np.int64)
    apart = Anchored(rows, rows * 3, np.full(3, 10, dtype=np.int64))
    units = Places(np.array([0, 50, 100], dtype=np.int64), np.array([0, 500, 1000], dtype=np.int64))
    [part] = spread_rows(apart, units)
    assert not part.settled
    check_spread(apart, units)


def test_rows_that_touch_only_where_units_were_joined() -> None:
    """Two units one behind the other fill the gap between two rows; the third unit, far away, leaves it open."""
    rows = np.array([0, 20], dtype=np.int64)
    units = np.array([0, 10, 100], dtype=np.int64)
    check_spread(Anchored(rows, rows, np.full(2, 10, dtype=np.int64)), Places(units, units))


def test_bands_of_rows_are_written_in_order_of_source() -> None:
    """Layers far apart with two rows each: sorted as written, so that the last pass need not sort."""
    rows = np.array([0, 20, 9000, 9020], dtype=np.int64)
    pairs = Anchored(rows, rows * 3, np.full(4, 10, dtype=np.int64))
    units = Places(np.array([50, 0, 100], dtype=np.int64), np.array([0, 500, 1000], dtype=np.int64))
    [part] = spread_rows(pairs, units)
    assert part.src.tolist() == [0, 20, 50, 70, 100, 120, 9000, 9020, 9050, 9070, 9100, 9120]


def test_what_is_settled_is_passed_on_as_it_is() -> None:
    """Nothing is sorted or joined twice."""
    layers = [np.arange(0, 100, 10) * 2 + 1000 * i for i in range(3)]
    settled = Copies(np.concatenate(layers), np.concatenate(layers), np.full(30, 10), settled=True)
    assert join(settled) is settled
    assert together([settled]) is settled


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_join_sorts_and_joins_what_continues_on_both_sides(order: list[int]) -> None:
    src, dst, nbytes = (np.array(c, dtype=np.int64)[order] for c in ([0, 8, 16], [100, 108, 200], [8, 8, 8]))
    joined = join(Copies(src, dst, nbytes))
    assert (joined.src.tolist(), joined.dst.tolist(), joined.nbytes.tolist()) == ([0, 16], [100, 200], [16, 8])


def test_classes_are_carried_together_where_that_joins_them() -> None:
    """A page keeps keys by column, then values by row: the end of a request inside it is one run, or many."""
    dim, tokens, size = 4, 8, 2
    half = dim * tokens * size

    def page(base: int) -> BoundLayout:
        keys = (Axis("dim", 0, dim, dim, tokens * size), Axis("token", 0, tokens, tokens, size))
        rows = (Axis("token", 0, tokens, tokens, dim * size),)
        common = {"layer": "l0", "layer_index": 0, "group": 0, "num_blocks": 8, "block_stride": 2 * half}
        common |= {"kernel_blocks": 1, "kernel_stride": 2 * half, "tokens_per_row": 1}
        k = Component(component="k", address=base, axes=keys, content=Content(size, "key"), **common)
        v = Component(component="v", address=base + half, axes=rows, content=Content(dim * size, "value"), **common)
        return bind_layout(worker([k, v]))

    src, dst = page(0), page(4096)
    plan = compile_plan([src.placement], [dst.placement])
    table = (BlockTable.of([2, 3], first_token=0),)
    moved = plan.bind(TransferRequest(0, tokens + 3, table, table), 0, 0, src=src.binding, dst=dst.binding)
    assert moved.nbytes.tolist() == [4 * half]
    # Positions before the start are never carried: the keys of three tokens are a run for each dimension.
    moved = plan.bind(TransferRequest(5, tokens, table, table), 0, 0, src=src.binding, dst=dst.binding)
    assert moved.nbytes.tolist() == [3 * size] * dim + [3 * dim * size]
