"""Units of a request against positions one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import ContextParallel
from kvferry.plan import BlockTable, TransferRequest
from kvferry.plan import units as room
from kvferry.plan.pair import ClassKey, SideOfClass
from kvferry.plan.units import Needed, RowRange, attention_units, needed_of, partial_units, require

WHOLE = SideOfClass(0, 16, 100, None, None)


def key_of(
    row_tokens: int, unit_rows: int, *, dst: SideOfClass = WHOLE, window: int | None = None, chunk: int | None = None
) -> ClassKey:
    return ClassKey("attention", WHOLE, dst, row_tokens, unit_rows, window, chunk)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 40), st.integers(0, 40), st.integers(1, 20))
def test_rows_of_units_of_which_not_all_is_needed(row: int, rows: int, start: int, clipped: int, length: int) -> None:
    """Needed are rows with a needed position; movable beyond them are rows without a position before the start."""
    needed = Needed(start + clipped, start + clipped + length)
    found = {one.unit: one for one in partial_units(key_of(row, rows), needed, start)}
    for unit in range(needed.stop // (row * rows) + 1):
        spans = [range(unit * rows * row + i * row, unit * rows * row + (i + 1) * row) for i in range(rows)]
        mine = [i for i, span in enumerate(spans) if any(needed.start <= p < needed.stop for p in span)]
        if not mine or len(mine) == rows:
            assert unit not in found
            continue
        free = [i for i, span in enumerate(spans) if span[0] >= start]
        widest = min([mine[0], *free])
        assert (found[unit].needed, found[unit].widest) == (RowRange(mine[0], mine[-1] + 1), RowRange(widest, rows))
        assert found[unit].widest.size == rows - widest


def test_window_and_chunk_clip_by_position() -> None:
    request = TransferRequest(3, 20, (), ())
    for window, chunk, start in ((None, None, 3), (5, None, 15), (50, None, 3), (None, 8, 16), (2, 8, 18), (9, 8, 16)):
        assert needed_of(key_of(1, 4, window=window, chunk=chunk), request) == Needed(start, 20)
    # At the edge of a chunk an engine may still compute the last token again, which is of the chunk before.
    assert needed_of(key_of(1, 4, chunk=8), TransferRequest(0, 16, (), ())) == Needed(8, 16)
    assert needed_of(key_of(1, 4, chunk=8), TransferRequest(0, 0, (), ())) == Needed(0, 0)


@given(
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 3),
    st.lists(st.booleans(), max_size=5),
    st.integers(0, 90),
    st.integers(0, 50),
    st.sampled_from([None, ContextParallel(0, 2, 16), ContextParallel(1, 2, 16)]),
)
def test_units_that_hold_a_needed_position(
    rows: int, first: int, held: list[bool], start: int, length: int, share: ContextParallel | None
) -> None:
    """Position by position: in the range, in an entry that the consumer lists, held by the consumer's rank."""
    side = SideOfClass(0, 16, 100, share, None)
    origin = first * side.entry_tokens
    table = BlockTable.of([7 + i if h else None for i, h in enumerate(held)], first_token=origin)

    def listed(position: int) -> bool:
        entry = (position - origin) // side.entry_tokens
        mine = share is None or position // share.interleave % share.size == share.rank
        return mine and 0 <= entry < len(held) and held[entry]

    expected = sorted({p // rows for p in range(start, start + length) if listed(p)})
    assert attention_units(key_of(1, rows, dst=side), Needed(start, start + length), table).tolist() == expected


@pytest.mark.parametrize(("limit", "allowed"), [(4, True), (3, False)])
def test_the_number_of_units_has_a_limit(limit: int, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "UNITS_LIMIT", limit)
    table = BlockTable.of([1, 2], first_token=0)
    if allowed:
        assert attention_units(key_of(1, 8), Needed(0, 32), table).tolist() == [0, 1, 2, 3]
        return
    with pytest.raises(PlanError, match="4 units of 8 positions each, over 3") as refused:
        attention_units(key_of(1, 8), Needed(0, 32), table)
    assert refused.value.reason is PlanReason.LIMIT_EXCEEDED


@pytest.mark.parametrize("tokens", [[32, 47], [70], [64, 79], []])
def test_entries_that_the_producer_lists(tokens: list[int]) -> None:
    require(WHOLE, np.array(tokens, dtype=np.int64), BlockTable.of([5, None, 6], first_token=32))


@pytest.mark.parametrize(("tokens", "missing"), [([31], 31), ([32, 48, 49], 48), ([80], 80), ([63], 63)])
def test_entries_that_the_producer_lacks(tokens: list[int], missing: int) -> None:
    """Entries 2 to 4, of which entry 3 has no block."""
    said = rf"position {missing}, the producer's table of group 0 lists 2 blocks for positions \[32, 80\)"
    with pytest.raises(PlanError, match=said) as refused:
        require(WHOLE, np.array(tokens, dtype=np.int64), BlockTable.of([5, None, 6], first_token=32))
    assert refused.value.reason is PlanReason.MISSING_POSITIONS
