"""A real vLLM scheduler with FerryConnector in it, and steps whose worker's answers the test writes.

Nothing of vLLM or of kvferry is replaced: scheduler, cache manager and block pool are vLLM's own, the connector is
loaded by vLLM's factory. Only the model runner is absent; the test says what it would have returned.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.ids import EngineId
from kvferry.protocol import Ticket
from kvferry.vllm.metadata import FerryWorkerMetadata, Order
from vllm import SamplingParams

BLOCK = 16
EOS = 2


def full_attention() -> KVCacheSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


def sliding_window(window: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=window)


def state() -> KVCacheSpec:
    return MambaSpec(block_size=4096, shapes=((4, 8),), dtypes=(torch.float32,), page_size_padded=2 * BLOCK * 8 * 4)


@dataclass
class Core:
    """A scheduler, and the requests in it."""

    scheduler: Scheduler
    hasher: Any

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        params: dict[str, Any] | None,
        max_tokens: int = 1,
        prompt_logprobs: int | None = None,
        embeds: torch.Tensor | None = None,
    ) -> Request:
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(max_tokens=max_tokens, extra_args=extra, prompt_logprobs=prompt_logprobs)
        sampling.update_from_generation_config({}, EOS)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt) if embeds is None else None,
            prompt_embeds=embeds,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> "Step":
        output = self.scheduler.schedule()
        return Step(self, output, tuple(output.kv_connector_metadata.orders))

    def run(self, *, token: int = 7) -> tuple[Order, ...]:
        """One step in which the workers report nothing; the orders of it."""
        step = self.schedule()
        step.finish(token=token)
        return step.orders


@dataclass
class Step:
    """One scheduled step."""

    core: Core
    output: Any
    orders: tuple[Order, ...]
    stats: dict[str, Any] | None = None
    """The connector's statistics in the answer, where the scheduler was told to keep some."""

    def finish(
        self,
        *,
        token: int = 7,
        received: Iterable[str] = (),
        failed: Iterable[str] = (),
        quiet: Iterable[Ticket] = (),
        ranks: int = 1,
        upstream: Iterable[EngineId] = (),
    ) -> list[EngineCoreOutput]:
        """The workers' answer: one token for each request that is through its prompt, and what transfers did."""
        names = list(self.output.num_scheduled_tokens)
        told = Counter(dict.fromkeys(quiet, ranks))
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[token] if self._is_through(name) else [] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=set(received) | set(failed),
                failed_recving=set(failed),
                kv_connector_worker_meta=FerryWorkerMetadata(told, frozenset(upstream)),
            ),
        )
        outputs = self.core.scheduler.update_from_output(self.output, answer)
        for batch in outputs.values():
            if batch.scheduler_stats is not None:
                self.stats = batch.scheduler_stats.kv_connector_stats
        return [one for batch in outputs.values() for one in batch.outputs]

    def _is_through(self, name: str) -> bool:
        """Whether the request has no more of its prompt to compute after this step."""
        request = self.core.scheduler.requests.get(name)
        return request is None or request.num_computed_tokens >= request.num_tokens


def make_core(
    model: Path,
    role: str,
    *specs: KVCacheSpec,
    blocks: int = 64,
    caching: bool = True,
    policy: str = "fail",
    options: dict[str, Any] | None = None,
    ranks: int = 1,
    stats: bool = False,
    **engine: Any,
) -> Core:
    config = EngineArgs(
        model=str(model),
        dtype="float32",
        block_size=BLOCK,
        num_gpu_blocks_override=blocks,
        max_model_len=4096,
        enable_prefix_caching=caching,
        enforce_eager=True,
        async_scheduling=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FerryConnector",
            kv_connector_module_path="kvferry.vllm",
            kv_role=role,
            engine_id=f"engine-{role}",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=options or {},
        ),
        **engine,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    config.parallel_config.world_size = ranks
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    init_none_hash(sha256)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=stats,
    )
    return Core(scheduler, get_request_block_hasher(hash_block_size, sha256))
