"""The worker half: owns the memory of one rank, carries out the scheduler's orders, reports what came of them.

vLLM calls it on the model runner's thread, once a step. Nothing here waits for a peer: orders go to the runtimes
(:mod:`kvferry.runtime`), which have threads of their own, and results are taken out of their queues.

Engines read and write caches outside the device's streams, so each order that lets bytes move carries a mark
(:mod:`kvferry.vllm.fence`). A publication is valid when the work that was submitted up to ``wait_for_save`` is done. A
pull may begin when the work that was submitted before its step is done: the last step of the request that had these
blocks before may still run, and blocks may still be zeroed. The step's own work touches neither.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from vllm.logger import init_logger

from kvferry.ids import EngineId, Incarnation, RequestId
from kvferry.layout import BoundLayout, Parallel, bind_layout, decode_placement, encode_placement
from kvferry.protocol import Fate
from kvferry.runtime import ConsumerRuntime, Fetch, Local, ProducerRuntime, Publication, Ready
from kvferry.runtime.page_reading import PageReader
from kvferry.runtime.upstream_caches import OwnCaches
from kvferry.vllm.config import Config
from kvferry.vllm.cpus import with_cpus
from kvferry.vllm.device_pages import device_pages_of
from kvferry.vllm.endpoint import check_memory, read_deployment, read_options
from kvferry.vllm.fence import Fence, HostFence, fence_of
from kvferry.vllm.layout_file import write_layout
from kvferry.vllm.layouts.extract import layout_of_worker, parallel_of_this_process
from kvferry.vllm.layouts.upstream import own_caches
from kvferry.vllm.metadata import (
    Cancel,
    Expect,
    FerryHandshake,
    FerryWorkerMetadata,
    Order,
    Publish,
    Pull,
    Release,
    Siblings,
    Withdraw,
)
from kvferry.vllm.request import name_for_peers
from kvferry.vllm.startup import StartUp
from kvferry.vllm.statistics import FerryStats
from kvferry.vllm.tables import read_cache_shape
from kvferry.vllm.tails import Tails, tails_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True, slots=True)
class Ended:
    """Receives that ended since they were last asked for, by vLLM's request ids."""

    finished: set[str] = field(default_factory=set)
    """All of them: vLLM must not wait for a request any longer."""
    failed: set[str] = field(default_factory=set)
    """Those whose cache did not come."""


class FerryWorker:
    """Worker half of the connector."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: Config,
        *,
        choose_fence: Callable[[Iterable[str]], Fence] = fence_of,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._startup = StartUp.read(read_deployment(vllm_config, config))
        self._bound: BoundLayout | None = None
        self._parallel: Parallel | None = None
        self._caches: OwnCaches | None = None
        self._device_pages: PageReader | None = None
        self._tails: Tails | None = None
        self._producer: ProducerRuntime | None = None
        self._consumer: ConsumerRuntime | None = None
        self._runtimes: tuple[ProducerRuntime | ConsumerRuntime, ...] = ()
        """Those two that there are."""
        self._choose_fence = choose_fence
        self._fence: Fence = HostFence()
        self._before_step: Ready | None = None
        """Behind what was submitted before this step."""
        self._fresh: list[Publication] = []
        self._renamed: dict[RequestId, RequestId] = {}
        """Requests that are fetched for, by what peers call them, where vLLM calls them otherwise."""

    # -- start and end ---------------------------------------------------------------------------------------

    def register(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Read the layout; refuses here, before any request, what cannot be carried."""
        parallel = parallel_of_this_process(self._vllm_config)
        layout = layout_of_worker(
            kv_caches,
            self._kv_cache_config,
            vllm_config=self._vllm_config,
            engine_id=self._engine_id,
            parallel=parallel,
        )
        check_memory(self._config, (region.memory for region in layout.regions), host=self._startup.host.ip)
        self._parallel = parallel
        self._bound = bind_layout(layout)
        self._caches = own_caches(
            kv_caches, self._kv_cache_config, vllm_config=self._vllm_config, declared=self._config.declared_peer
        )
        self._device_pages = device_pages_of(kv_caches, self._bound)
        shape = read_cache_shape(self._kv_cache_config, self._vllm_config)
        self._tails = tails_of(kv_caches, self._kv_cache_config, shape)
        self._fence = self._choose_fence(region.memory for region in layout.regions)
        if self._config.layout_dump is not None:
            logger.info("kvferry: layout written to %s", write_layout(self._config.layout_dump, layout))
        logger.info(
            "kvferry: %d components of %d layers in %d regions, layout %s",
            len(layout.components),
            len({component.layer for component in layout.components}),
            len(layout.regions),
            self._bound.placement.fingerprint[:16],
        )

    def handshake(self) -> FerryHandshake | None:
        """This rank's placement; ``None`` before it is known."""
        return None if self._bound is None else FerryHandshake(encode_placement(self._bound.placement))

    def close(self) -> None:
        """Stop the runtimes; safe to call twice."""
        for runtime in self._runtimes:
            runtime.close()
        self._producer = self._consumer = None
        self._runtimes = ()

    def _start(self, siblings: Siblings) -> None:
        if self._bound is None or self._parallel is None:
            raise RuntimeError("vLLM gave orders before it registered its caches")
        parallel = self._parallel
        local = Local(
            incarnation=Incarnation(EngineId(self._engine_id), siblings.epoch),
            model=identify_model(self._vllm_config),
            index=parallel.pp_rank * parallel.tp_size + parallel.tp_rank,
            binding=self._bound.binding,
            placements=tuple(decode_placement(data) for data in siblings.placements),
            tp_size=parallel.tp_size,
            pp_size=parallel.pp_size,
            caches=self._caches,
            device_pages=self._device_pages,
        )
        options = read_options(
            self._vllm_config,
            self._config,
            rank=local.index,
            host=self._startup.host.ip,
            enter_thread=with_cpus(self._fence.enter_thread),
        )
        transfer = self._vllm_config.kv_transfer_config
        if transfer.is_kv_producer:
            self._producer = ProducerRuntime(local, options)
            self._runtimes += (self._producer,)
        if transfer.is_kv_consumer:
            self._consumer = ConsumerRuntime(local, options)
            self._runtimes += (self._consumer,)
        listening = self._producer.address if self._producer else None
        logger.info("%s", "\n".join(self._startup.lines(local, self._config, listening=listening)))

    @property
    def _engine_id(self) -> str:
        return str(self._vllm_config.kv_transfer_config.engine_id)

    # -- every step ------------------------------------------------------------------------------------------

    def obey(self, orders: Sequence[Order]) -> None:
        """Carry out the orders of this step, in their order."""
        for order in orders:
            match order:
                case Siblings():
                    self._start(order)
                case Expect() | Publish() | Withdraw():
                    self._produce(order)
                case Pull() | Cancel() | Release():
                    self._consume(order)
                case _:
                    assert_never(order)

    def begin_step(self) -> None:
        """The work of the steps before is submitted, and the zeroing of blocks that are new in this one."""
        self._before_step = self._fence.mark()

    def mark_step(self) -> None:
        """The work of this step is submitted: what was published in it is valid when that work is done."""
        fresh, self._fresh = self._fresh, []
        if fresh and self._producer is not None:
            ready = self._fence.mark()
            for publication in fresh:
                self._producer.publish(publication, ready=ready)

    def take_ended(self) -> Ended:
        """Receives that ended."""
        ended = Ended()
        for end in self._consumer.take_ended() if self._consumer is not None else ():
            request = self._renamed.pop(end.request, end.request)
            ended.finished.add(request)
            if end.outcome.fate is not Fate.DONE:
                ended.failed.add(request)
        return ended

    def take_quiet(self) -> FerryWorkerMetadata | None:
        """The tickets that went quiet, and producers that turned out to be of vLLM's own connector."""
        quiet = [ticket for runtime in self._runtimes for ticket in runtime.take_quiet()]
        upstream = self._consumer.take_upstream() if self._consumer is not None else ()
        return FerryWorkerMetadata(Counter(quiet), frozenset(upstream)) if quiet or upstream else None

    def take_statistics(self) -> FerryStats | None:
        """What this rank did since it was last asked; ``None`` for nothing."""
        return FerryStats.of_worker([runtime.take_interval() for runtime in self._runtimes])

    def _produce(self, order: Expect | Publish | Withdraw) -> None:
        producer = self._producer
        if producer is None:
            raise RuntimeError(f"an order for a producer, which this engine is not: {order}")
        match order:
            case Expect():
                producer.expect(order.transfer)
            case Withdraw():
                logger.info("transfer %s is not published: %s", order.transfer, order.why)
                producer.withdraw(order.transfer)
            case Publish():
                self._fresh.append(
                    Publication(
                        order.ticket,
                        order.request,
                        order.transfer,
                        order.tokens,
                        order.tables,
                        order.prompt,
                        order.prompt_tokens,
                    )
                )
            case _:
                assert_never(order)

    def _consume(self, order: Pull | Cancel | Release) -> None:
        consumer = self._consumer
        if consumer is None:
            raise RuntimeError(f"an order for a consumer, which this engine is not: {order}")
        match order:
            case Pull():
                cleared = self._tails is not None and self._tails.clear(order.span, order.tables)
                name = name_for_peers(order.request)
                if name != order.request:
                    self._renamed[name] = order.request
                consumer.fetch(
                    Fetch(
                        order.ticket,
                        name,
                        order.transfer,
                        order.source,
                        order.span,
                        order.tables,
                        order.prompt,
                        order.alternatives,
                    ),
                    ready=self._fence.mark() if cleared else self._before_step,
                )
            case Cancel():
                consumer.cancel(order.ticket)
            case Release():
                consumer.release(order.transfer, order.request, order.source)
            case _:
                assert_never(order)


def identify_model(vllm_config: "VllmConfig") -> str:
    """What must be equal at both ends for a cache to mean the same, as a short name.

    Architecture, shapes, element type and quantisation; not where the model lies on this machine, and not its
    weights, which nothing here can tell apart.
    """
    model = vllm_config.model_config
    facts = {key: value for key, value in model.hf_text_config.to_dict().items() if key not in _LOCAL_FACTS}
    facts |= {"dtype": str(model.dtype), "quantization": str(model.quantization)}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    return f"{'+'.join(model.architectures)}:{digest}"


_LOCAL_FACTS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
