"""Records refuse what contradicts itself when they are built."""

from collections.abc import Callable

import msgspec
import pytest
from msgspec import UNSET

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import (
    Axis,
    Component,
    Content,
    ContextParallel,
    Group,
    Parallel,
    Region,
    bind_layout,
)
from kvferry.layout.records import LIMIT
from kvferry.testing.layouts import page, state, worker

HEAD = Axis("head", 0, 1, 1, 8)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Axis("head", 0, 0, 4, 8), "count is 0"),
        (lambda: Axis("head", 0, 1, 0, 8), "total is 0"),
        (lambda: Axis("head", 0, 1, 4, 0), "stride is 0"),
        (lambda: Axis("head", 3, 2, 4, 8), r"holds \[3, 5\) of a total of 4"),
        (lambda: Axis("head", -1, 2, 4, 8), r"holds \[-1, 1\) of a total of 4"),
        (lambda: Content(0, "x"), "nbytes is 0"),
        (lambda: ContextParallel(0, 0, 1), "size is 0"),
        (lambda: ContextParallel(0, 2, 0), "interleave is 0"),
        (lambda: ContextParallel(2, 2, 1), "rank 2 is not below its size 2"),
        (lambda: ContextParallel(-1, 2, 1), "rank -1 is not below its size 2"),
        (lambda: Group("attention", 0), "block_tokens is 0"),
        (lambda: Group("state", 4, sliding_window=2), "a state group has no sliding_window"),
        (lambda: Group("state", 4, chunk=2), "a state group has no chunk"),
        (lambda: Group("attention", 4, context_parallel=ContextParallel(0, 2, 3)), "interleave 3 does not divide"),
        (
            lambda: Group("attention", 2**60, context_parallel=ContextParallel(0, 8, 2**60)),
            "one table entry covers block_tokens 1152921504606846976 x context_parallel size 8 positions",
        ),
        (lambda: Region(0, 0), "nbytes is 0"),
        (lambda: Region(LIMIT, 1), "reaches past"),
        (lambda: Parallel(1, 1, 0, 1, 0, 1), "tp_rank 1 is not below tp_size 1"),
        (lambda: Parallel(0, 1, 2, 1, 0, 1), "pp_rank 2"),
        (lambda: Parallel(0, 1, 0, 1, -1, 1), "pcp_rank -1"),
        (lambda: Component("l", 0, "kv", 0, 0, 0, 8, (), Content(8, "x")), "num_blocks is 0"),
        (lambda: Component("l", 0, "kv", 0, 0, 1, 0, (), Content(8, "x")), "block_stride is 0"),
        (
            lambda: Component("l", 0, "kv", 0, 0, 1, 8, (Axis("h", 0, 1, 1, 8),) * 2, Content(8, "x")),
            "names an axis twice",
        ),
    ],
)
def test_refused(build: Callable[[], object], said: str) -> None:
    with pytest.raises(PlanError, match=said) as refused:
        build()
    assert refused.value.reason is PlanReason.INVALID_LAYOUT


def test_what_is_just_allowed() -> None:
    assert Axis("head", 3, 1, 4, 1).stop == 4
    assert Region(LIMIT - 1, 1).stop == LIMIT
    assert ContextParallel(1, 2, 1).rank == 1
    assert Group("attention", 2**60, context_parallel=ContextParallel(0, 7, 2**60)).entry_tokens == 7 * 2**60


@pytest.mark.parametrize("memory", ["cpu\n", "cuda:0\n", " cpu", "cuda:", "cuda:12345", "CPU"])
def test_a_memory_is_named_as_it_is_spelt_and_nothing_more(memory: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="matching regex"):
        msgspec.convert({"address": 0, "nbytes": 1, "memory": memory}, Region)


def test_a_state_may_leave_out_what_only_rows_have() -> None:
    whole = state("s0", part=(0, 4, 4), nbytes=8)
    short = msgspec.structs.replace(whole, kernel_blocks=UNSET, kernel_stride=UNSET, tokens_per_row=UNSET)
    assert (short.pages, short.page_stride, short.row_tokens) == (1, 0, 1)
    assert bind_layout(worker([short])).placement.components == (short,)


def test_sizes_of_a_component() -> None:
    one = page("l0", heads=(2, 2, 6), tokens=4, nbytes=8, kernel_blocks=3, kernel_stride=70, num_blocks=5, address=100)
    assert one.live_bytes == 3 * 2 * 4 * 8
    assert one.last_in_block == 2 * 70 + 64
    assert one.stop == 100 + 4 * 210 + 204
    assert [axis.name for axis in one.global_axes] == ["head"]
    assert one.token_axis == Axis("token", 0, 4, 4, 8)


def test_a_share_of_one_rank_is_no_share() -> None:
    alone, dealt = (Group("attention", 8, context_parallel=ContextParallel(0, size, 2)) for size in (1, 4))
    assert (alone.share, alone.entry_tokens) == (None, 8)
    assert (dealt.share, dealt.entry_tokens) == (ContextParallel(0, 4, 2), 32)
    last = msgspec.structs.replace(dealt, context_parallel=ContextParallel(3, 4, 2))
    assert last != dealt
    assert last.without_rank() == dealt.without_rank() == dealt
    pair = Group("attention", 8, context_parallel=ContextParallel(1, 2, 2))
    assert (pair.share, pair.entry_tokens) == (ContextParallel(1, 2, 2), 16)
