"""vLLM's own MooncakeConnector, as tests load it: on a machine without an accelerator, and with what lands in it read.

Named as ``kv_connector_module_path``, vLLM imports this module in every process that makes a connector, before it does.
What the connector sends, and to whom, is vLLM's own. Two things are added around it:

* It asks torch for the number of its device when it is built, and torch raises where there is none; so here that
  number is 0.
* A decode engine whose ``kv_connector_extra_config`` names a ``transfer_report`` writes a line there for what it
  received (:mod:`kvferry.testing.landed_pages`). With ``flip_a_byte`` it spoils what came first.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as vllms

from kvferry.testing.landed_pages import LandedPages, Landings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

torch.accelerator.current_device_index = lambda: 0

_NOTED = "kvferry_landings"
"""Where a step's metadata carries what the scheduler's half noted."""


class MooncakeConnector(vllms.MooncakeConnector):  # type: ignore[misc]  # Any to the checker, which skips vLLM
    """vLLM's, with a look at what it received."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = transfer.kv_connector_extra_config
        report = options.get("transfer_report") if transfer.is_kv_consumer else None
        self._landings: Landings | None = None
        self._pages: LandedPages | None = None
        if report is not None and role is KVConnectorRole.SCHEDULER:
            self._landings = Landings(vllm_config, kv_cache_config)
        elif report is not None:
            flip = bool(options.get("flip_a_byte", False))
            self._pages = LandedPages(vllm_config, kv_cache_config, report, flip=flip)

    # -- scheduler half --------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """vLLM's; what is there already is noted."""
        missing, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._landings is not None and missing > 0:
            self._landings.on_matched(request, num_computed_tokens)
        return missing, later

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """vLLM's; what is to come is noted."""
        wanted = (request.kv_transfer_params or {}).get("do_remote_prefill") and num_external_tokens > 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._landings is not None and wanted:
            self._landings.on_allocated(request, blocks)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """vLLM's, with the notes of this step for its workers."""
        metadata = super().build_connector_meta(scheduler_output)
        if self._landings is not None:
            setattr(metadata, _NOTED, self._landings.take())
        return metadata

    # -- worker half -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """vLLM's."""
        super().register_kv_caches(kv_caches)
        if self._pages is not None:
            self._pages.register(kv_caches)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """vLLM's; the notes are read first, since a pull may be over at once."""
        if self._pages is not None:
            metadata: Any = self._connector_metadata
            for landing in getattr(metadata, _NOTED, ()):
                pull = metadata.reqs_to_recv.get(landing.producer, {}).get(landing.request)
                if pull is not None:
                    self._pages.expect(landing, pull)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """vLLM's; what is said to have come is read before it is told."""
        results = super().get_transfer_results(finished_req_ids)
        if self._pages is not None:
            self._pages.on_received(sorted(results.finished_recving))
        return results
