"""Pages read with torch are those that NumPy reads, and their sums too: over random layouts and over vLLM's own caches.

Memory of the CPU stands for a device's: torch has the same operations for both. ``scripts/gpu_check.py`` asks a GPU.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("vllm")

import torch

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import BoundLayout, Layout, bind_layout
from kvferry.protocol import VerifyAsk
from kvferry.runtime.page_reading import HostPages, Rows
from kvferry.testing.carried import Rank, World
from kvferry.testing.layouts import page, worker
from kvferry.testing.oracle_expect import Expectation, expect
from kvferry.testing.strategies import Case, cases, random_case
from kvferry.vllm.device_pages import DevicePages, device_pages_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ASKS = [VerifyAsk(every=1, seed=1), VerifyAsk(every=1, seed=1, sums=True), VerifyAsk(every=3, seed=5, sums=True)]


def by_torch(rank: Rank) -> DevicePages:
    return DevicePages([torch.from_numpy(rank.bytes)], rank.bound.binding)


def check(case: Case) -> bool:
    """Whether the case could be planned."""
    expected = expect(case.producers, case.consumers, case.request)
    if not isinstance(expected, Expectation) or expected.tolerated:
        return False
    world = World.of(case)
    for pair in world.plan.pairs():
        for ask in ASKS:
            host = world.digests(pair, ask)
            assert world.digests(pair, ask, read=by_torch) == host
            assert world.digests(pair, ask, "producer", read=by_torch) == host
    return True


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_digests_are_those_of_the_host(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("chunk", [1, 100, 2 << 20])
def test_seeded_cases_in_parts_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.vllm.device_pages.CHUNK_BYTES", chunk)
    assert sum(check(random_case(random.Random(seed))) for seed in range(3_000_000, 3_000_060)) > 20


def cache_of(nbytes: int = 6, *, tensors: int = 1) -> "tuple[BoundLayout, list[torch.Tensor]]":
    """One layer for each tensor, each with memory of its own."""
    parts = [page(f"l{n}", heads=(0, 3, 3), tokens=4, nbytes=nbytes, num_blocks=8) for n in range(tensors)]
    memory = [torch.randint(0, 256, (8 * 3 * 4 * nbytes,), dtype=torch.uint8) for _ in parts]
    layouts = [worker([one]) for one in parts]
    moved = [_at(layout, tensor.data_ptr()) for layout, tensor in zip(layouts, memory, strict=True)]
    regions = tuple(region for layout in moved for region in layout.regions)
    components = tuple(component for layout in moved for component in layout.components)
    return bind_layout(msgspec.structs.replace(moved[0], regions=regions, components=components)), memory


def _at(layout: Layout, address: int) -> Layout:
    (region,) = layout.regions
    shift = address - region.address
    components = tuple(msgspec.structs.replace(one, address=one.address + shift) for one in layout.components)
    return msgspec.structs.replace(
        layout, regions=(msgspec.structs.replace(region, address=address),), components=components
    )


def some_rows(*blocks: int) -> Rows:
    block = np.array(blocks, np.int64)
    zero = np.zeros_like(block)
    return Rows(block, zero, np.arange(len(blocks), dtype=np.int64) % 4, zero)


@pytest.mark.parametrize("nbytes", [1, 2, 3, 6, 8, 12, 16])
def test_elements_of_every_width_and_several_allocations(nbytes: int) -> None:
    bound, memory = cache_of(nbytes, tensors=3)
    host, device = HostPages(bound.binding), DevicePages(memory, bound.binding)
    for placed in bound.placement.placed:
        box = tuple(slice(0, axis.count) for axis in placed.component.global_axes)
        rows = some_rows(7, 0, 3, 3)
        assert (device.rows(placed, rows, box) == host.rows(placed, rows, box)).all()
        assert (device.sums(placed, rows, box) == host.sums(placed, rows, box)).all()


def test_a_thread_reads_on_one_stream_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps what was used on a stream for that stream: a new one for each call would hold ever more memory."""
    made: list[int] = []
    make = torch.Stream

    def counted(**of: Any) -> torch.Stream:
        made.append(threading.get_native_id())
        return make(**of)

    monkeypatch.setattr("kvferry.vllm.device_pages.torch.Stream", counted)
    bound, memory = cache_of()
    reader, placed = DevicePages(memory, bound.binding), bound.placement.placed[0]
    box = (slice(0, 3),)

    def read() -> bytes:
        return b"".join(read(placed, some_rows(7, 3), box).tobytes() for read in (reader.rows, reader.sums))

    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        first = [one.result() for one in [pool.submit(lambda: (both.wait(10), read())[1]) for _ in range(2)]]
        again = [one.result() for one in [pool.submit(read) for _ in range(6)]]
    assert set(first + again) == {read()}
    assert len(made) == len(set(made)) == 3, "the two of the pool, and this one"


@pytest.mark.parametrize("block", [-1, 8])
def test_a_block_that_there_is_not_is_refused_before_the_device_is_asked(block: int) -> None:
    bound, memory = cache_of()
    reader = DevicePages(memory, bound.binding)
    with pytest.raises(PlanError, match="are not all among the 8 that the cache has") as refused:
        reader.sums(bound.placement.placed[0], some_rows(1, block), ())
    assert refused.value.reason is PlanReason.INVALID_REQUEST


def test_memory_that_is_none_of_the_caches_is_refused() -> None:
    bound, _ = cache_of()
    other = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(PlanError, match="in none of the 1 allocations of the engine's cache") as refused:
        DevicePages([other], bound.binding).rows(bound.placement.placed[0], some_rows(1), ())
    assert refused.value.reason is PlanReason.OUTSIDE_REGION


def test_memory_of_the_cpu_is_not_read_by_way_of_torch() -> None:
    bound, memory = cache_of()
    assert device_pages_of({"l0": memory[0]}, bound) is None
