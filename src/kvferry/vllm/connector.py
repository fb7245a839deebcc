"""``FerryConnector``: what vLLM loads. It only passes calls on to the half that it is.

vLLM builds one object in the engine core (role SCHEDULER) and one in each worker (role WORKER), from one class. The
methods of the two roles are disjoint; a call for the other half is vLLM's bug and fails as such.
"""

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.errors import ConfigError, ConfigReason
from kvferry.vllm.config import ignored_options, parse_config
from kvferry.vllm.endpoint import check_parallel, check_sleep_mode, sleep_refusal
from kvferry.vllm.holds import BlockHolds
from kvferry.vllm.metadata import FerryHandshake, FerryMetadata
from kvferry.vllm.releases import warn_of_untried
from kvferry.vllm.scheduler import FerryScheduler
from kvferry.vllm.statistics import FerryPromMetrics, FerryStats
from kvferry.vllm.tables import read_cache_shape
from kvferry.vllm.worker import FerryWorker
from vllm import __version__ as vllm_release

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

# MultiConnector looks its children up by name alone when their statistics have crossed a process border, and vLLM's
# front end ends when it does not find one. A name that the operator's own plug-in has registered stays as it is.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector("FerryConnector", "kvferry.vllm", "FerryConnector")


class FerryConnector(KVConnectorBase_V1, SupportsHMA):
    """KV-cache transfer between a prefill and a decode engine."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm_does()
        warn_of_untried(vllm_release)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._config = parse_config(extra)
        for option, why in ignored_options(extra).items():
            logger.info("option %s does nothing here: %s", option, why)
        check_parallel(vllm_config)
        check_sleep_mode(vllm_config)
        self._scheduler_half: FerryScheduler | None = None
        self._worker_half: FerryWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._holds = BlockHolds(vllm_config.parallel_config.world_size)
            self._scheduler_half = FerryScheduler(
                read_cache_shape(kv_cache_config, vllm_config),
                self._holds,
                produces=self._kv_transfer_config.is_kv_producer,
                consumes=self._kv_transfer_config.is_kv_consumer,
                upstream_block=self._config.declared_peer.block_size,
            )
        else:
            self._worker_half = FerryWorker(vllm_config, kv_cache_config, self._config)

    @property
    def _scheduler(self) -> FerryScheduler:
        if self._scheduler_half is None:
            raise RuntimeError("a scheduler method was called on the worker's half of FerryConnector")
        return self._scheduler_half

    @property
    def _worker(self) -> FerryWorker:
        if self._worker_half is None:
            raise RuntimeError("a worker method was called on the scheduler's half of FerryConnector")
        return self._worker_half

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """Asked by vLLM 0.33 and newer before anything is built; older ones come to ``check_sleep_mode``."""
        return False

    # -- scheduler half --------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """The pool in which this connector holds references of its own."""
        self._holds.bind(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """All ranks have registered: tell each the placements of all."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): meta for rank, meta in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """As above, keyed by (pipeline rank, tensor rank); ranks are numbered in that order."""
        ranked = [metadata[key] for key in sorted(metadata)]
        for one in ranked:
            if not isinstance(one, FerryHandshake):
                raise ConfigError(
                    ConfigReason.UNSUPPORTED_MODEL,
                    f"the workers were introduced by another connector ({type(one).__name__}): vLLM's MultiConnector "
                    "passes on the word of the first child that has one, so FerryConnector must stand before it",
                )
        self._scheduler.introduce([meta.placement for meta in ranked if isinstance(meta, FerryHandshake)])

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """A transfer brings the request's own blocks of every group."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: "Request") -> None:
        """A request came in."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens to fetch, and whether they come between steps."""
        missing = self._scheduler.missing_tokens(request, num_computed_tokens)
        return missing, missing > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Blocks were allocated."""
        self._scheduler.on_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """The orders for the workers of this step."""
        return self._scheduler.take_orders()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """What all workers reported."""
        self._scheduler.on_worker_output(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished_all_groups`, for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Its blocks may go at once: those that a transfer needs are held by us."""
        self._scheduler.on_finished(request, block_ids)
        return False, None

    def get_kv_connector_stats(self) -> FerryStats | None:
        """What happened since the last step: transfers from a worker, held blocks from the scheduler."""
        if self._worker_half is not None:
            return self._worker_half.take_statistics()
        held = self._scheduler.changed_holds()
        return None if held is None else FerryStats.of_scheduler(held)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """Statistics from the dictionary in which they crossed a process border."""
        return FerryStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        """The metrics of ``docs/metrics.md``."""
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while a transfer holds blocks."""
        return self._scheduler.has_work()

    # -- worker half -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Read the layout of the caches and make them reachable."""
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Asked by vLLM 0.33 and newer just before the cache's memory is unmapped, which must not happen.

        An engine with ``--enable-cumem-allocator`` is asked to sleep although it was not started for it.
        """
        raise sleep_refusal()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's placement, for its siblings."""
        return self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: its forward is not submitted yet, all before it is."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Take the orders of this step. Loads run between steps, so when this is called does not matter."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, FerryMetadata):
            self._worker.obey(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Caches are read in place after the prompt is computed."""

    def wait_for_save(self) -> None:
        """Mark the point in the device's work after which this step's publications are valid."""
        self._worker.mark_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Receives that ended since the last step. Sends are never waited for: see ``request_finished``."""
        ended = self._worker.take_ended()
        return KVConnectorTransferResults(finished_recving=ended.finished, failed_recving=ended.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As above, for callers that know no failures."""
        return None, self._worker.take_ended().finished or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The tickets that went quiet on this rank."""
        return self._worker.take_quiet()

    # -- both ------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop threads, close engines; safe to call twice."""
        if self._worker_half is not None:
            self._worker_half.close()


def log_as_vllm_does() -> None:
    """Send what kvferry's other rooms log where vLLM sends its own, unless the operator has set them up otherwise."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
