"""Never more descriptors than vLLM's own connector, with padding allowed where that moves padding."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvferry.layout import BoundLayout, Component, Group, bind_layout
from kvferry.plan import BlockTable, Descriptors, TransferRequest, compile_plan
from kvferry.testing.layouts import at, page, side_by_side, worker
from kvferry.testing.upstream_plan import MODULE, Copies, UpstreamModel, UpstreamRank, upstream_planner

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True, scope="module")
def _vllm() -> None:
    """Its import takes seconds and warns of what is not ours: this is quiet, and not done where nothing runs."""
    pytest.importorskip(MODULE)


LAYERS, POOL, ENTRIES = 3, 64, 12

TABLES = {
    "one run": (list(range(4, 16)), list(range(20, 32))),
    "scattered": tuple(np.random.default_rng(seed).permutation(POOL)[:ENTRIES].tolist() for seed in (1, 2)),
    "two runs": ([*range(6), *range(10, 16)], [*range(30, 36), *range(50, 56)]),
    "runs on one side": (list(range(12)), list(range(0, 24, 2))),
}


@dataclass(frozen=True)
class Shape:
    """One attention layer as one rank of ``size`` holds it."""

    heads: int = 4
    tokens: int = 16
    nbytes: int = 32
    kernel_blocks: int = 1
    mla: bool = False

    def layers(self, rank: int, size: int, base: int) -> list[Component]:
        held = max(1, self.heads // size)
        first = rank * self.heads // size
        pages = [
            page(
                f"model.layers.{layer}.self_attn.attn",
                heads=(first, held, self.heads),
                tokens=self.tokens,
                nbytes=self.nbytes,
                num_blocks=POOL,
                kernel_blocks=self.kernel_blocks,
            )
            for layer in range(LAYERS)
        ]
        return side_by_side(pages, base=base, gap=4096)

    def model(self, *, packed: bool = False) -> UpstreamModel:
        return UpstreamModel(kv_heads=self.heads, mla=self.mla, packed=packed)


GQA, WIDE, KERNELS = Shape(), Shape(heads=8), Shape(tokens=64, nbytes=18, kernel_blocks=12)
MLA = Shape(heads=1, nbytes=1152, mla=True)

SHAPES = {
    "GQA TP1 to TP1": (GQA, 1, 1),
    "GQA TP2 to TP1": (GQA, 2, 1),
    "GQA TP1 to TP2": (GQA, 1, 2),
    "GQA TP4 to TP2": (GQA, 4, 2),
    "8 heads TP2 to TP8": (WIDE, 2, 8),
    "4 heads TP8 to TP1": (GQA, 8, 1),
    "4 heads TP1 to TP8": (GQA, 1, 8),
    "768 as 12 kernel blocks of 64, TP1 to TP1": (KERNELS, 1, 1),
    "768 as 12 kernel blocks of 64, TP2 to TP1": (KERNELS, 2, 1),
    "768 as 12 kernel blocks of 64, TP1 to TP4": (KERNELS, 1, 4),
    "MLA TP1 to TP1": (MLA, 1, 1),
    "MLA TP4 to TP1": (MLA, 4, 1),
    "MLA TP1 to TP2": (MLA, 1, 2),
}


def request_for(table: str, tokens: int, *, groups: int = 1) -> TransferRequest:
    sides = [BlockTable.of(blocks, first_token=0) for blocks in TABLES[table]]
    empty = BlockTable.empty()
    tables = [(side, *(empty for _ in range(groups - 1))) for side in sides]
    return TransferRequest(0, ENTRIES * tokens, tables[0], tables[1])


def upstream(
    sides: tuple[list[BoundLayout], list[BoundLayout]], pair: tuple[int, int], request: TransferRequest,
    model: UpstreamModel,
) -> Copies:  # fmt: skip
    producer, consumer = (UpstreamRank(side[rank], rank, len(side)) for side, rank in zip(sides, pair, strict=True))
    return upstream_planner(producer, consumer, request, model)()


def bytes_of(copies: Copies) -> np.ndarray:
    """Every (source byte, destination byte), in order of source."""
    src, dst, nbytes = (np.array(column, dtype=np.int64) for column in copies)
    inside = np.arange(nbytes.sum()) - np.repeat(np.cumsum(nbytes) - nbytes, nbytes)
    pairs = np.stack([np.repeat(src, nbytes) + inside, np.repeat(dst, nbytes) + inside])
    return pairs[:, np.argsort(pairs[0])]


def copies_of(found: Descriptors) -> Copies:
    return found.src.tolist(), found.dst.tolist(), found.nbytes.tolist()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_never_more_than_upstream_where_it_moves_no_padding(shape: str, table: str) -> None:
    layers, producers, consumers = SHAPES[shape]
    sides = tuple(
        [bind_layout(worker(layers.layers(rank, size, (1 << 30) * (rank + 1) + far))) for rank in range(size)]
        for size, far in ((producers, 0), (consumers, 1 << 40))
    )
    plan = compile_plan(*([end.placement for end in side] for side in sides))
    request = request_for(table, layers.tokens * layers.kernel_blocks)
    plan.check(request)
    ours: dict[int, int] = {}
    theirs: dict[int, int] = {}
    for i in range(producers):
        for j in range(consumers):
            found, pair = Descriptors.empty(), plan.pair(i, j)
            if pair is not None:
                found = pair.bind(request, src=sides[0][i].binding, dst=sides[1][j].binding, verify="paranoid")
            ours[j] = ours.get(j, 0) + found.count
            if producers % consumers == 0 and i * consumers // producers != j:
                continue
            if consumers % producers == 0 and j * producers // consumers != i:
                continue
            copies = upstream((sides[0], sides[1]), (i, j), request, layers.model())
            theirs[j] = theirs.get(j, 0) + len(copies[0])
            if pair is not None and copies[0] and producers <= layers.heads:
                assert np.array_equal(bytes_of(copies), bytes_of(copies_of(found)))
    assert all(0 < ours[j] <= theirs[j] for j in range(consumers)), (ours, theirs)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("offsets", [[0, 576], [0, 640], [0, 640, 1280]], ids=str)
def test_never_more_than_upstream_on_packed_rows_when_padding_may_move(offsets: list[int], table: str) -> None:
    """Views of 576 bytes in rows of 2,048: upstream moves whole rows, padding included."""

    def rows(base: int) -> BoundLayout:
        parts = [
            page(f"model.layers.{i}.attn", tokens=16, nbytes=36, num_blocks=POOL, block_stride=2048, address=base + o)
            for i, o in enumerate(offsets)
        ]
        return bind_layout(worker(parts))

    src, dst = rows(1 << 30), rows(1 << 40)
    request = request_for(table, 16)
    theirs = upstream(([src], [dst]), (0, 0), request, UpstreamModel(1, mla=True, packed=True))
    assert sum(theirs[2]) == ENTRIES * 2048
    compare_with_padding(src, dst, request, len(theirs[0]))


@pytest.mark.parametrize("table", TABLES)
def test_never_more_than_upstream_on_padded_pages_when_padding_may_move(table: str) -> None:
    """Pages of 2,048 bytes with 2,000 live: upstream's length is that of the page."""

    def pages(base: int) -> BoundLayout:
        parts = [
            page(f"model.layers.{i}.attn", tokens=10, nbytes=200, num_blocks=POOL, block_stride=2048)
            for i in range(LAYERS)
        ]
        return bind_layout(worker(side_by_side(parts, base=base, gap=4096)))

    src, dst = pages(1 << 30), pages(1 << 40)
    request = request_for(table, 10)
    theirs = upstream(([src], [dst]), (0, 0), request, UpstreamModel(1))
    assert sum(theirs[2]) == LAYERS * ENTRIES * 2048
    compare_with_padding(src, dst, request, len(theirs[0]))


@pytest.mark.parametrize("table", TABLES)
def test_never_more_than_upstream_where_two_groups_overlay_a_row(table: str) -> None:
    """Group 1 overlays the row of group 0, whose blocks alone move here."""
    groups = [Group("attention", 16), Group("attention", 16)]

    def rows(base: int) -> BoundLayout:
        full = [
            page(f"model.layers.{i}.attn", tokens=16, nbytes=36, num_blocks=POOL, block_stride=2048, address=i * 640)
            for i in range(2)
        ]
        window = page("model.layers.2.attn", tokens=16, nbytes=60, num_blocks=POOL, block_stride=2048, group=1)
        return bind_layout(worker([at(c, c.address + base) for c in (*full, window)], groups=groups))

    src, dst = rows(1 << 30), rows(1 << 40)
    request = request_for(table, 16, groups=2)
    theirs = upstream(([src], [dst]), (0, 0), request, UpstreamModel(1, mla=True, packed=True))
    compare_with_padding(src, dst, request, len(theirs[0]))


def compare_with_padding(src: BoundLayout, dst: BoundLayout, request: TransferRequest, most: int) -> None:
    plan = compile_plan([src.placement], [dst.placement])
    plan.check(request)
    pair = plan.pair(0, 0)
    assert pair is not None
    plain, wide = (
        pair.bind(request, src=src.binding, dst=dst.binding, verify="paranoid", allow_padding=allowed)
        for allowed in (False, True)
    )
    both = [bytes_of(copies_of(found)) for found in (plain, wide)]
    assert np.array_equal(both[1][:, np.isin(both[1][0], both[0][0])], both[0])
    assert wide.count <= most
    assert wide.total_bytes <= ENTRIES * 2048 * LAYERS
