"""From vLLM's cache groups to ours: what is attention, what is state, what is not carried at all.

Only groups that vLLM marks for transfer are looked at, in its own order: the block tables of a request are selected
alike. A group whose layers disagree, and a kind of cache whose positions or blocks mean something of their own, are
refused by name before the first request.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1 import kv_cache_interface as specs

from kvferry.errors import ConfigError, ConfigReason
from kvferry.layout import ContextParallel, Group, Parallel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_REFUSED: tuple[tuple[str, str], ...] = (
    ("CrossAttentionSpec", "encoder-decoder attention has positions of its own"),
    ("EncoderOnlyAttentionSpec", "encoder attention keeps no cache between steps"),
    ("SinkFullAttentionSpec", "static attention sinks occupy blocks that belong to no position"),
    ("HiddenStateCacheSpec", "extracted hidden states are not part of a prompt's cache"),
    ("HiSparseHotSpec", "hot pages of HiSparse are rebuilt, not moved"),
    ("HiSparseResidentSpec", "resident pages of HiSparse are rebuilt, not moved"),
)
"""Specs that cannot be carried, and why; by name, since a release may lack some of them."""


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """One cache group that is carried: ours, and the spec of each of its layers."""

    group: Group
    layers: tuple[tuple[str, Any], ...]


def transfer_groups(
    kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig", *, parallel: Parallel
) -> tuple[TransferGroup, ...]:
    """The groups that are carried, in the order of ``select_transfer_block_ids``. Raises :class:`ConfigError`."""
    share = _context_parallel(vllm_config, parallel)
    return tuple(_transfer_group(group, share) for group in kv_cache_config.transfer_groups)


def _transfer_group(source: "KVCacheGroupSpec", share: ContextParallel | None) -> TransferGroup:
    if source.host_resident:
        raise _refused(source.layer_names, "its blocks live in host memory")
    layers = tuple((name, _spec_of_layer(source.kv_cache_spec, name)) for name in source.layer_names)
    found: dict[Group, str] = {}
    for name, spec in layers:
        found.setdefault(_group_of(name, spec, share), name)
    if not found:
        raise _refused(source.layer_names, "the group has no layers")
    if len(found) > 1:
        raise _refused(source.layer_names, f"its layers disagree: {[(n, g) for g, n in found.items()]}")
    return TransferGroup(next(iter(found)), layers)


def _spec_of_layer(spec: "KVCacheSpec", layer: str) -> "KVCacheSpec":
    return spec.kv_cache_specs[layer] if isinstance(spec, specs.UniformTypeKVCacheSpecs) else spec


def _group_of(layer: str, spec: "KVCacheSpec", share: ContextParallel | None) -> Group:
    names = {base.__name__ for base in type(spec).__mro__}
    for name, why in _REFUSED:
        if name in names:
            raise _refused([layer], f"{name}: {why}")
    if is_state(spec):
        return Group("state", spec.block_size)
    if not isinstance(spec, specs.AttentionSpec):
        raise _refused([layer], f"{type(spec).__name__} is not a kind of cache known here")
    held = share if spec.dcp_sharded else None
    if isinstance(spec, specs.SlidingWindowSpec):
        # Before position p is computed, vLLM keeps what p will attend to: the window less p itself, and the extra ones
        # (SlidingWindowManager.get_num_skipped_tokens). One more, and a larger block on the other side would ask for
        # a position whose block the producer has given back.
        retained = max(1, spec.sliding_window - 1 + spec.extra_retained_tokens)
        return Group("attention", spec.block_size, sliding_window=retained, context_parallel=held)
    if isinstance(spec, specs.ChunkedLocalAttentionSpec):
        return Group("attention", spec.block_size, chunk=spec.attention_chunk_size, context_parallel=held)
    # Full attention may note a window too: the hybrid allocator is off then, and all positions are retained.
    return Group("attention", spec.block_size, context_parallel=held)


def is_state(spec: Any) -> bool:
    """Whether a block holds one whole state instead of a run of positions."""
    return isinstance(spec, specs.MambaSpec | specs.CircularBufferSpec) or getattr(spec, "tokens_per_state", 1) < 0


def _context_parallel(vllm_config: "VllmConfig", parallel: Parallel) -> ContextParallel | None:
    """Positions are dealt out over decode context parallel ranks; prefill context parallel ranks alone are copies."""
    size = vllm_config.parallel_config.decode_context_parallel_size
    if size == 1:
        return None
    # These groups run over the prefill context parallel ranks first, then over the tensor parallel ones.
    rank = (parallel.tp_rank * parallel.pcp_size + parallel.pcp_rank) % size
    return ContextParallel(rank, size, vllm_config.parallel_config.cp_kv_cache_interleave_size)


def _refused(layers: list[str], why: str) -> ConfigError:
    named = f"{layers[0]!r} and {len(layers) - 1} more" if len(layers) > 1 else f"{layers[0]!r}" if layers else "none"
    return ConfigError(ConfigReason.UNSUPPORTED_MODEL, f"the cache group of layer {named} cannot be carried: {why}")
