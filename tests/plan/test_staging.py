"""The staged form writes the same bytes; the model picks the form that its constants say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PlanError
from kvferry.plan import Descriptors
from kvferry.plan.staging import CostModel, StagingBuffers, choose, stage

TCP = CostModel(alpha=90e-6, beta=1e-9, gamma=0.15e-9, delta=0.1e-6, chunk=1 << 20)

runs = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8)


def spread(drawn: list[tuple[int, int, int]]) -> Descriptors:
    """Disjoint runs with gaps of their own on each side."""
    src, dst, rows = 100, 200, []
    for nbytes, src_gap, dst_gap in drawn:
        rows.append((src, dst, nbytes))
        src, dst = src + nbytes + src_gap, dst + nbytes + dst_gap
    return Descriptors.of(*(list(column) for column in zip(*rows, strict=True)))


def copied(memory: dict[int, int], *steps: Descriptors) -> dict[int, int]:
    """Memory after the copies, one process standing for both; addresses of the sides do not meet."""
    memory = dict(memory)
    for step in steps:
        for src, dst, nbytes in zip(step.src.tolist(), step.dst.tolist(), step.nbytes.tolist(), strict=True):
            memory.update({dst + i + 10_000: memory[src + i] for i in range(nbytes)})
            memory.update({dst + i: memory[src + i] for i in range(nbytes) if dst + i >= 1000})
    return memory


@given(runs, st.integers(1, 12))
def test_staged_writes_what_direct_writes(drawn: list[tuple[int, int, int]], chunk: int) -> None:
    descriptors = spread(drawn)
    start = {address: address % 251 for address in range(100, 300)}
    staged = stage(descriptors, StagingBuffers(src=2000, dst=3000, nbytes=200), chunk=chunk)
    after = copied(copied(start, staged.gather, staged.wire), staged.scatter)
    direct = copied(start, descriptors)
    written = [int(d) + i + 10_000 for d, n in zip(descriptors.dst, descriptors.nbytes, strict=True) for i in range(n)]
    assert [after[a] for a in written] == [direct[a] for a in written]
    assert int(staged.wire.nbytes.max()) <= chunk
    assert staged.wire.total_bytes == staged.gather.total_bytes == staged.scatter.total_bytes == descriptors.total_bytes


def test_tiny_runs_are_staged_and_long_runs_are_not() -> None:
    tiny = Descriptors.of(np.arange(4096) * 512, np.arange(4096) * 512, np.full(4096, 256))
    long = Descriptors.of([0, 1 << 24], [0, 1 << 24], [1 << 20, 1 << 20])
    assert choose(tiny, TCP).form == "staged"
    assert choose(long, TCP).form == "direct"
    assert "staged (direct 369" in str(choose(tiny, TCP))


def test_seconds_of_both_forms() -> None:
    """Two runs of 8 bytes: two long runs of at most 10, and everything copied twice."""
    model = CostModel(alpha=2, beta=3, gamma=5, delta=7, chunk=10, step=11)
    choice = choose(Descriptors.of([0, 100], [0, 100], [8, 8]), model)
    assert choice.direct_seconds == 2 * 2 + 3 * 16
    assert choice.staged_seconds == 2 * 2 + 3 * 16 + 2 * (5 * 16 + 7 * 2 + 11)


def test_where_both_cost_the_same_nothing_is_staged() -> None:
    free = CostModel(alpha=0, beta=0, gamma=0, delta=0, chunk=1)
    assert choose(Descriptors.of([0], [0], [8]), free).form == "direct"


def test_buffers_that_fit_exactly_will_do() -> None:
    assert stage(Descriptors.of([0], [0], [8]), StagingBuffers(100, 200, 8), chunk=4).wire.count == 2


def test_buffers_too_small_are_refused() -> None:
    with pytest.raises(PlanError, match="9 bytes to stage, over the 8"):
        stage(Descriptors.of([0], [0], [9]), StagingBuffers(100, 200, 8), chunk=4)


def test_constants_must_make_sense() -> None:
    with pytest.raises(PlanError, match="beta"):
        CostModel(alpha=1, beta=-1, gamma=0, delta=0, chunk=1)
    with pytest.raises(PlanError, match="chunk 0"):
        CostModel(alpha=1, beta=1, gamma=0, delta=0, chunk=0)
