"""Worked cases by value: small layouts and requests with the exact descriptors that a right planner gives.

Each is a fault that real systems had, or a number checked by hand. ``WORKED`` is the list; ``Worked.transfers`` maps
(producer, consumer) to its descriptors, in the order of their destinations. The builders below it write layouts in
little space and serve other tests too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# JSON as it is written to files.
Json = dict[str, Any]
AxisRow = tuple[str, int, int, int, int]
"""(name, start, count, total, stride)."""
Descriptors = list[list[int]]


@dataclass(frozen=True, slots=True)
class Worked:
    name: str
    producers: list[Json]
    consumers: list[Json]
    request: Json
    transfers: dict[tuple[int, int], Descriptors] | None = None
    reasons: frozenset[str] = frozenset()
    """Where it must be refused: with any of these."""
    large: bool = False
    """Too many bytes for the oracle, which visits each one."""


def component(
    layer: str,
    axes: Sequence[AxisRow],
    *,
    at: int,
    blocks: int,
    stride: int,
    nbytes: int,
    name: str = "kv",
    group: int = 0,
    kernels: tuple[int, int] | None = None,
    row_tokens: int = 1,
    kind: str = "u8",
) -> Json:
    """``kernels``: (count, stride) of kernel blocks."""
    count, kernel_stride = kernels or (1, stride)
    return {
        "layer": layer,
        "layer_index": 0,
        "component": name,
        "group": group,
        "address": at,
        "num_blocks": blocks,
        "block_stride": stride,
        "kernel_blocks": count,
        "kernel_stride": kernel_stride,
        "tokens_per_row": row_tokens,
        "axes": [
            {"name": a, "start": start, "count": n, "total": total, "stride": step} for a, start, n, total, step in axes
        ],
        "content": {"nbytes": nbytes, "type": kind},
    }


def attention(block_tokens: int, **more: object) -> Json:
    return {"kind": "attention", "block_tokens": block_tokens, **more}


def state(block_tokens: int) -> Json:
    return {"kind": "state", "block_tokens": block_tokens}


def layout(
    components: list[Json],
    groups: list[Json],
    *,
    regions: Sequence[tuple[int, int]] | None = None,
    rank: tuple[int, int] = (0, 1),
    engine: str = "e",
) -> Json:
    """``regions``: (address, nbytes); without them one region spans all components, to the end of the last block."""
    if regions is None:
        first = min(part["address"] for part in components)
        last = max(part["address"] + part["num_blocks"] * part["block_stride"] for part in components)
        regions = [(first, 2 * (last - first))]
    return {
        "format": "kvferry.layout/1",
        "engine_id": engine,
        "parallel": {
            "tp_rank": rank[0],
            "tp_size": rank[1],
            "pp_rank": 0,
            "pp_size": 1,
            "pcp_rank": 0,
            "pcp_size": 1,
        },
        "regions": [{"address": address, "nbytes": nbytes} for address, nbytes in regions],
        "groups": groups,
        "components": components,
    }


Entry = tuple[int | None, list[int | None]]
"""(first token or None, blocks)."""


def request(tokens: tuple[int, int], producer: Sequence[Entry], consumer: Sequence[Entry]) -> Json:
    def table(entry: Entry) -> Json:
        first, blocks = entry
        return {"blocks": list(blocks)} if first is None else {"first_token": first, "blocks": list(blocks)}

    return {
        "format": "kvferry.request/1",
        "tokens": {"start": tokens[0], "stop": tokens[1]},
        "producer": [table(entry) for entry in producer],
        "consumer": [table(entry) for entry in consumer],
    }


def heads(
    start: int, count: int, total: int, *, at: int, blocks: int, tokens: int, nbytes: int, layer: str = "a"
) -> Json:
    """A head-major page: block, head, token, ``nbytes`` of content; nothing between."""
    axes = [("head", start, count, total, tokens * nbytes), ("token", 0, tokens, tokens, nbytes)]
    return component(layer, axes, at=at, blocks=blocks, stride=count * tokens * nbytes, nbytes=nbytes)


def rows(tokens: int, nbytes: int, **more: Any) -> Json:
    """A page of rows: block, token, content; ``more`` is for ``component``."""
    layer = more.pop("layer", "a")
    more.setdefault("stride", tokens * nbytes)
    return component(layer, [("token", 0, tokens, tokens, nbytes)], nbytes=nbytes, **more)


def _ranks(n: int, total: int, **more: Any) -> list[Json]:
    """``n`` ranks of the usual head split: shards, or replicas where there are more ranks than heads."""
    count = max(1, total // n)
    more.setdefault("at", 0)
    tokens = more["tokens"]
    return [
        layout([heads(rank * total // n, count, total, **more)], [attention(tokens)], rank=(rank, n))
        for rank in range(n)
    ]


# ------------------------------------------------------------------------------------------------ ranks and replicas


def _replicated_producers() -> list[Worked]:
    big: dict[str, Any] = {"blocks": 3, "tokens": 16, "nbytes": 4096}
    page = 65_536
    producers = _ranks(8, 4, **big)
    asked = request((0, 16), [(0, [1])], [(0, [2])])
    whole = {(2 * h, 0): [[page, 2 * 4 * page + h * page, page]] for h in range(4)}
    half = {(4 * r + 2 * h, r): [[page, 2 * 2 * page + h * page, page]] for r in range(2) for h in range(2)}
    return [
        Worked("tp8 with replicas to tp1", producers, _ranks(1, 4, **big), asked, whole, large=True),
        Worked("tp8 with replicas to tp2", producers, _ranks(2, 4, **big), asked, half, large=True),
    ]


def _one_row_two_consumers() -> list[Worked]:
    more: dict[str, Any] = {"at": 0, "tokens": 4, "nbytes": 512, "blocks": 40}
    producer = layout([heads(0, 2, 4, **more)], [attention(4)])
    cases = []
    for rank, blocks in ((0, [20, 21]), (1, [30, 31])):
        consumer = layout([heads(rank, 1, 4, **more)], [attention(4)])
        runs = [[b * 4096 + rank * 2048, d * 2048, 2048] for b, d in zip((10, 11), blocks, strict=True)]
        asked = request((0, 8), [(0, [10, 11])], [(0, list(blocks))])
        cases.append(Worked(f"one row to two, rank {rank}", [producer], [consumer], asked, {(0, 0): runs}))
    return cases


def _offsets_in_a_block() -> list[Worked]:
    asked = request((0, 8), [(0, [1, 2])], [(0, [3, 4])])
    small: dict[str, Any] = {"tokens": 4, "nbytes": 64, "blocks": 5}
    up = {
        (0, 0): [[0x1200, 0x9C00, 512], [0x1400, 0xA000, 512]],
        (1, 0): [[0x1200, 0x9E00, 512], [0x1400, 0xA200, 512]],
    }
    last = layout([heads(3, 1, 4, at=0x9000, **small)], [attention(4)], rank=(3, 4))
    down = {(0, 0): [[0x1700, 0x9300, 256], [0x1B00, 0x9400, 256]]}
    one = _ranks(1, 4, at=0x1000, **small)
    return [
        Worked("tp2 to tp1", _ranks(2, 4, at=0x1000, **small), _ranks(1, 4, at=0x9000, **small), asked, up),
        Worked("tp1 to rank 3 of tp4", one, [last], asked, down),
    ]


def _two_heads_on_four() -> Worked:
    small: dict[str, Any] = {"tokens": 2, "nbytes": 8, "blocks": 2}
    asked = request((0, 2), [(0, [1])], [(0, [1])])
    transfers = {(0, rank): [[32 + 16 * head, 16, 16]] for rank, head in enumerate((0, 0, 1, 1))}
    return Worked("L19 two heads on four ranks", _ranks(1, 2, **small), _ranks(4, 2, **small), asked, transfers)


def _replicas_take_turns() -> Worked:
    """Four consumers of one latent cache that two producers hold: 0, 1, 0, 1."""
    producers = [layout([rows(2, 4, at=0, blocks=2)], [attention(2)], rank=(r, 2)) for r in range(2)]
    consumers = [layout([rows(2, 4, at=64, blocks=2)], [attention(2)], rank=(r, 4)) for r in range(4)]
    transfers = {(rank % 2, rank): [[8, 72, 8]] for rank in range(4)}
    return Worked("replicas take turns", producers, consumers, request((0, 2), [(0, [1])], [(0, [1])]), transfers)


def _stages() -> Worked:
    def stage(bases: dict[str, int]) -> Json:
        parts = [rows(4, 128, layer=name, at=base, blocks=4) for name, base in bases.items()]
        return layout(parts, [attention(4)])

    producers = [stage({"a": 0x1800, "b": 0x2800}), stage({"c": 0x3800, "d": 0x4800})]
    consumer = stage({"a": 0xB000, "b": 0xC000, "c": 0xD000, "d": 0xE000})
    transfers = {
        (0, 0): [[0x1A00, 0xB400, 1024], [0x2A00, 0xC400, 1024]],
        (1, 0): [[0x3A00, 0xD400, 1024], [0x4A00, 0xE400, 1024]],
    }
    asked = request((0, 8), [(0, [1, 2])], [(0, [2, 3])])
    return Worked("pipeline stages", producers, [consumer], asked, transfers)


def _conv_sections() -> Worked:
    """Segments of 4, 4 and 8 channels, each sharded by itself: q0 q1 | k0 k1 | v0 v1."""

    def sections(start: int, shards: int, at: int) -> Json:
        parts, offset = [], at
        for name, total in (("conv.q", 4), ("conv.k", 4), ("conv.v", 8)):
            count = total // shards
            axes = [("channel", start * count, count, total, 1)]
            parts.append(component("s", axes, at=offset, blocks=1, stride=16 // shards, nbytes=1, name=name))
            offset += count
        return layout(parts, [state(4)], regions=[(at, 16 // shards)])

    transfers = {
        (0, 0): [[0, 64, 2], [2, 68, 2], [4, 72, 4]],
        (1, 0): [[0, 66, 2], [2, 70, 2], [4, 76, 4]],
    }
    producers = [sections(0, 2, 0), sections(1, 2, 0)]
    asked = request((0, 4), [(None, [0])], [(None, [0])])
    return Worked("L20 sections of a convolution", producers, [sections(0, 1, 64)], asked, transfers)


def _state_shards() -> Worked:
    """Four writers of 16 for two consumers of 32: offsets count from the consumer's own first channel."""

    def shard(rank: int, size: int) -> Json:
        count = 64 // size
        axes = [("channel", rank * count, count, 64, 1)]
        return layout([component("s", axes, at=0, blocks=1, stride=count, nbytes=1)], [state(4)], regions=[(0, count)])

    transfers = {(p, p // 2): [[0, 16 * (p % 2), 16]] for p in range(4)}
    return Worked(
        "L21 state shards, tp4 to tp2",
        [shard(r, 4) for r in range(4)],
        [shard(r, 2) for r in range(2)],
        request((0, 4), [(None, [0])], [(None, [0])]),
        transfers,
    )


def _context_parallel() -> Worked:
    """Four producers to two consumers: the even ones feed the first, the odd ones the second."""

    def side(size: int) -> list[Json]:
        ring = [{"rank": r, "size": size, "interleave": 1} for r in range(size)]
        return [
            layout([rows(2, 8, at=0, blocks=3)], [attention(2, context_parallel=ring[r])], rank=(r, size))
            for r in range(size)
        ]

    # Producer entry: 8 positions, 2 a rank; consumer entry: 4 positions. Position p: row p // 4 of rank p % 4 there,
    # row p // 2 of rank p % 2 here.
    transfers = {
        (0, 0): [[16, 0, 8], [24, 32, 8]],
        (2, 0): [[16, 8, 8], [24, 40, 8]],
        (1, 1): [[16, 0, 8], [24, 32, 8]],
        (3, 1): [[16, 8, 8], [24, 40, 8]],
    }
    asked = request((0, 8), [(0, [1])], [(0, [0, 2])])
    return Worked("L38 context parallel 4 to 2", side(4), side(2), asked, transfers)


# ------------------------------------------------------------------------------------------------- blocks and strides


def _kernel_blocks(
    ratio: int, tokens: int, nbytes: int, *, at: int, blocks: int, gap: int = 0, layer: str = "a"
) -> Json:
    """A block of ``ratio`` kernel blocks of ``tokens`` rows, ``gap`` bytes after each kernel block."""
    kernel = tokens * nbytes + gap
    return rows(tokens, nbytes, at=at, blocks=blocks, stride=ratio * kernel, kernels=(ratio, kernel), layer=layer)


def _logical_and_kernel(name: str, nbytes: int, *, large: bool) -> list[Worked]:
    """768 tokens in a block over kernel blocks of 64, block 5 to block 2."""
    kernel, page = 64 * nbytes, 768 * nbytes
    plain = layout([_kernel_blocks(12, 64, nbytes, at=0, blocks=6)], [attention(768)])
    padded = layout([_kernel_blocks(12, 64, nbytes, at=0, blocks=3, gap=nbytes)], [attention(768)])
    wrong = layout([rows(64, 12 * nbytes, at=0, blocks=6, stride=page, kernels=(12, kernel))], [attention(768)])
    asked = request((0, 768), [(0, [5])], [(0, [2])])
    step = kernel + nbytes
    runs = [[5 * page + i * kernel, 2 * 12 * step + i * step, kernel] for i in range(12)]
    one = {(0, 0): [[5 * page, 2 * page, page]]}
    broken = frozenset({"overlapping-memory"})
    return [
        Worked(f"768 over 64, contiguous{name}", [plain], [plain], asked, one, large=large),
        Worked(f"768 over 64, kernel padding{name}", [plain], [padded], asked, {(0, 0): runs}, large=large),
        Worked(
            f"page length on kernel blocks{name}",
            [wrong],
            [plain],
            asked,
            reasons=broken | {"incompatible-content"},
            large=large,
        ),
    ]


def _kernel_block_of_one() -> Worked:
    """Rows of a tensor are kernel blocks of one token: logical block 3 is at row 192."""
    side = layout([_kernel_blocks(64, 1, 4, at=0, blocks=4)], [attention(64)])
    asked = request((0, 64), [(0, [3])], [(0, [1])])
    return Worked("L02 kernel blocks of one token", [side], [side], asked, {(0, 0): [[192 * 4, 64 * 4, 256]]})


def _ratio_seventeen() -> Worked:
    """Entry 2 is kernel blocks 34 to 50 of the attention layer; the state's entry 2 stays 2."""

    def side(at: int) -> Json:
        kv = _kernel_blocks(17, 32, 2, at=at, blocks=4)
        ssm = component("s", [], at=at + 8192, blocks=4, stride=64, nbytes=48, name="ssm", group=1)
        return layout([kv, ssm], [attention(544), state(544)])

    asked = request((0, 544), [(0, [2]), (0, [2])], [(0, [3]), (0, [1])])
    runs = [[34 * 64, 20000 + 51 * 64, 17 * 64], [8192 + 128, 28192 + 64, 48]]
    return Worked("ratio 17 and a state", [side(0)], [side(20000)], asked, {(0, 0): runs})


def _unequal_ratios() -> Worked:
    """Equal kernel blocks, 4 in a producer's block and 2 in a consumer's: its block 5 begins at its page 10."""
    producer = layout([_kernel_blocks(4, 2, 4, at=0, blocks=3)], [attention(8)])
    consumer = layout([_kernel_blocks(2, 2, 4, at=0, blocks=8)], [attention(4)])
    asked = request((0, 8), [(0, [2])], [(0, [5, 7])])
    return Worked("unequal ratios", [producer], [consumer], asked, {(0, 0): [[64, 80, 16], [80, 112, 16]]})


def _hybrid() -> Worked:
    """Attention blocks expand to kernel rows, the state slot does not: rows 2 to 5, and slot 7."""

    def side(at: int) -> Json:
        kv = _kernel_blocks(2, 2, 8, at=at, blocks=8)
        gdn = component("s", [], at=at + 1024, blocks=8, stride=100, nbytes=100, name="ssm", group=1)
        return layout([kv, gdn], [attention(4), state(4)])

    asked = request((0, 8), [(0, [1, 2]), (None, [7])], [(0, [1, 2]), (None, [7])])
    runs = [[2 * 16, 4096 + 2 * 16, 4 * 16], [1024 + 700, 4096 + 1024 + 700, 100]]
    return Worked("L06 hybrid: rows and slots", [side(0)], [side(4096)], asked, {(0, 0): runs})


def _hybrid_identity() -> Worked:
    def side(kv: int, page: int) -> Json:
        parts = [
            rows(2, 8, at=kv, blocks=32),
            component("s", [], at=page, blocks=8, stride=0x100, nbytes=0x100, group=1),
        ]
        return layout(parts, [attention(2), state(2)])

    asked = request((0, 4), [(0, [10, 11]), (0, [None, 4])], [(0, [30, 31]), (0, [None, 7])])
    runs = [[160, 480, 32], [0x5400, 0x6700, 0x100]]
    return Worked("hybrid identity", [side(0, 0x5000)], [side(0, 0x6000)], asked, {(0, 0): runs})


def _packed_and_padded() -> list[Worked]:
    a = rows(4, 150, at=0, blocks=10, stride=1000)
    b = rows(4, 75, at=600, blocks=10, stride=1000, layer="b")
    storage = layout([a, b], [attention(4)], regions=[(0, 10_000)])
    asked = request((0, 4), [(0, [3])], [(0, [3])])
    apart = [rows(4, 250, at=offset, blocks=2, stride=2560, layer=name) for offset, name in ((0, "a"), (1024, "b"))]
    row = layout(apart, [attention(4)], regions=[(0, 5120)])
    once = request((0, 4), [(0, [1])], [(0, [1])])
    pages = [rows(4, 250, at=1000 * i, blocks=3, stride=2500, layer=name) for i, name in enumerate("ab")]
    dense = layout(pages, [attention(4)], regions=[(0, 7500)])
    both = request((0, 8), [(0, [1, 2])], [(0, [1, 2])])
    strided = layout([rows(4, 25, at=0, blocks=8, stride=160)], [attention(4)])
    two = request((0, 8), [(0, [3, 4])], [(0, [3, 4])])
    return [
        Worked("padding is left", [storage], [storage], asked, {(0, 0): [[3000, 3000, 900]]}),
        Worked("live pages apart", [row], [row], once, {(0, 0): [[2560, 2560, 1000], [3584, 3584, 1000]]}),
        Worked("rows longer than pages", [dense], [dense], both, {(0, 0): [[2500, 2500, 2000], [5000, 5000, 2000]]}),
        Worked("stride over length", [strided], [strided], two, {(0, 0): [[480, 480, 100], [640, 640, 100]]}),
    ]


def _split_halves() -> Worked:
    """Blocks-first on one side, all K then all V on the other: two runs far apart."""

    def side(k: int, v: int, stride: int) -> Json:
        parts = [rows(2, 8, at=at, blocks=4, stride=stride, name=n) for n, at in (("k", k), ("v", v))]
        return layout(parts, [attention(2)], regions=[(0, 128)])

    asked = request((0, 2), [(0, [1])], [(0, [2])])
    runs = [[32, 32, 16], [48, 96, 16]]
    return Worked("split halves", [side(0, 16, 32)], [side(0, 64, 16)], asked, {(0, 0): runs})


def _overlay() -> list[Worked]:
    def side() -> Json:
        parts = [rows(4, 150, at=0, blocks=4, stride=4096)]
        parts += [component("s", [], at=0, blocks=4, stride=4096, nbytes=4000, name="ssm", group=1)]
        return layout(parts, [attention(4), state(4)], regions=[(0, 16384)])

    good = request((0, 4), [(0, [1]), (None, [2])], [(0, [2]), (None, [1])])
    bad = request((0, 4), [(0, [1]), (None, [2])], [(0, [2, 1]), (None, [1])])
    runs = [[8192, 4096, 4000], [4096, 8192, 600]]
    return [
        Worked("groups overlaid", [side()], [side()], good, {(0, 0): runs}),
        Worked("one id in two groups", [side()], [side()], bad, reasons=frozenset({"duplicate-blocks"})),
    ]


def _seams() -> Worked:
    """250 bytes registered as 100 + 100 + 50: a transfer is cut where a region ends."""
    cut = layout([rows(2, 125, at=0, blocks=1)], [attention(2)], regions=[(0, 100), (100, 100), (200, 50)])
    whole = layout([rows(2, 125, at=1000, blocks=1)], [attention(2)], regions=[(1000, 250)])
    asked = request((0, 2), [(0, [0])], [(0, [0])])
    runs = [[0, 1000, 100], [100, 1100, 100], [200, 1200, 50]]
    return Worked("U01 regions that touch", [cut], [whole], asked, {(0, 0): runs})


# ----------------------------------------------------------------------------------------------------------- positions


def _paged(group: Json) -> Json:
    tokens = group["block_tokens"]
    return layout([rows(tokens, 2, at=0, blocks=600)], [group])


def _runs(pairs: Sequence[tuple[int, int]], page: int) -> dict[tuple[int, int], Descriptors]:
    return {(0, 0): [[src * page, dst * page, page] for src, dst in pairs]}


def _positions() -> list[Worked]:
    side = [_paged(attention(16))]

    def case(name: str, asked: Json, pairs: list[tuple[int, int]]) -> Worked:
        return Worked(name, side, side, asked, _runs(pairs, 32))

    missing = request((0, 48), [(0, [10, 11])], [(32, [500])])
    remote = [100 + 2 * i for i in range(32)]
    appended = request((496, 512), [(0, list(remote))], [(496, [7, 9])])
    return [
        case("prefix hit, one block", request((16, 32), [(0, [10, 11])], [(16, [20])]), [(11, 20)]),
        case(
            "prefix hit, two blocks",
            request((48, 80), [(0, [10, 12, 11, 13, 15])], [(48, [501, 504])]),
            [(13, 501), (15, 504)],
        ),
        case("lookahead at the producer", request((0, 32), [(0, [4, 6, 8])], [(0, [1, 3])]), [(4, 1), (6, 3)]),
        case("one token appended", appended, [(remote[31], 7)]),
        Worked("positions not held", side, side, missing, reasons=frozenset({"missing-positions"})),
    ]


def _windows() -> list[Worked]:
    side = [_paged(attention(16, sliding_window=128))]
    source, target = [2 * i for i in range(21)], [100 + 2 * i for i in range(21)]
    blocks: list[int | None] = [*source]
    wanted: list[int | None] = [*target]
    edge = request((0, 320), [(0, blocks[:20])], [(0, wanted[:20])])
    inside = request((0, 321), [(0, blocks)], [(0, wanted)])
    last = list(zip(source, target, strict=True))
    # The last 128 of 321 positions begin at 193, row 1 of entry 12, and end in row 0 of entry 20.
    window = _runs(last[12:21], 32)
    window[(0, 0)][0] = [source[12] * 32 + 2, target[12] * 32 + 2, 30]
    window[(0, 0)][-1] = [source[20] * 32, target[20] * 32, 2]
    clipped = [_paged(attention(16, sliding_window=32))]
    ahead = request((0, 64), [(0, [2, 4, 6, 8, 10])], [(0, [3, 5, 7, 9, 11])])
    return [
        Worked("window ends at a block", side, side, edge, _runs(last[12:20], 32)),
        Worked("window ends inside", side, side, inside, window),
        Worked("L26 window clipped after trimming", clipped, clipped, ahead, _runs([(6, 7), (8, 9)], 32)),
    ]


def _refused() -> list[Worked]:
    group = attention(2)
    kv, index = rows(2, 8, at=0, blocks=2), rows(2, 2, at=64, blocks=2, name="index")
    asked = request((0, 2), [(0, [1])], [(0, [1])])
    narrow = [layout([heads(0, 2, 4, at=0, blocks=2, tokens=2, nbytes=4)], [group])]
    wide = [layout([heads(0, 4, 4, at=0, blocks=2, tokens=2, nbytes=4)], [group])]
    index_gone = frozenset({"missing-layer", "missing-coordinates"})
    return [
        Worked(
            "L54 index keys gone", [layout([kv], [group])], [layout([kv, index], [group])], asked, reasons=index_gone
        ),
        Worked("heads gone", narrow, wide, asked, reasons=frozenset({"missing-coordinates"})),
    ]


WORKED: list[Worked] = [
    *_replicated_producers(),
    *_one_row_two_consumers(),
    *_offsets_in_a_block(),
    _two_heads_on_four(),
    _replicas_take_turns(),
    _stages(),
    _conv_sections(),
    _state_shards(),
    _context_parallel(),
    *_logical_and_kernel("", 1152, large=True),
    *_logical_and_kernel(", small", 2, large=False),
    _kernel_block_of_one(),
    _ratio_seventeen(),
    _unequal_ratios(),
    _hybrid(),
    _hybrid_identity(),
    *_packed_and_padded(),
    _split_halves(),
    *_overlay(),
    _seams(),
    *_positions(),
    *_windows(),
    *_refused(),
]
