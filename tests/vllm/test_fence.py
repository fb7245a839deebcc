"""The worker half takes its marks at the right points of a step, and no byte moves before they are passed."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from kvferry.errors import ConfigError, TransportError
from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.layout import Region, bind_layout
from kvferry.protocol import PromptMark, Source, Span, Table, Ticket
from kvferry.runtime import Ready, new_epoch
from kvferry.runtime.page_reading import HostPages, Rows
from kvferry.testing.layouts import page, worker
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.ports import free_port
from kvferry.vllm.config import parse_config
from kvferry.vllm.device_pages import DevicePages, device_pages_of
from kvferry.vllm.endpoint import check_memory
from kvferry.vllm.fence import DeviceFence, HostFence, fence_of
from kvferry.vllm.metadata import Publish, Pull, Siblings
from kvferry.vllm.solitude import as_rank
from kvferry.vllm.worker import FerryWorker

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK, LAYER = 16, "model.layers.0.self_attn.attn"
DEVICE = "xpu:0"
"""Of a kind that the Mooncake engine asks nothing about."""


class SteppedFence:
    """A device that does its work when the test says so, and knows which threads have entered."""

    def __init__(self) -> None:
        self.submitted = self.done = 0
        self.entered: list[str] = []

    def enter_thread(self) -> None:
        self.entered.append(threading.current_thread().name)

    def mark(self) -> Ready:
        behind = self.submitted
        return lambda: self.done >= behind


@dataclass
class Rank:
    """A worker half of an engine in both roles, with caches, and the step that vLLM would run."""

    worker: FerryWorker
    fence: SteppedFence
    cache: torch.Tensor
    source: Source

    def step(self, *orders: Any) -> None:
        """As vLLM's runner: the forward is submitted before the orders are given."""
        self.worker.begin_step()
        self.fence.submitted += 1
        self.worker.obey(orders)
        self.worker.mark_step()

    def publish(self, transfer: str, block: int) -> Publish:
        marks = (PromptMark(BLOCK, "prompt"),)
        table = (Table(0, (block,)),)
        return Publish(Ticket(block), RequestId("p"), TransferId(transfer), BLOCK, table, marks)

    def pull(self, transfer: str, block: int, *, request: str = "d") -> Pull:
        wanted = (Ticket(block), RequestId(request), TransferId(transfer), self.source, Span(0, BLOCK))
        return Pull(*wanted, (Table(0, (block,)),), "prompt")

    def received(self) -> set[str]:
        ended = self.worker.take_ended()
        assert not ended.failed
        return ended.finished

    def counts(self) -> dict[str, int]:
        """What was counted since this was last called."""
        told = self.worker.take_statistics()
        assert told is not None
        counts: dict[str, int] = told.data["counts"]
        return counts


class Elsewhere(torch.Tensor):
    """Memory of the CPU that says of itself that it is a device's."""

    @property
    def device(self) -> torch.device:
        return torch.device(DEVICE)


@contextmanager
def running(model_folder: Path, *, memory: str = "cpu", **options: Any) -> Iterator[Rank]:
    """With ``options`` of the connector, and caches that say to lie in ``memory``."""
    port = free_port()
    transfer = KVTransferConfig(kv_connector="FerryConnector", kv_role="kv_both", engine_id="both")
    transfer.kv_connector_module_path = "kvferry.vllm"
    model = str(build_model(QWEN3, model_folder))
    args = EngineArgs(model=model, dtype="float32", max_model_len=1024, enforce_eager=True, async_scheduling=False)
    args.kv_transfer_config = transfer
    config = args.create_engine_config()
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN", get_supported_kernel_block_sizes=lambda spec: [])
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    config.compilation_config.static_forward_context[LAYER] = layer
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
    cache = torch.zeros(8, 2, BLOCK, 16)
    size = cache.numel() * cache.element_size()
    tensors = [KVCacheTensor(size, [LAYER], size, size // 8)]
    caches = KVCacheConfig(8, tensors, [KVCacheGroupSpec([LAYER], spec)], kv_cache_layout="LBHNC")
    fence = SteppedFence()

    def choose(memories: Iterable[str]) -> SteppedFence:
        assert set(memories) == {memory}
        return fence

    parsed = parse_config({**options, "host": "127.0.0.1", "bootstrap_port": port})
    worker = FerryWorker(config, caches, parsed, choose_fence=choose)
    with as_rank(config, 0):
        worker.register({LAYER: cache if memory == "cpu" else cache.as_subclass(Elsewhere)})
        handshake = worker.handshake()
        assert handshake is not None
        worker.begin_step()
        worker.obey([Siblings(new_epoch(), (handshake.placement,))])
        try:
            yield Rank(worker, fence, cache, Source(EngineId("both"), f"http://127.0.0.1:{port}"))
        finally:
            worker.close()


@pytest.fixture
def rank(model_folder: Path) -> Iterator[Rank]:
    with running(model_folder, transport="cma") as one:
        yield one


def wait_until(holds: Callable[[], bool], *, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def carry(rank: Rank) -> None:
    """One page, from block 1 to block 5."""
    rank.cache[1] = 7.0
    rank.step(rank.publish("t", 1))
    rank.fence.done = 1
    rank.step(rank.pull("t", 5))
    wait_until(lambda: rank.received() == {"d"})
    assert (rank.cache[5] == 7.0).all()


def threads_of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-")]


def test_a_page_is_published_when_the_step_that_names_it_is_done(rank: Rank) -> None:
    rank.step(rank.publish("t", 1))
    rank.fence.done = 0
    rank.worker.begin_step()
    rank.step()
    rank.fence.submitted = rank.fence.done  # the fetch itself waits for nothing
    rank.worker.begin_step()
    rank.worker.obey([rank.pull("t", 5)])
    for _ in range(50):
        time.sleep(0.002)
        assert rank.received() == set()
    rank.cache[1] = 7.0  # the device computes the page only now
    rank.fence.done = 1
    wait_until(lambda: rank.received() == {"d"})
    assert (rank.cache[5] == 7.0).all()


def test_a_pull_waits_for_the_steps_before_its_own_and_not_for_its_own(rank: Rank) -> None:
    rank.cache[1] = 7.0
    rank.step(rank.publish("t", 1))
    rank.fence.done = 1
    rank.step()  # the last step of the request that had block 5 before: submitted, and slow
    rank.step(rank.pull("t", 5))
    for _ in range(50):
        time.sleep(0.002)
        assert rank.received() == set()
    rank.cache[5] = 9.0
    rank.fence.done = 2
    wait_until(lambda: rank.received() == {"d"})
    assert (rank.cache[5] == 7.0).all()
    assert rank.fence.submitted == 3, "its own step was never done"


@pytest.mark.mooncake
@pytest.mark.parametrize("verify", ["off", "full"])
def test_every_thread_enters_before_it_touches_the_memory(model_folder: Path, verify: str) -> None:
    with running(model_folder, memory=DEVICE, transport="mooncake", verify=verify) as rank:
        carry(rank)
        entered = rank.fence.entered
        wait_until(lambda: Counter(entered) >= Counter(thread.name for thread in threads_of_ours()))
        kinds = {name.split("-")[1].partition("_")[0] for name in entered}
        assert kinds == {"producer", "consumer", "lane"} | ({"verify"} if verify == "full" else set())


@pytest.mark.mooncake
def test_pages_on_a_device_are_compared_by_what_reads_them_there(model_folder: Path) -> None:
    with running(model_folder, memory=DEVICE, transport="mooncake", verify="full") as rank:
        carry(rank)
        counts = rank.counts()
        assert counts["verified_pages"] == 1
        assert counts["verified_bytes"] == rank.cache[1].numel() * rank.cache.element_size()


def test_which_pages_are_read_on_a_device() -> None:
    memory = torch.arange(4 * 2 * BLOCK * 8, dtype=torch.int32).to(torch.uint8)
    layer = page("layer", heads=(0, 2, 2), tokens=BLOCK, nbytes=8, num_blocks=4, address=memory.data_ptr())
    rows = Rows(*(np.array(numbers, np.int64) for numbers in ([3, 0], [0, 0], [2, 15], [2, 15])))
    for where in ("cpu", "cuda:0"):
        bound = bind_layout(worker([layer], regions=[Region(memory.data_ptr(), memory.numel(), where)]))
        reader = device_pages_of({"layer": memory}, bound)
        assert isinstance(reader, DevicePages) == (where != "cpu")
        (placed,) = bound.placement.placed
        if reader is not None:
            box = (slice(0, 2),)
            assert (reader.rows(placed, rows, box) == HostPages(bound.binding).rows(placed, rows, box)).all()


@pytest.mark.mooncake
def test_memory_that_the_transport_cannot_move_is_refused_at_the_start() -> None:
    import mooncake.engine

    for transport in ("cma", "mooncake"):
        check_memory(parse_config({"transport": transport}), ["cpu"], host="127.0.0.1")
    with pytest.raises(ConfigError, match="the cache lies on cuda:1: use 'mooncake'"):
        check_memory(parse_config({"transport": "cma"}), ["cpu", "cuda:1"], host="127.0.0.1")
    if not mooncake.engine.SUPPORT_CUDA:
        with pytest.raises(TransportError, match="built without CUDA"):
            check_memory(parse_config({}), ["cuda:1"], host="127.0.0.1")


def test_the_fence_follows_the_memory() -> None:
    assert isinstance(fence_of(["cpu", "cpu"]), HostFence)
    assert HostFence().enter_thread is None
    assert isinstance(fence_of(["cuda:1", "cpu", "cuda:1"]), DeviceFence)
    with pytest.raises(ConfigError, match="cuda:0 and cuda:1"):
        fence_of(["cuda:1", "cuda:0"])
