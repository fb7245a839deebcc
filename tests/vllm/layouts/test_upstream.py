"""A worker's caches in the terms of vLLM's own connector: what is told of them beside the regions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvferry.errors import RemoteProtocolError
from kvferry.runtime.upstream_caches import Declared, OwnCaches
from kvferry.vllm.layouts.upstream import own_caches

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS, HEADS, WIDTH = 32, 4, 2, 16
PAGE = 2 * BLOCK * HEADS * WIDTH * 2
"""Of bfloat16 keys and values; one of 8 bits is padded to it, so that all blocks have one size."""


def full(dtype: torch.dtype = torch.bfloat16) -> KVCacheSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=dtype, page_size_padded=PAGE)


def window(dtype: torch.dtype = torch.bfloat16) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=HEADS,
        head_size=WIDTH,
        dtype=dtype,
        sliding_window=40,
        page_size_padded=PAGE,
    )


def state() -> KVCacheSpec:
    return MambaSpec(block_size=4096, shapes=((4, 8),), dtypes=(torch.float32,), page_size_padded=PAGE)


@pytest.mark.parametrize(
    ("specs", "whole"),
    [
        ([full()], False),
        ([full(), window()], False),
        ([full(), state()], True),
        ([full(torch.float8_e4m3fn), window()], True),
    ],
    ids=["dense", "window", "state", "two precisions"],
)
def test_where_vllm_clears_blocks_they_are_expected_whole(specs: list[KVCacheSpec], *, whole: bool) -> None:
    assert caches(specs).whole_blocks is whole


def caches(specs: list[KVCacheSpec], *, kernel_blocks: tuple[int, ...] = ()) -> OwnCaches:
    names = [f"model.layers.{number}.attn" for number in range(len(specs))]
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_layout="LBHNC",
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)],
    )
    tensors = {
        name: torch.zeros((BLOCKS * ratio, 1, 1, PAGE // ratio), dtype=torch.int8)
        for name, ratio in zip(names, kernel_blocks or (1,) * len(names), strict=True)
    }
    vllm_config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        model_config=SimpleNamespace(dtype="torch.bfloat16", use_mla=False),
    )
    return own_caches(tensors, config, vllm_config=vllm_config, declared=Declared())


@pytest.mark.parametrize(("kernel_blocks", "fit"), [((1, 1), True), ((2, 2), False), ((1, 2), False)])
def test_groups_whose_blocks_differ_are_told_as_long_as_they_are_kernel_blocks(
    kernel_blocks: tuple[int, int], *, fit: bool
) -> None:
    small = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16, sliding_window=40
    )
    large = FullAttentionSpec(block_size=2 * BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float8_e4m3fn)
    assert small.page_size_bytes == large.page_size_bytes == PAGE
    told = caches([small, large], kernel_blocks=kernel_blocks)
    assert (told.unfit is None) is fit
    assert not told.one_block_size
    if fit:
        told.check_declared()
        with pytest.raises(RemoteProtocolError, match="cache groups differ"):
            replace(told, declared=Declared(block_size=16)).check_declared()
