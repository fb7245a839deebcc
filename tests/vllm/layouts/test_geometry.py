"""Blocks and kernel blocks from the tensor, live bytes from the spec, contradictions refused with both values."""

from fractions import Fraction

import pytest

from kvferry.errors import PlanError
from kvferry.vllm.layouts import PageSpec, Paging, View, check_page, paging_of, split_further


def dense(rows: int, slots: int, states: int, width: int) -> View:
    return View(4096, (rows, slots, states, width), (slots * states * width, states * width, width, 1), 1)


def spec(tokens: int, *, slots: int, width: int) -> PageSpec:
    return PageSpec(
        block_tokens=tokens,
        slots=slots,
        state_tokens=Fraction(1),
        content_nbytes=width,
        page_nbytes=slots * tokens * width,
    )


@pytest.mark.parametrize(("block", "kernel"), [(768, 64), (544, 32)])
def test_ratio_comes_from_the_rows_of_the_tensor(block: int, kernel: int) -> None:
    view, ratio = dense(40 * (block // kernel), 2, kernel, 576), block // kernel
    paging = paging_of(view, 40, layer="attn")
    assert paging == Paging(40, 2 * block * 576, ratio, 2 * kernel * 576)
    check_page(view, spec(block, slots=2, width=576), paging, layer="attn")


def test_l04_logical_rows_stay_whole_whatever_a_kernel_may_prefer() -> None:
    view = dense(7, 1, 128, 576)
    paging = paging_of(view, 7, layer="attn")
    assert paging == Paging(7, 128 * 576, 1, 0)
    check_page(view, spec(128, slots=1, width=576), paging, layer="attn")


def test_one_token_kernel_blocks() -> None:
    paging = paging_of(dense(64 * 5, 1, 1, 576), 5, layer="indexer")
    assert paging.block_stride * 3 == 192 * 576
    assert paging.kernel_blocks == 64


def test_rows_that_are_no_multiple_of_the_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="100 tensor rows are not a multiple of 40 blocks"):
        paging_of(dense(100, 1, 64, 576), 40, layer="attn")


def test_a_single_block_is_a_cache_too() -> None:
    assert paging_of(dense(3, 1, 64, 576), 1, layer="attn") == Paging(1, 3 * 64 * 576, 3, 64 * 576)


@pytest.mark.parametrize("blocks", [0, -1])
def test_no_blocks_are_refused(blocks: int) -> None:
    with pytest.raises(PlanError, match=f"not a multiple of {blocks} blocks"):
        paging_of(dense(3, 1, 64, 576), blocks, layer="attn")


def test_fewer_rows_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="0 tensor rows"):
        paging_of(dense(0, 1, 64, 576), 40, layer="attn")


def test_length_over_stride_is_refused_with_both_numbers() -> None:
    view = View(0, (40, 2, 768, 576), (73728, 768 * 576, 576, 1), 1)
    with pytest.raises(PlanError, match="transfer length 884736 exceeds block stride 73728"):
        check_page(view, spec(768, slots=2, width=576), paging_of(view, 40, layer="attn"), layer="attn")


def test_heads_apart_are_measured_one_by_one() -> None:
    # [head][block][token]: a page is longer than the block stride, one head of it is not.
    fits = View(0, (40, 2, 64, 576), (64 * 576, 40 * 64 * 576, 576, 1), 1)
    check_page(fits, spec(64, slots=2, width=576), paging_of(fits, 40, layer="attn"), layer="attn")
    tight = View(0, (40, 2, 64, 576), (64 * 576 - 1, 40 * 64 * 576, 576, 1), 1)
    with pytest.raises(PlanError, match="transfer length 36864 exceeds block stride 36863"):
        check_page(tight, spec(64, slots=2, width=576), paging_of(tight, 40, layer="attn"), layer="attn")


def test_a_page_not_divisible_by_the_ratio_is_refused_with_both_numbers() -> None:
    view = dense(80, 1, 272, 3)
    with pytest.raises(PlanError, match="page of 1635 bytes and 545 tokens is not divisible by its 2 kernel blocks"):
        check_page(view, spec(545, slots=1, width=3), paging_of(view, 40, layer="attn"), layer="attn")


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (dense(40, 4, 64, 576), "slots: the tensor has 4, the spec 2"),
        (dense(40, 2, 65, 576), "kernel block: the tensor has 65, the spec 64"),
        (dense(40, 2, 64, 600), "content bytes: the tensor has 600, the spec 576"),
        (View(0, (40, 2, 64, 576), (147456, 73728, 1152, 2), 1), "elements of 1 bytes lie 2 apart"),
        (View(0, (40, 128, 576), (73728, 576, 1), 1), "has shape"),
    ],
)
def test_what_tensor_and_spec_tell_differently_is_refused(view: View, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_page(view, spec(64, slots=2, width=576), paging_of(view, 40, layer="attn"), layer="attn")


def test_compressed_rows_hold_several_tokens() -> None:
    compressed = PageSpec(block_tokens=256, slots=1, state_tokens=Fraction(4), content_nbytes=584, page_nbytes=64 * 584)
    view = dense(10, 1, 64, 584)
    check_page(view, compressed, paging_of(view, 10, layer="attn"), layer="attn")
    wrong = dense(10, 1, 128, 584)
    with pytest.raises(PlanError, match="the tensor has 128, the spec 64"):
        check_page(wrong, compressed, paging_of(wrong, 10, layer="attn"), layer="attn")


def test_a_packed_page_is_split_once() -> None:
    packed = Paging(10, 100_000, 1, 0)
    assert split_further(packed, 4, 64 * 584) == Paging(10, 100_000, 4, 64 * 584)
    with pytest.raises(PlanError, match="already split into 2"):
        split_further(Paging(10, 100_000, 2, 50_000), 4, 64 * 584)
