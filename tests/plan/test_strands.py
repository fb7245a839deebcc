"""Rows of a strand against every byte pair, and no two of them joinable."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PlanError, PlanReason
from kvferry.plan import strands as room
from kvferry.plan.strands import PairLoop, Shape, Strand, fold, rows_of


def dense(draw: st.DrawFn, counts: list[int], nbytes: int) -> list[int]:
    """Strides of a padded dense box whose axes are nested in a random order."""
    strides = [0] * len(counts)
    reach = nbytes
    for axis in draw(st.permutations(range(len(counts)))):
        reach += draw(st.sampled_from([0, 0, 3]))
        strides[axis] = reach
        reach *= counts[axis]
    return strides


@st.composite
def strands(draw: st.DrawFn) -> tuple[Strand, int, int]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    rows, nbytes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    src, dst = (dense(draw, [*counts, rows], nbytes) for _ in range(2))
    axes = tuple(PairLoop(n, s, d) for n, s, d in zip(counts, src, dst, strict=False))
    shape = Shape(axes, PairLoop(rows, src[-1], dst[-1]), nbytes)
    start = draw(st.integers(0, rows - 1))
    return Strand(shape, 0, 1000, 0, 5000), start, draw(st.integers(start + 1, rows))


@given(strands())
def test_rows_copy_every_byte_once_and_cannot_be_joined(drawn: tuple[Strand, int, int]) -> None:
    strand, start, stop = drawn
    shape = strand.shape
    expected = set()
    for where in product(*(range(loop.count) for loop in shape.axes), range(start, stop), range(shape.nbytes)):
        *axes, row, byte = where
        src = sum(x * loop.src for x, loop in zip(axes, shape.axes, strict=True)) + row * shape.row.src + byte
        dst = sum(x * loop.dst for x, loop in zip(axes, shape.axes, strict=True)) + row * shape.row.dst + byte
        expected.add((1000 + src, 5000 + dst))
    rows = rows_of([strand], start, stop)
    runs = list(zip(rows.src.tolist(), rows.dst.tolist(), rows.nbytes.tolist(), strict=True))
    copied = [(s + i, d + i) for s, d, n in runs for i in range(n)]
    assert len(copied) == len(expected)
    assert set(copied) == expected
    ends = {(s + n, d + n) for s, d, n in runs}
    assert not ends & {(s, d) for s, d, _ in runs}
    assert rows.src.tolist() == sorted(rows.src.tolist())


BLOCK = Shape((), PairLoop(4, 8, 8), 8)
"""32 bytes."""


@pytest.mark.parametrize(
    ("src_storage", "src", "dst_storage", "dst", "runs"),
    [
        (0, 32, 0, 132, [64]),
        (1, 32, 0, 132, [32, 32]),
        (0, 32, 1, 132, [32, 32]),
        (0, 33, 0, 132, [32, 32]),
        (0, 32, 0, 133, [32, 32]),
    ],
)
def test_strands_join_where_one_continues_the_other(
    src_storage: int, src: int, dst_storage: int, dst: int, runs: list[int]
) -> None:
    second = Strand(BLOCK, src_storage, src, dst_storage, dst)
    for listed in ([Strand(BLOCK, 0, 0, 0, 100), second], [second, Strand(BLOCK, 0, 0, 0, 100)]):
        rows = rows_of(listed, 0, 4)
        assert rows.nbytes.tolist() == runs
        assert rows.src_storage.tolist() == sorted(rows.src_storage.tolist())


def test_what_would_fill_the_memory_is_refused_before_it_does() -> None:
    transposed = Shape((PairLoop(1 << 30, 2, 1 << 31),), PairLoop(1 << 10, 1 << 31, 2), 1)
    with pytest.raises(PlanError, match="one block would need 1099511627776 descriptors") as refused:
        rows_of([Strand(transposed, 0, 0, 0, 0)], 0, 1 << 10)
    assert refused.value.reason is PlanReason.LIMIT_EXCEEDED


def test_the_rows_of_all_strands_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = Shape((), PairLoop(4, 9, 9), 8)
    listed = [Strand(padded, 0, 0, 0, 0), Strand(padded, 0, 100, 0, 100)]
    monkeypatch.setattr(room, "ROWS_LIMIT", 8)
    assert rows_of(listed, 0, 4).count == 8
    monkeypatch.setattr(room, "ROWS_LIMIT", 7)
    with pytest.raises(PlanError, match="would need 8 descriptors, over 7"):
        rows_of(listed, 0, 4)


def test_a_loop_of_one_step_is_no_loop() -> None:
    """Whatever its strides say: they are never stepped."""
    assert fold([PairLoop(1, 100, 7), PairLoop(3, 4, 4)], 4) == ([], 12)
