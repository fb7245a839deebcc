"""Planning speed: one 131,072-token request over 61 layers with scattered 16-token blocks, 499,712 descriptors.

Run with ``make bench-plan``. Compile, check, bind and the brute verification are timed apart; where vLLM is installed,
its own connector plans the same request in the same run, and a line ``ratio: <number>`` compares the two, all of our
guarantees included. Turning arrays into an engine's lists is timed beside it, since every planner pays that.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvferry.layout import BoundLayout, Component, Group, Placement, bind_layout
from kvferry.plan import BlockTable, Descriptors, Plan, TransferRequest, compile_plan, verify_descriptors
from kvferry.testing.layouts import page, side_by_side, state, worker
from kvferry.testing.upstream_plan import MODULE as UPSTREAM
from kvferry.testing.upstream_plan import UpstreamModel, UpstreamRank, upstream_planner

LAYERS, BLOCKS, TOKENS, POOL = 61, 8_192, 16, 20_000
ROW = 1_152
"""Bytes of a token and layer: 512 + 64 values of two bytes (MLA)."""


@dataclass(frozen=True)
class Case:
    src: BoundLayout
    dst: BoundLayout
    request: TransferRequest


@cache
def case(blocks: int = BLOCKS, layers: int = LAYERS) -> Case:
    rng = np.random.default_rng(7)
    pages = [page(f"l{i}", tokens=TOKENS, nbytes=ROW, num_blocks=POOL) for i in range(layers)]
    src, dst = (bind_layout(worker(side_by_side(pages, base=base))) for base in (1 << 40, 1 << 42))
    tables = [BlockTable.of(rng.permutation(POOL)[:blocks].tolist(), first_token=0) for _ in range(2)]
    return Case(src, dst, TransferRequest(0, blocks * TOKENS, (tables[0],), (tables[1],)))


def plan_once(some: Case) -> Descriptors:
    """What one request costs once the pair is known: check of the tables, bind, all guarantees."""
    plan = compiled(some)
    plan.check(some.request)
    pair = plan.pair(0, 0)
    assert pair is not None
    return pair.bind(some.request, src=some.src.binding, dst=some.dst.binding)


PLANS: dict[int, Any] = {}


def compiled(some: Case) -> Any:
    if id(some) not in PLANS:
        PLANS[id(some)] = compile_plan([some.src.placement], [some.dst.placement])
        assert PLANS[id(some)].pair(0, 0).rows
    return PLANS[id(some)]


COMPILE_S = 0.05
"""128 layers are compiled within this: of processor time, so that a busy machine changes little."""


@cache
def side(ranks: int, base: int) -> tuple[Placement, ...]:
    """128 layers as ``ranks`` ranks hold them: data and scales of 8 heads, every fourth with a sharded state."""
    groups = [Group("attention", TOKENS), Group("state", TOKENS)]

    def rank(number: int) -> Placement:
        heads, channels = (number * 8 // ranks, 8 // ranks, 8), (number * 64 // ranks, 64 // ranks, 64)
        parts: list[Component] = []
        for layer in range(128):
            parts += [
                page(f"l{layer}", component=name, heads=heads, tokens=TOKENS, nbytes=nbytes, num_blocks=POOL)
                for name, nbytes in (("data", 256), ("scale", 8))
            ]
            if layer % 4 == 0:
                parts.append(state(f"l{layer}", part=channels, nbytes=16, num_blocks=POOL, group=1))
        bound = bind_layout(worker(side_by_side(parts, base=base, gap=4096), groups=groups))
        assert bound.placement.overlays == ()
        return bound.placement

    return tuple(rank(number) for number in range(ranks))


def compile_all(producers: tuple[Placement, ...], consumers: tuple[Placement, ...]) -> Plan:
    """Every pair of two sides, and the rows of its full units."""
    plan = compile_plan(producers, consumers)
    for number in plan.pairs():
        pair = plan.pair(*number)
        assert pair is not None
        assert pair.rows
    return plan


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (2, 1), (8, 1), (8, 8)])
def test_compile_128_layers(benchmark: Any, producers: int, consumers: int) -> None:
    sides = side(producers, 1 << 40), side(consumers, 1 << 45)
    plan = benchmark(compile_all, *sides)
    assert len(plan.pairs()) == max(producers, consumers)
    if benchmark.stats is not None:
        assert benchmark.stats.stats.min < COMPILE_S


def test_check_and_bind(benchmark: Any) -> None:
    descriptors = benchmark(plan_once, case())
    assert descriptors.count == LAYERS * BLOCKS


def test_brute_verify(benchmark: Any) -> None:
    some = case()
    descriptors = plan_once(some)
    benchmark(lambda: verify_descriptors(descriptors, src=some.src.regions, dst=some.dst.regions))


def test_to_engine_lists(benchmark: Any) -> None:
    descriptors = plan_once(case())
    benchmark(lambda: [column.tolist() for column in (descriptors.src, descriptors.dst, descriptors.nbytes)])


@pytest.mark.parametrize("blocks", [512, 1_024, 2_048, 4_096, 8_192])
def test_curve_over_blocks(benchmark: Any, blocks: int) -> None:
    descriptors = benchmark(plan_once, case(blocks))
    assert descriptors.count == LAYERS * blocks


@pytest.mark.parametrize("consecutive", [False, True], ids=["scattered", "consecutive"])
@pytest.mark.parametrize("layers", [8, 16, 32, 64, 128])
def test_curve_over_layers(benchmark: Any, layers: int, consecutive: bool) -> None:
    """Rows that hold all layers: where a block's layers follow each other the cost does not know how many they are."""
    rng = np.random.default_rng(7)
    pages = [
        page(f"l{i}", tokens=TOKENS, nbytes=ROW, num_blocks=1024, block_stride=layers * TOKENS * ROW,
             address=(1 << 40) + i * TOKENS * ROW)
        for i in range(layers)
    ]  # fmt: skip
    src = bind_layout(worker(pages))
    blocks = np.arange(1024) if consecutive else rng.permutation(1024)
    table = BlockTable.of(blocks.tolist(), first_token=0)
    some = Case(src, src, TransferRequest(0, 1024 * TOKENS, (table,), (table,)))
    compiled(some)
    descriptors = benchmark(plan_once, some)
    # Equal tables on both sides: sorted by block, everything is one run.
    assert descriptors.count == 1


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Least of ``rounds`` timings: the machine's noise only ever adds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def test_ratio_to_upstream(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(UPSTREAM)
    some = case()
    work = upstream_planner(UpstreamRank(some.src), UpstreamRank(some.dst), some.request, UpstreamModel(1, mla=True))
    theirs = work()
    ours = plan_once(some)
    assert sorted(zip(theirs[0], theirs[1], theirs[2], strict=True)) == sorted(
        zip(ours.src.tolist(), ours.dst.tolist(), ours.nbytes.tolist(), strict=True)
    )
    slow, fast = seconds(work, 3), seconds(lambda: plan_once(some), 20)
    lists = seconds(lambda: [c.tolist() for c in (ours.src, ours.dst, ours.nbytes)], 3)
    with capsys.disabled():
        print(f"\nupstream {slow:.3f} s, kvferry {fast * 1e3:.2f} ms (all guarantees) for {ours.count} descriptors")
        print(f"turning the arrays into lists for an engine: {lists * 1e3:.1f} ms")
        print(f"ratio: {slow / fast:.0f}")
