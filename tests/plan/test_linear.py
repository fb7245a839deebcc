"""What work grows with: counted in executed bytecodes, which no other process can slow down.

Every Python loop shows in the count. Binding does not grow with the blocks at all: what does is arrays, and these are
held to a number of bytes for each descriptor in ``test_memory.py``.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvferry.layout import BoundLayout, Component, Group, Layout, Region, bind_layout, check_layout
from kvferry.plan import BlockTable, TransferRequest, compile_plan
from kvferry.testing.layouts import at, page, side_by_side, state, worker

TOKENS, POOL, LAYERS = 4, 2048, 61
LINEAR = 1.1
"""Twice the size may take so many times the work of twice the work: sorting grows a little faster than linear."""


def bytecodes(work: Callable[[], Any]) -> int:
    """How many instructions of Python ``work`` executes, in all functions that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def grows(work: Callable[[int], Callable[[], Any]], sizes: tuple[int, int, int]) -> float:
    """Work added by the second doubling over that of the first: 2 where it is linear, 4 where it is quadratic."""
    first, second, third = (bytecodes(work(size)) for size in sizes)
    return (third - second) / (second - first)


def test_the_measure_tells_a_loop_in_a_loop() -> None:
    def pairs(size: int) -> Callable[[], Any]:
        return lambda: [i for i in range(size) for j in range(size) if i == j]

    assert grows(lambda size: lambda: [i for i in range(size)], (64, 128, 256)) == 2  # noqa: C416
    assert grows(pairs, (64, 128, 256)) > 3.5


def apart(layers: int) -> Layout:
    """Tensors of their own: nothing shares an address range."""
    return worker(
        side_by_side([page(f"l{i}", tokens=TOKENS, nbytes=8, num_blocks=POOL) for i in range(layers)], base=0)
    )


def in_one_row(layers: int) -> Layout:
    """All layers in one row of each block, so that all of them are one cluster with frames."""
    row = layers * TOKENS * 8
    parts = [page(f"l{i}", tokens=TOKENS, nbytes=8, num_blocks=POOL, block_stride=row) for i in range(layers)]
    return worker([at(part, i * TOKENS * 8) for i, part in enumerate(parts)])


def of_unequal_strides(layers: int) -> Layout:
    """Clusters of two whose blocks have no common frame, so that all runs of all blocks are enumerated."""
    parts: list[Component] = []
    for i in range(layers // 2):
        parts.append(page(f"a{i}", tokens=1, nbytes=8, num_blocks=8, address=i * 4096, block_stride=32))
        parts.append(page(f"b{i}", tokens=1, nbytes=8, num_blocks=4, address=i * 4096 + 16, block_stride=64))
    return worker(parts, groups=[Group("attention", 1)])


def overlaid(layers: int) -> Layout:
    """Attention and state of a hybrid take turns in the blocks of each storage."""
    groups = [Group("attention", TOKENS), Group("state", TOKENS)]
    parts: list[Component] = []
    for i in range(layers // 2):
        parts.append(page(f"a{i}", tokens=TOKENS, nbytes=8, num_blocks=8, address=i * 4096))
        parts.append(state(f"s{i}", nbytes=16, num_blocks=8, address=i * 4096, block_stride=32, group=1))
    return worker(parts, groups=groups)


def in_many_regions(layers: int) -> Layout:
    """Each layer in a region of its own, none touching another."""
    size = TOKENS * 8 * POOL
    parts = [page(f"l{i}", tokens=TOKENS, nbytes=8, num_blocks=POOL, address=2 * i * size) for i in range(layers)]
    return worker(parts, regions=[Region(2 * i * size, size) for i in range(layers)])


@pytest.mark.parametrize("shape", [apart, in_one_row, of_unequal_strides, overlaid, in_many_regions])
def test_checking_a_layout_is_linear_in_its_components(shape: Callable[[int], Layout]) -> None:
    def work(layers: int) -> Callable[[], Any]:
        layout = shape(layers)
        return lambda: check_layout(layout)

    assert grows(work, (64, 128, 256)) < 2 * LINEAR


@pytest.mark.parametrize("shape", [apart, in_one_row, overlaid, in_many_regions])
def test_binding_a_layout_and_compiling_a_pair_are_linear_in_layers(shape: Callable[[int], Layout]) -> None:
    def work(layers: int) -> Callable[[], Any]:
        layout = shape(layers)

        def compiled() -> None:
            end = bind_layout(layout).placement
            pair = compile_plan([end], [end]).pair(0, 0)
            assert pair is not None
            assert pair.rows

        return compiled

    assert grows(work, (64, 128, 256)) < 2 * LINEAR


def bound_to(blocks: int, end: BoundLayout, pick: Callable[[int], list[int]]) -> Callable[[], Any]:
    """Binding the first ``blocks`` blocks of a request whose pair is compiled."""
    plan = compile_plan([end.placement], [end.placement])
    pair = plan.pair(0, 0)
    assert pair is not None
    table = BlockTable.of(pick(blocks), first_token=0)
    request = TransferRequest(0, blocks * TOKENS, (table,), (table,))

    def work() -> None:
        plan.check(request)
        assert pair.bind(request, src=end.binding, dst=end.binding).total_bytes == blocks * TOKENS * 8 * LAYERS

    work()
    return work


@pytest.mark.parametrize("shape", [apart, in_one_row])
@pytest.mark.parametrize("scattered", [False, True])
def test_binding_a_request_loops_over_no_blocks(shape: Callable[[int], Layout], scattered: bool) -> None:
    """Sixteen times the blocks, the same instructions: all that grows with blocks happens inside NumPy."""
    end = bind_layout(shape(LAYERS))

    def pick(blocks: int) -> list[int]:
        ids: list[int] = (np.random.default_rng(7).permutation(POOL) if scattered else np.arange(POOL)).tolist()
        return ids[:blocks]

    few, many = (bytecodes(bound_to(blocks, end, pick)) for blocks in (64, 1024))
    assert many == pytest.approx(few, rel=0.02)
