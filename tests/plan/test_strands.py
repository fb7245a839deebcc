"""Rows of a strand against every byte pair, and no two of them joinable."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.strands import PairLoop, Shape, Strand, rows_of


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
