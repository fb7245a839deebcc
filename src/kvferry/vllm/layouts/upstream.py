"""The caches of this worker in the terms in which vLLM's own MooncakeConnector would describe them to its peers.

It registers one region for each tensor whose blocks are compact, and one for each head of a tensor whose blocks are
scattered; two numbers go with each: how far kernel blocks are apart, and how many bytes of one are moved. Rows that
hold several layers are one region for each layer as long as a layer's page in them is one run. What it would describe
in another way (a row as a whole) cannot be exchanged with it here, and is named.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, MambaSpec

from kvferry.runtime.upstream_caches import CacheRegion, Declared, OwnCaches
from kvferry.vllm.layouts.extract import view_of
from kvferry.vllm.layouts.geometry import View

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def own_caches(
    kv_caches: "Mapping[str, torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]]",
    kv_cache_config: "KVCacheConfig",
    *,
    vllm_config: "VllmConfig",
    declared: Declared,
) -> OwnCaches:
    """The regions of all layers that take part in transfers, in vLLM's order."""
    specs = _specs(kv_cache_config)
    sizes = {int(spec.block_size) for spec in specs.values() if isinstance(spec, AttentionSpec)}
    block_size = min(sizes, default=int(vllm_config.cache_config.block_size))
    regions: list[CacheRegion] = []
    ratios: set[int] = set()
    unfit = _unfit(kv_cache_config, specs)
    for layer, cache in kv_caches.items():
        if layer not in specs or unfit is not None:
            continue
        if isinstance(cache, list | tuple):
            unfit = f"layer {layer!r} has {len(cache)} tensors"
            continue
        spec, view = specs[layer], view_of(cache)
        ratio = 1 if isinstance(spec, MambaSpec) else max(1, view.shape[0] // kv_cache_config.num_blocks)
        if isinstance(spec, AttentionSpec):
            ratios.add(ratio)
        if len(view.shape) != 4 or not _is_compact(view):
            unfit = f"the blocks of layer {layer!r} are scattered: shape {view.shape}, strides {view.strides}"
            continue
        group = kv_cache_config.transfer_group_index_by_layer[layer]
        index, moved = extract_layer_index(layer), _moved_bytes(spec, view, ratio)
        regions.append(CacheRegion(layer, index, group, view.address, view.strides[0], moved, (group,)))
    if len(ratios) > 1:
        unfit = f"its layers have different numbers of kernel blocks in a block: {sorted(ratios)}"
    elif len(sizes) > 1 and ratios != {1}:
        unfit = f"its cache groups have blocks of different sizes, cut into kernel blocks: {sorted(sizes)}"
    return OwnCaches(
        regions=tuple(regions),
        block_size=block_size,
        kernel_block_size=block_size // (min(ratios) if ratios else 1),
        cache_dtype=_cache_dtype(vllm_config),
        layout=str(kv_cache_config.kv_cache_layout or "unknown"),
        usual_layout=None if vllm_config.model_config.use_mla else "LBHNC",
        one_block_size=len(sizes) <= 1,
        even_states=not any(spec.tp_replicated for spec in specs.values() if isinstance(spec, MambaSpec)),
        whole_blocks=bool(kv_cache_config.needs_kv_cache_zeroing),
        declared=declared,
        unfit=unfit,
    )


def _specs(kv_cache_config: "KVCacheConfig") -> dict[str, Any]:
    found = {}
    for group in kv_cache_config.transfer_groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        found.update({layer: by_layer.get(layer, group.kv_cache_spec) for layer in group.layer_names})
    return found


def _unfit(kv_cache_config: "KVCacheConfig", specs: Mapping[str, Any]) -> str | None:
    """What makes a model one that the two connectors cannot exchange."""
    if any(group.kv_cache_spec.prefix_replay_tokens > 0 for group in kv_cache_config.kv_cache_groups):
        return "the model replays a part of the prompt's end, and the two connectors count that end differently"
    if any(isinstance(spec, CircularBufferSpec) for spec in specs.values()):
        return "the model has ring buffers, of which the two connectors list other blocks"
    return None


def _is_compact(view: View) -> bool:
    """Whether the bytes of a block lie in one run, in whatever order."""
    inner = sorted(zip(view.strides[1:], view.shape[1:], strict=True))
    run = view.itemsize
    for stride, count in inner:
        if count > 1:
            if stride != run:
                return False
            run *= count
    return run <= view.strides[0] or view.shape[0] == 1


def _moved_bytes(spec: Any, view: View, ratio: int) -> int:
    page = int(spec.page_size_bytes) // ratio
    return min(page, view.strides[0]) if isinstance(spec, AttentionSpec | MambaSpec) else view.strides[0]


def _cache_dtype(vllm_config: "VllmConfig") -> str:
    named = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if named == "auto" else named
