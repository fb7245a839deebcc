"""Every kind of pair that ``docs/pairs.md`` lists, by construction and held to the oracle byte by byte."""

from itertools import product

import msgspec
import pytest

from kvferry.layout import Axis, Component, Content, Group, Layout
from kvferry.testing.layouts import page, state, worker

from .pairs import ORDERS, POOL, Cache, Section, attention, interleaved, planned, refused, request, share, states, tp

P, D = 1 << 30, 1 << 40


def used(plan: dict) -> dict[int, list[int]]:  # type: ignore[type-arg]
    """Consumer -> the producers that serve it."""
    serving: dict[int, list[int]] = {}
    for transfer in plan["transfers"]:
        serving.setdefault(transfer["consumer"], []).append(transfer["producer"])
    return serving


# --------------------------------------------------------------------------------------------------- parallelism


@pytest.mark.parametrize(("producers", "consumers"), list(product([1, 2, 3, 4, 6, 12], repeat=2)))
def test_tensor_parallel(producers: int, consumers: int) -> None:
    """12 heads over both sides, also where neither number divides the other (4 and 6)."""
    src, dst = tp(producers, 12, P), tp(consumers, 12, D, order="LBNHC")
    plan = planned(src, dst, request(3, 14, src, dst))
    mine, theirs = ([range(12 * r // n, 12 * (r + 1) // n) for r in range(n)] for n in (producers, consumers))
    assert used(plan) == {
        j: [i for i, held in enumerate(mine) if set(held) & set(needed)] for j, needed in enumerate(theirs)
    }


@pytest.mark.parametrize(("producers", "consumers"), list(product([1, 2, 4, 8], repeat=2)))
def test_more_ranks_than_heads(producers: int, consumers: int) -> None:
    """Two heads: ranks beyond them hold copies, and the load is spread over the copies."""
    src, dst = tp(producers, 2, P), tp(consumers, 2, D)
    plan = planned(src, dst, request(0, 11, src, dst))
    needs = max(1, 2 // consumers)
    assert all(len(serving) == min(needs, producers) for serving in used(plan).values())
    busy = {transfer["producer"] for transfer in plan["transfers"]}
    assert len(busy) == min(producers, max(2, consumers) if producers > 1 else 1)


@pytest.mark.parametrize(("producers", "consumers"), list(product([1, 2, 3, 8], repeat=2)))
def test_mla(producers: int, consumers: int) -> None:
    """One latent row for all heads: every rank holds all of it, and one serves each consumer."""
    src, dst = (tp(n, 1, base, axis=None) for n, base in ((producers, P), (consumers, D)))
    serving = used(planned(src, dst, request(2, 13, src, dst)))
    assert serving == {j: [j % producers] for j in range(consumers)}


def stages(count: int, base: int, *, turns: bool = False, ranks: int = 1, heads: int = 4) -> list[Layout]:
    """Six layers over pipeline stages, in stretches or in turns, each stage of ``ranks`` tensor-parallel ranks."""
    names = [f"l{i}" for i in range(6)]
    cut = -(-len(names) // count)
    held = [names[i::count] if turns else names[i * cut : (i + 1) * cut] for i in range(count)]
    return [
        attention(Cache(share(rank, ranks, heads), layers=tuple(layers)), base=base + (place * ranks + rank << 20))
        for place, layers in enumerate(held)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("turns", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(("producers", "consumers"), list(product([1, 2, 3], repeat=2)))
def test_pipeline_stages(producers: int, consumers: int, turns: tuple[bool, bool]) -> None:
    src, dst = stages(producers, P, turns=turns[0]), stages(consumers, D, turns=turns[1])
    planned(src, dst, request(0, 9, src, dst))


@pytest.mark.parametrize("ranks", [(1, 4), (2, 4), (4, 2), (4, 1)], ids=str)
def test_pipeline_and_tensor_parallel(ranks: tuple[int, int]) -> None:
    src, dst = stages(2, P, ranks=ranks[0]), stages(3, D, ranks=ranks[1], turns=True)
    planned(src, dst, request(1, 10, src, dst))


def dealt(size: int, interleave: int, block_tokens: int, base: int, *, copies: int = 1) -> list[Layout]:
    """A context-parallel side: ``size`` shares of the positions, each on ``copies`` ranks."""
    return [
        attention(
            Cache((0, 1, 1), axis=None, tokens=block_tokens),
            base=base + (rank << 20),
            groups=interleaved(rank % size, size, interleave, block_tokens),
        )
        for rank in range(size * copies)
    ]


@pytest.mark.parametrize("interleaves", [(1, 1), (1, 4), (4, 2), (8, 8)], ids=str)
@pytest.mark.parametrize(("producers", "consumers"), list(product([1, 2, 4], repeat=2)))
def test_context_parallel(producers: int, consumers: int, interleaves: tuple[int, int]) -> None:
    """Positions dealt out over ranks, with sizes and interleaves of their own on both sides."""
    src = dealt(producers, interleaves[0], 8, P)
    dst = dealt(consumers, interleaves[1], 8, D)
    planned(src, dst, request(3, 29, src, dst))


def test_l38_context_parallel_4_to_2() -> None:
    """P dcp4, D dcp2, one token a turn: D0 reads {P0, P2}, D1 {P1, P3}."""
    src, dst = dealt(4, 1, 8, P), dealt(2, 1, 8, D)
    assert used(planned(src, dst, request(0, 31, src, dst))) == {0: [0, 2], 1: [1, 3]}


def test_context_parallel_with_copies() -> None:
    """TP 4 with dcp 2: each share is on two ranks."""
    src, dst = dealt(2, 2, 8, P, copies=2), dealt(1, 1, 16, D, copies=2)
    assert used(planned(src, dst, request(0, 20, src, dst))) == {0: [0, 1], 1: [2, 3]}


# --------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize(("src_order", "dst_order"), list(product(ORDERS, repeat=2)))
def test_page_orders(src_order: str, dst_order: str) -> None:
    src, dst = tp(1, 2, P, order=src_order), tp(2, 2, D, order=dst_order)
    planned(src, dst, request(2, 15, src, dst))


@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(4, 8), (8, 4), (12, 8), (8, 12), (3, 16)])
def test_block_sizes(src_tokens: int, dst_tokens: int) -> None:
    src, dst = tp(2, 2, P, tokens=src_tokens), tp(1, 2, D, tokens=dst_tokens)
    planned(src, dst, request(1, 18, src, dst))


@pytest.mark.parametrize("kernels", [((4, 4), (8, 2)), ((8, 2), (4, 4)), ((6, 2), (4, 3)), ((1, 16), (16, 1))], ids=str)
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_kernel_block_sizes(kernels: tuple[tuple[int, int], tuple[int, int]], order: str) -> None:
    """(tokens, kernel blocks in a block) on either side."""
    src, dst = (
        tp(1, 2, base, tokens=tokens, kernel_blocks=blocks, order=order)
        for (tokens, blocks), base in zip(kernels, (P, D), strict=True)
    )
    planned(src, dst, request(5, 31, src, dst))


def test_keys_by_column() -> None:
    """Keys stored column by column with kernel blocks of unequal size, values by row."""

    def side(tokens: int, kernels: int, base: int) -> list[Layout]:
        content = Content(2, "bfloat16")
        keys = (
            Axis("head", 0, 2, 2, 4 * tokens * 2),
            Axis("dim", 0, 4, 4, tokens * 2),
            Axis("token", 0, tokens, tokens, 2),
        )
        stride = 2 * 4 * tokens * 2
        parts = [Component("l0", 0, "k", 0, base, POOL, stride * kernels, keys, content, kernels, stride, 1)]
        values = page(
            "l0", component="v", heads=(0, 2, 2), tokens=tokens, nbytes=8, kernel_blocks=kernels, address=base + 65536
        )
        return [worker([*parts, values])]

    src, dst = side(4, 2, P), side(8, 1, D)
    planned(src, dst, request(1, 15, src, dst))


@pytest.mark.parametrize("padded", [(True, False), (False, True), (True, True)], ids=str)
def test_padded_and_unpadded_pages(padded: tuple[bool, bool]) -> None:
    def side(padding: bool, base: int) -> list[Layout]:
        kernel = 16 + 5 * padding
        parts = [
            page(f"l{i}", heads=(0, 2, 2), tokens=4, nbytes=2, kernel_blocks=2, kernel_stride=kernel,
                 block_stride=2 * kernel + 7 * padding, address=base + i * 4096)
            for i in range(2)
        ]  # fmt: skip
        return [worker(parts)]

    src, dst = side(padded[0], P), side(padded[1], D)
    planned(src, dst, request(0, 21, src, dst))


def test_packed_rows_and_separate_tensors() -> None:
    """Rows of 100 bytes that hold three layers with gaps between, and three tensors."""
    rows = [page(f"l{i}", tokens=4, nbytes=6, block_stride=100, address=P + i * 30) for i in range(3)]
    src, dst = [worker(rows)], tp(1, 1, D, layers=("l0", "l1", "l2"), content=Content(6, "bytes:6"))
    planned(src, dst, request(0, 14, src, dst))
    planned(dst, src, request(0, 14, dst, src))


def test_groups_over_one_storage() -> None:
    """Three layers of a full group in a row, a window group and a state overlaid from its first byte."""
    groups = [Group("attention", 4), Group("attention", 4, sliding_window=6), Group("state", 4)]

    def side(base: int, apart: int) -> list[Layout]:
        parts = [page(f"l{i}", tokens=4, nbytes=6, block_stride=100, address=base + i * 25) for i in range(3)]
        parts.append(page("w0", tokens=4, nbytes=20, block_stride=100, address=base + apart, group=1))
        parts.append(state("s0", nbytes=90, block_stride=100, address=base + 2 * apart, group=2))
        return [worker(parts, groups=groups)]

    def tables(first: int) -> list[dict]:  # type: ignore[type-arg]
        blocks = [(first + i) % POOL for i in range(8)]
        return [
            {"blocks": blocks[:4], "first_token": 0},
            {"blocks": [None, *blocks[4:7]], "first_token": 0},
            {"blocks": blocks[7:]},
        ]

    wanted = {
        "format": "kvferry.request/1",
        "tokens": {"start": 0, "stop": 14},
        "producer": tables(3),
        "consumer": tables(6),
    }
    for apart in ((0, 0), (0, 4096), (4096, 0)):
        planned(side(P, apart[0]), side(D, apart[1]), wanted)


@pytest.mark.parametrize("stop", [1, 6, 7, 16, 21])
@pytest.mark.parametrize("window", [{"sliding_window": 6}, {"chunk": 8}, {"sliding_window": 7, "chunk": 16}], ids=str)
def test_windows_and_chunks(window: dict[str, int], stop: int) -> None:
    groups = [Group("attention", 4, **window)]
    src, dst = (
        [attention(Cache(order=order), base=base, groups=groups)] for order, base in (("LBHNC", P), ("LBNHC", D))
    )
    planned(src, dst, request(0, stop, src, dst))


# --------------------------------------------------------------------------------------------------------- states

STATES = {
    "Mamba1": {"conv": Section(16, 3), "ssm": Section(16, 4)},
    "Mamba2": {
        "conv.x": Section(16, 3),
        "conv.B": Section(2, 5, replicated_beyond=2),
        "conv.C": Section(2, 5, replicated_beyond=2),
        "ssm": Section(8, 7),
    },
    "GDN": {"conv.q": Section(8, 3), "conv.k": Section(8, 3), "conv.v": Section(16, 3), "ssm": Section(8, 9)},
    "KDA": {"conv.q": Section(8), "conv.k": Section(8), "conv.v": Section(8), "ssm": Section(8, 16)},
    "short convolution": {"conv": Section(24, 2)},
}


@pytest.mark.parametrize(("producers", "consumers"), list(product([1, 2, 4, 8], repeat=2)))
@pytest.mark.parametrize("kind", STATES)
def test_states(kind: str, producers: int, consumers: int) -> None:
    src, dst = states(producers, STATES[kind], P), states(consumers, STATES[kind], D)
    planned(src, dst, request(8, 8, src, dst))


def test_hybrid_of_attention_and_state() -> None:
    """Seventeen kernel blocks in a block of attention, one state in a block."""
    groups = [Group("attention", 34), Group("state", 34)]

    def side(base: int, kernels: int) -> list[Layout]:
        full = page("l0", tokens=34 // kernels, nbytes=2, kernel_blocks=kernels, address=base)
        return [worker([full, state("s0", nbytes=50, num_blocks=3, address=base + 65536, group=1)], groups=groups)]

    src, dst = side(P, 17), side(D, 2)
    planned(src, dst, request(20, 100, src, dst))


# ------------------------------------------------------------------------------------------------ contents and layers

BF16, FP8 = Content(4, "bfloat16"), Content(2, "fp8_e4m3:static")


def with_scales(base: int, ranks: int, scale: Content) -> list[Layout]:
    """Data and scales as components of their own."""
    return [
        attention(
            Cache(share(rank, ranks, 4), content=FP8, component="data"),
            Cache(share(rank, ranks, 4), content=scale, component="scale"),
            base=base + (rank << 20),
        )
        for rank in range(ranks)
    ]


def test_fp8_with_static_scales() -> None:
    src, dst = tp(2, 4, P, content=FP8), tp(1, 4, D, content=FP8, order="LBNHC")
    planned(src, dst, request(0, 13, src, dst))


def test_scales_inline() -> None:
    """Two bytes of data and a scale of four in each (token, head)."""
    inline = Content(6, "fp8_e4m3:d2+s4")
    src, dst = tp(1, 4, P, content=inline), tp(4, 4, D, content=inline, tokens=8)
    planned(src, dst, request(0, 13, src, dst))


@pytest.mark.parametrize("scale", [Content(4, "float32:token-head"), Content(1, "nvfp4:block16")], ids=lambda c: c.type)
def test_scales_apart(scale: Content) -> None:
    """A scale for each token and head, and the block scales of NVFP4."""
    src, dst = with_scales(P, 2, scale), with_scales(D, 4, scale)
    planned(src, dst, request(3, 13, src, dst))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(BF16, Content(4, "float16")), (BF16, FP8), (FP8, Content(2, "fp8_e5m2:static"))],
    ids=lambda c: c.type,
)
def test_refused_unequal_content(mine: Content, theirs: Content) -> None:
    """Nothing is cast and nothing re-scaled."""
    src, dst = tp(1, 4, P, content=mine), tp(1, 4, D, content=theirs)
    assert refused(src, dst, request(0, 13, src, dst)) == "incompatible-content"


def test_refused_scales_inline_against_apart() -> None:
    src, dst = tp(1, 4, P, content=Content(6, "fp8_e4m3:d2+s4")), with_scales(D, 1, Content(4, "float32:token-head"))
    assert refused(src, dst, request(0, 13, src, dst)) in {"missing-layer", "missing-coordinates"}


def test_refused_unequal_scale_blocks() -> None:
    src, dst = with_scales(P, 1, Content(1, "nvfp4:block16")), with_scales(D, 1, Content(1, "nvfp4:block32"))
    assert refused(src, dst, request(0, 13, src, dst)) == "incompatible-content"


@pytest.mark.parametrize("tokens", [(8, 8), (8, 16), (16, 4)], ids=str)
def test_rows_of_several_tokens(tokens: tuple[int, int]) -> None:
    src, dst = (tp(1, 1, base, axis=None, tokens=n, row_tokens=4) for n, base in zip(tokens, (P, D), strict=True))
    planned(src, dst, request(4, 27, src, dst))


def test_refused_unequal_rows() -> None:
    src, dst = tp(1, 1, P, tokens=8, row_tokens=4), tp(1, 1, D, tokens=8, row_tokens=2)
    assert refused(src, dst, request(0, 13, src, dst)) == "incompatible-content"


def drafted(base: int, ranks: int, *, optional: bool, draft: bool = True) -> list[Layout]:
    """Four heads in the model, six in its draft layer, which has blocks of its own."""
    groups = [Group("attention", 4), Group("attention", 8)]
    side = []
    for rank in range(ranks):
        parts = Cache(share(rank, ranks, 4)).components(base + (rank << 20))
        if draft:
            spare = Cache(share(rank, ranks, 6), layers=("mtp.0",), tokens=8, group=1, order="LBNHC")
            extra = spare.components(base + (rank << 20) + 65536)
            parts += [msgspec.structs.replace(c, optional=optional) for c in extra]
        side.append(worker(parts, groups=groups))
    return side


def test_draft_layers() -> None:
    src, dst = drafted(P, 2, optional=False), drafted(D, 1, optional=False)
    planned(src, dst, request(0, 22, src, dst))


def test_draft_layers_that_the_producer_lacks() -> None:
    """Optional: planned without; else refused."""
    src = drafted(P, 2, optional=False, draft=False)
    wanted = request(0, 22, src, drafted(D, 1, optional=True))
    planned(src, drafted(D, 1, optional=True), wanted)
    assert refused(src, drafted(D, 1, optional=False), wanted) == "missing-layer"


# -------------------------------------------------------------------------------------------------- unknown backends


def opaque(shard: int, shards: int, base: int, kind: str = "opaque:odd:auto:x86:16") -> Layout:
    """A kernel block of a rank as one row, whatever its inside."""
    axes = (Axis("token", 0, 1, 1, 64), Axis("shard", shard, 1, shards, 64))
    one = Component("l0", 0, "kv", 0, base, POOL, 64, axes, Content(64, kind), 1, 64, 16)
    return worker([one], groups=[Group("attention", 16)])


def test_opaque_pages_between_equal_shards() -> None:
    src = [opaque(r // 2, 2, P + (r << 20)) for r in range(4)]
    dst = [opaque(r, 2, D + (r << 20)) for r in range(2)]
    assert used(planned(src, dst, request(0, 40, src, dst))) == {0: [0], 1: [2]}


@pytest.mark.parametrize("theirs", [(0, 1, "opaque:odd:auto:x86:16"), (0, 2, "opaque:odd:auto:arm:16")], ids=str)
def test_refused_opaque_pages_between_unequal_shards(theirs: tuple[int, int, str]) -> None:
    src, dst = [opaque(r, 2, P + (r << 20)) for r in range(2)], [opaque(theirs[0], theirs[1], D, theirs[2])]
    assert refused(src, dst, request(0, 40, src, dst)) == "incompatible-content"


@pytest.mark.parametrize("missing", [0, 1])
def test_refused_a_rank_that_is_not_given(missing: int) -> None:
    src, dst = tp(2, 4, P), tp(1, 4, D)
    assert refused([src[1 - missing]], dst, request(0, 13, src, dst)) == "missing-coordinates"
