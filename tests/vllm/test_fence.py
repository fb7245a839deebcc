"""The worker half takes its marks at the right points of a step, and no byte moves before they are passed."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from kvferry.errors import ConfigError, TransportError
from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import PromptMark, Source, Span, Table, Ticket
from kvferry.runtime import Ready, new_epoch
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.ports import free_port
from kvferry.vllm.config import parse_config
from kvferry.vllm.endpoint import check_memory
from kvferry.vllm.fence import DeviceFence, HostFence, fence_of
from kvferry.vllm.metadata import Publish, Pull, Siblings
from kvferry.vllm.solitude import as_rank
from kvferry.vllm.worker import FerryWorker

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK, LAYER = 16, "model.layers.0.self_attn.attn"


class SteppedFence:
    """A device that does its work when the test says so."""

    enter_thread = None

    def __init__(self) -> None:
        self.submitted = self.done = 0

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


@pytest.fixture
def rank(model_folder: Path) -> Iterator[Rank]:
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
    options = {"transport": "cma", "host": "127.0.0.1", "bootstrap_port": port}
    fence = SteppedFence()

    def choose(memories: Iterable[str]) -> SteppedFence:
        assert set(memories) == {"cpu"}
        return fence

    worker = FerryWorker(config, caches, parse_config(options), choose_fence=choose)
    with as_rank(config, 0):
        worker.register({LAYER: cache})
        handshake = worker.handshake()
        assert handshake is not None
        worker.begin_step()
        worker.obey([Siblings(new_epoch(), (handshake.placement,))])
        yield Rank(worker, fence, cache, Source(EngineId("both"), f"http://127.0.0.1:{port}"))
        worker.close()


def wait_until(holds: Callable[[], bool], *, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


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
