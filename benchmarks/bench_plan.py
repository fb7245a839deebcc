"""Planning speed: one 131,072-token request over 61 layers with scattered 16-token blocks, 499,712 descriptors.

Run with ``make bench-plan``. Compile, check, bind and the brute verification are timed apart; where vLLM is installed,
its own connector plans the same request in the same run, and a line ``ratio: <number>`` compares the two, all of our
guarantees included. Turning arrays into an engine's lists is timed beside it, since every planner pays that.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.layout import BoundLayout, bind_layout
from kvferry.plan import BlockTable, Descriptors, TransferRequest, compile_plan, verify_descriptors
from kvferry.testing.layouts import page, side_by_side, worker

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
        PLANS[id(some)].pair(0, 0)
    return PLANS[id(some)]


def test_compile(benchmark: Any) -> None:
    some = case(layers=128)
    benchmark(lambda: compile_plan([some.src.placement], [some.dst.placement]).pair(0, 0))


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


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Least of ``rounds`` timings: the machine's noise only ever adds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def upstream_planner(some: Case) -> Callable[[], Any]:
    """vLLM's own planning of the same request: its method, on a carrier of the few facts that it reads."""
    upstream = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector")
    worker_class = upstream.MooncakeConnectorWorker
    groups = [SimpleNamespace(kv_cache_spec=None)]
    carrier = SimpleNamespace(
        kv_cache_config=SimpleNamespace(transfer_groups=groups, has_mamba_layers=False),
        _physical_blocks_per_logical_kv_block=1,
        use_mla=True,
        tp_rank=0,
        tp_size=1,
        transfer_topo=SimpleNamespace(total_num_kv_heads=1, local_replicates_kv_cache=False),
    )
    for name in ("_logical_to_kernel_block_ids", "_get_sender_transfer_plan", "_producer_cache_is_replicated"):
        setattr(carrier, name, MethodType(getattr(worker_class, name), carrier))

    def regions(end: BoundLayout) -> list[Any]:
        base = end.binding.bases[0]
        return [
            upstream.TransferRegion(c.layer, c.layer_index, base + c.address, c.block_stride, c.block_stride)
            for c in end.placement.components
        ]

    src, dst = regions(some.src), regions(some.dst)
    tables = [side[0].blocks.tolist() for side in (some.request.producer, some.request.consumer)]

    def work() -> Any:
        send = upstream.SendBlockMeta("p", "t", [tables[0]], asyncio.Event())
        meta = upstream.MooncakeXferMetadata("host", 1, 1, 0, {"d": ("t", [tables[1]])}, [], [], [])
        return asyncio.run(worker_class._build_transfer_params(carrier, [("d", send)], meta, src, dst))

    return work


def test_ratio_to_upstream(capsys: pytest.CaptureFixture[str]) -> None:
    some = case()
    work = upstream_planner(some)
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
