"""Each known order inside a page against the bytes that its description names."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from kvferry.errors import ConfigError
from kvferry.vllm.layouts import Heads, Page, Part, parts_of

from .conftest import addresses

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def page(**changed: object) -> Page:
    """A head-major page of FLASH_ATTN: 3 of 6 heads, 8 tokens, bfloat16, keys and values of 16."""
    plain = Page(
        layer="attn",
        backend="FLASH_ATTN",
        kernel="cuda",
        order="LBHNC",
        cache="bfloat16",
        tokens=8,
        state_tokens=Fraction(1),
        slots=3,
        rows=8,
        width=64,
        slot_stride=512,
        row_stride=64,
        itemsize=2,
        heads=Heads(3, 3, 6),
        repacked=False,
        key_size=16,
        value_size=16,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def by_name(parts: tuple[Part, ...]) -> dict[str, Part]:
    return {part.name: part for part in parts}


def axes(part: Part) -> set[str]:
    return {axis.name for axis in part.axes}


@pytest.mark.parametrize("order", ORDERS)
def test_rows_follow_the_strides_of_every_layout(order: str, assert_exact) -> None:
    # Bytes numbered in memory order, seen through the logical axes: numpy computes each address independently.
    counts = {"L": 2, "B": 5, "H": 3, "N": 8, "C": 64}
    memory = np.arange(2 * 5 * 3 * 8 * 64).reshape([counts[a] for a in order])
    logical = memory.transpose([order.index(a) for a in "LBHNC"])
    layer, block = logical[1], 4
    strides = [int(layer[tuple(np.eye(4, dtype=int)[i])] - layer[0, 0, 0, 0]) for i in range(4)]
    (part,) = parts_of(page(order=order, slot_stride=strides[1], row_stride=strides[2]))
    start = int(layer[block, 0, 0, 0])
    assert_exact(part, lambda at, byte: int(layer[block, at["head"] - 3, at["token"], byte]) - start)
    assert part.content.type == "bfloat16:k16+v16"
    assert [(a.start, a.total) for a in part.axes if a.name == "head"] == [(3, 6)]


def test_mla_has_one_head_of_one() -> None:
    latent = page(
        backend="CPU_MLA", slots=1, width=1152, slot_stride=9216, row_stride=1152,
        heads=Heads(0, 1, 1), key_size=576, value_size=0,
    )  # fmt: skip
    (part,) = parts_of(latent)
    assert [(a.name, a.start, a.count, a.total) for a in part.axes] == [("head", 0, 1, 1), ("token", 0, 8, 8)]
    assert part.content.type == "bfloat16:k576"


def test_rows_of_656_bytes_are_one_row() -> None:
    packed = page(
        backend="FLASHMLA_SPARSE", cache="fp8_ds_mla", slots=1, width=656, slot_stride=8 * 656, row_stride=656,
        itemsize=1, heads=Heads(0, 1, 1), key_size=576, value_size=0,
    )  # fmt: skip
    (part,) = parts_of(packed)
    assert (part.content.nbytes, part.content.type) == (656, "fp8_ds_mla:k576:packed656")


def test_several_states_of_one_token_are_an_axis(assert_exact) -> None:
    pooled = page(tokens=4, state_tokens=Fraction(1, 2))
    (part,) = parts_of(pooled)
    assert part.tokens_per_row == 1
    assert_exact(part, lambda at, c: (at["head"] - 3) * 512 + (at["token"] * 2 + at["state"]) * 64 + c)


@pytest.mark.parametrize("rows", [8, 32])
def test_cpu_keys_are_columns_of_the_kernel_block_and_values_rows(rows: int, assert_exact, covered) -> None:
    cpu = page(backend="CPU_ATTN", kernel="vec", rows=rows, tokens=rows, slot_stride=rows * 64)
    parts = by_name(parts_of(cpu))
    assert set(parts) == {"k", "v"}
    assert_exact(parts["k"], lambda at, c: (at["head"] - 3) * rows * 64 + (at["dim"] * rows + at["token"]) * 2 + c)
    assert_exact(parts["v"], lambda at, c: (at["head"] - 3) * rows * 64 + rows * 32 + at["token"] * 32 + c)
    assert covered(tuple(parts.values())) == list(range(3 * rows * 64))


@pytest.mark.parametrize("kernel", ["amx", "neon", "rvv", "cpu"])
def test_other_instruction_sets_are_opaque(kernel: str) -> None:
    (part,) = parts_of(page(backend="CPU_ATTN", kernel=kernel))
    assert [(a.name, a.start, a.count, a.total) for a in part.axes] == [("shard", 1, 1, 2), ("token", 0, 1, 1)]
    assert part.tokens_per_row == 8
    assert part.content.nbytes == 3 * 8 * 64
    assert part.content.type == f"opaque:CPU_ATTN:bfloat16:LBHNC-{kernel}:8"


def test_nvfp4_sides_hold_data_of_all_heads_then_scales_of_all_heads(covered) -> None:
    heads, rows, size = 3, 8, 64
    data, scale = size // 2, size // 16
    nvfp4 = page(
        backend="FLASHINFER", cache="nvfp4", slots=2 * heads, width=data + scale, slot_stride=rows * (data + scale),
        row_stride=data + scale, itemsize=1, repacked=True, key_size=size, value_size=size,
    )  # fmt: skip
    # The described order, laid out byte by byte.
    described: list[tuple[object, ...]] = []
    for side in "kv":
        described += [(f"{side}.data", h, t, c) for h in range(heads) for t in range(rows) for c in range(data)]
        described += [(f"{side}.scale", h, c) for h in range(heads) for c in range(rows * scale)]
    parts = parts_of(nvfp4)
    assert covered(parts) == list(range(len(described))) == list(range(nvfp4.nbytes))
    for part in parts:
        for (names, byte), address in addresses(part).items():
            at = dict(names)
            place = (at["head"] - 3, at["token"], byte) if part.name.endswith("data") else (at["head"] - 3, byte)
            assert described[address] == (part.name, *place)
    assert {p.name: p.tokens_per_row for p in parts} == {"k.data": 1, "k.scale": 8, "v.data": 1, "v.scale": 8}


@pytest.mark.parametrize(
    "changed",
    [
        {"slot_stride": 36, "row_stride": 6 * 36},
        {"repacked": False},
        {"slots": 3},
        {"width": 40, "row_stride": 40, "slot_stride": 320},
    ],
)
def test_nvfp4_in_another_order_is_opaque(changed: dict[str, object]) -> None:
    described = page(
        backend="FLASHINFER", cache="nvfp4", slots=6, width=36, slot_stride=8 * 36, row_stride=36, itemsize=1,
        repacked=True, key_size=64, value_size=64,
    )  # fmt: skip
    assert len(parts_of(described)) == 4
    (part,) = parts_of(replace(described, **changed))  # type: ignore[arg-type]
    assert part.content.type.startswith("opaque:FLASHINFER:nvfp4:")


def sides(**changed: object) -> Page:
    """K and V as two slots, 3 heads of 16 bfloat16 each; the sides lie far apart."""
    return page(
        backend="B12X", slots=2, width=3 * 32, slot_stride=100_000, row_stride=96, repacked=True, **changed
    )  # fmt: skip


def test_the_slot_axis_may_be_key_and_value(assert_exact) -> None:
    parts = by_name(parts_of(sides()))
    assert_exact(parts["k"], lambda at, c: at["token"] * 96 + (at["head"] - 3) * 32 + c)
    assert_exact(parts["v"], lambda at, c: 100_000 + at["token"] * 96 + (at["head"] - 3) * 32 + c)
    assert {(a.start, a.count, a.total) for p in parts.values() for a in p.axes if a.name == "head"} == {(3, 3, 6)}


def test_two_heads_are_not_taken_for_key_and_value() -> None:
    # Two slots that the backend published are {K, V} even where the rank holds two heads of the same width.
    (part,) = parts_of(page(backend="FLASH_ATTN", slots=2, heads=Heads(0, 2, 2), repacked=True, slot_stride=512))
    assert "shard" in axes(part)


def test_packed_sides_of_rocm(assert_exact, covered) -> None:
    rocm = replace(sides(), backend="ROCM_ATTN", kernel="rocm")
    parts = by_name(parts_of(rocm))
    # keys [head][dim / 8][token][8 elements], values [head][dim][token]
    assert_exact(parts["k"], lambda at, c: (((at["head"] - 3) * 2 + at["pack"]) * 8 + at["token"]) * 16 + c)
    assert_exact(parts["v"], lambda at, c: 100_000 + (((at["head"] - 3) * 16 + at["dim"]) * 8 + at["token"]) * 2 + c)
    assert covered((parts["k"],)) == list(range(768))


@pytest.mark.parametrize("backend", ["FLASHMLA_SPARSE_DSV4", "DEEPSEEK_SPARSE_SWA"])
def test_584_byte_rows_are_data_then_scales(backend: str, assert_exact, covered) -> None:
    packed = page(
        backend=backend, cache="fp8_ds_mla", tokens=256, state_tokens=Fraction(4), slots=1, rows=64, width=584,
        slot_stride=64 * 584, row_stride=584, itemsize=1, heads=Heads(0, 1, 1), key_size=512, value_size=0,
    )  # fmt: skip
    parts = parts_of(packed)
    named = by_name(parts)
    assert_exact(named["data"], lambda at, c: at["token"] * 576 + c)
    assert_exact(named["scale"], lambda at, c: 64 * 576 + at["token"] * 8 + c)
    assert covered(parts) == list(range(64 * 584))
    assert {p.tokens_per_row for p in parts} == {4}


def indexer(**changed: object) -> Page:
    return page(
        backend="DEEPSEEK_V32_INDEXER", cache="uint8", tokens=64, slots=1, rows=64, width=132, slot_stride=64 * 132,
        row_stride=132, itemsize=1, heads=Heads(0, 1, 1), key_size=132, value_size=0, **changed,
    )  # fmt: skip


def test_index_keys_are_values_then_scales(assert_exact) -> None:
    named = by_name(parts_of(indexer()))
    assert_exact(named["data"], lambda at, c: at["token"] * 128 + c)
    assert_exact(named["scale"], lambda at, c: 64 * 128 + at["token"] * 4 + c)


def test_index_keys_that_a_platform_shuffles_are_opaque() -> None:
    (part,) = parts_of(replace(indexer(), kernel="rocm"))
    assert part.content.type == "opaque:DEEPSEEK_V32_INDEXER:uint8:LBHNC-rocm:64"
    assert [(a.start, a.total) for a in part.axes if a.name == "shard"] == [(0, 1)]


def test_an_unknown_backend_is_one_opaque_row_of_the_rank() -> None:
    (part,) = parts_of(page(backend="SOMEONES_OWN", heads=Heads(1, 1, 4), slots=3))
    assert [(a.name, a.start, a.count, a.total) for a in part.axes] == [("shard", 1, 1, 4), ("token", 0, 1, 1)]
    assert (part.content.nbytes, part.tokens_per_row) == (3 * 8 * 64, 8)


def test_an_unknown_order_in_pieces_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'SOMEONES_OWN'.*strides 100000 and 64"):
        parts_of(page(backend="SOMEONES_OWN", slot_stride=100_000))
