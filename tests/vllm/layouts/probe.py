"""A connector that only looks: loaded by a real engine, it lets vLLM write known values and dumps what is in memory.

Attention layers are written through their own backend's cache update, state layers through the views that vLLM
binds to them. Nothing here knows how a page is ordered.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.layout import BoundLayout, bind_layout, encode_layout
from kvferry.runtime.page_reading import CellShape, HostPages, Rows
from kvferry.vllm.device_pages import DevicePages
from kvferry.vllm.layouts.extract import layout_of_worker, parallel_of_this_process, tensors_of


class Probe(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Writes its layout, its memory and what was written, named by rank, into the folder of its options."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(self._kv_transfer_config.kv_connector_extra_config["folder"])

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layout = layout_of_worker(
            kv_caches,
            self._kv_cache_config,
            vllm_config=self._vllm_config,
            engine_id="probe",
            parallel=parallel_of_this_process(self._vllm_config),
        )
        written = {}
        for number, group in enumerate(self._kv_cache_config.kv_cache_groups):
            blocks = [3 * number + 2, 3 * number + 4, 3 * number + 3]
            for name in group.layer_names:
                layer = self._vllm_config.compilation_config.static_forward_context[name]
                write = write_state if isinstance(group.kv_cache_spec, MambaSpec) else write_tokens
                for what, values in write(layer, blocks, group.kv_cache_spec.block_size).items():
                    written[f"{name}|{what}"] = values.view(torch.uint8).numpy()
                written[f"{name}|blocks"] = np.array(blocks)
        storage = next(iter(kv_caches.values())).untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        rank = layout.parallel.tp_rank
        (self._folder / f"layout-{rank}.json").write_bytes(encode_layout(layout))
        compared = compare_readers(kv_caches, bind_layout(layout))
        (self._folder / f"rows-{rank}.txt").write_text(str(compared))
        memory.numpy().tofile(self._folder / f"memory-{rank}.bin")
        np.savez(self._folder / f"written-{rank}.npz", **written)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def compare_readers(kv_caches: dict[str, Any], bound: BoundLayout) -> int:
    """Read every row of some blocks by NumPy and by torch; how many rows were equal, which is all or an error."""
    host = HostPages(bound.binding)
    device = DevicePages((one for cache in kv_caches.values() for one in tensors_of(cache)), bound.binding)
    compared = 0
    for placed in bound.placement.placed:
        blocks, pages, tokens = CellShape.of(placed.component).shape[:3]
        places = np.indices((min(blocks, 12), pages, tokens)).reshape(3, -1).astype(np.int64)
        rows = Rows(*places, np.zeros_like(places[0]))
        box = tuple(slice(0, axis.count) for axis in placed.component.global_axes)
        if not np.array_equal(device.rows(placed, rows, box), host.rows(placed, rows, box)):
            raise AssertionError(f"torch reads other rows of {placed.component.key}")
        if not np.array_equal(device.sums(placed, rows, box), host.sums(placed, rows, box)):
            raise AssertionError(f"torch makes other sums of {placed.component.key}")
        compared += rows.count
    return compared


def write_tokens(layer: Any, blocks: list[int], block_tokens: int) -> dict[str, torch.Tensor]:
    """Known keys and values for the positions of ``blocks``, by the backend's own cache update."""
    slots = torch.cat([block * block_tokens + torch.arange(block_tokens) for block in blocks])
    if hasattr(layer, "kv_lora_rank"):
        latent = torch.randn(len(slots), layer.kv_lora_rank, dtype=layer.kv_cache.dtype)
        rope = torch.randn(len(slots), 1, layer.qk_rope_head_dim, dtype=layer.kv_cache.dtype)
        layer.impl.do_kv_cache_update(latent, rope, layer.kv_cache, slots, "auto", layer._k_scale)
        return {"kv": torch.cat([latent, rope.squeeze(1)], dim=1).unsqueeze(1).contiguous()}
    shape = (len(slots), layer.num_kv_heads, layer.head_size)
    key, value = (torch.randn(shape, dtype=layer.kv_cache.dtype) for _ in "kv")
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
    return {"k": key, "v": value}


def write_state(layer: Any, blocks: list[int], block_tokens: int) -> dict[str, torch.Tensor]:
    """Known states in ``blocks``, through the views that the layer computes with."""
    values = {}
    for number, view in enumerate(layer.kv_cache):
        values[str(number)] = torch.randn(len(blocks), *view.shape[1:]).to(view.dtype)
        view[blocks] = values[str(number)]
    return values
