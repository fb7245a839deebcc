"""What neither tensors nor specs say, asked of vLLM's model and layers.

Each answer has one source: the heads of a layer come from the model's configuration (of the draft model for its
layers), the order of a page from the layer's attention backend and the instruction set that the backend chose, the
orientation of a convolution state from vLLM's setting, and whether a section of it is copied and not cut from
the model's own state shapes without tensor parallelism.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as specs

from kvferry.errors import ConfigError, ConfigReason
from kvferry.layout import Parallel
from kvferry.vllm.layouts.heads import Heads, TensorRank, heads_of, replicated
from kvferry.vllm.layouts.state import StateSpec, StateTensor
from kvferry.vllm.releases import order_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Backend:
    """The attention backend of one layer."""

    name: str
    kernel: str
    """The instruction set on a CPU, the platform elsewhere."""
    cache: str
    """What an element of the cache is."""
    kernel_blocks: tuple[Any, ...]
    """Kernel blocks that it supports, as vLLM spells them."""


@dataclass(frozen=True, slots=True)
class Model:
    """The questions about one worker's model."""

    config: "VllmConfig"
    parallel: Parallel

    @property
    def tp(self) -> TensorRank:
        """This worker among those that split heads and channels."""
        return TensorRank(self.parallel.tp_rank, self.parallel.tp_size)

    def layer(self, name: str) -> Any:
        """vLLM's layer object; None where there is none of that name."""
        return self.config.compilation_config.static_forward_context.get(name)

    def backend(self, name: str, spec: Any) -> Backend:
        """The attention backend of layer ``name``; a layer that does not tell gets one that no table knows."""
        layer = self.layer(name)
        kernel = str(getattr(layer, "isa", None) or current_platform.device_name)
        cache = self._cache_type(layer, spec)
        if layer is None:
            return Backend("unknown", kernel, cache, ())
        backend = layer.get_attn_backend()
        order = order_of(backend.get_name(), layer)
        return Backend(order, kernel, cache, tuple(backend.get_supported_kernel_block_sizes(spec)))

    def _cache_type(self, layer: Any, spec: Any) -> str:
        plain = torch_name(spec.dtype)
        named = getattr(layer, "kv_cache_dtype", None) or getattr(spec, "cache_dtype_str", None)
        named = str(named or self.config.cache_config.cache_dtype)
        if spec.kv_quant_mode == specs.KVQuantMode.NONE or named == "auto":
            return plain
        exact = "fp8_e4m3" if named == "fp8" else named
        return f"{exact}fnuz" if exact.startswith("fp8") and current_platform.is_fp8_fnuz() else exact

    def heads(self, name: str, index: int, *, spec: Any) -> Heads:
        """The heads of an attention layer that this worker holds."""
        if isinstance(spec, specs.MLAAttentionSpec | specs.SlidingWindowMLASpec) or 1 in (
            self.tp.size,
            spec.max_tp_shards,
        ):
            return replicated(spec.num_kv_heads)
        if spec.max_tp_shards is not None:
            return heads_of(spec.num_kv_heads, spec.max_tp_shards * spec.num_kv_heads, tp=self.tp, layer=name)
        return heads_of(spec.num_kv_heads, self._total_heads(name, index), tp=self.tp, layer=name)

    def is_draft(self, name: str, index: int) -> bool:
        """Whether the layer only guesses ahead. What it guesses is verified, so answers do not depend on its cache."""
        if self.config.speculative_config is None:
            return False
        # Such layers are numbered on from the model's own, or stand under a name of their own.
        layers = self.config.model_config.get_total_num_hidden_layers()
        return index >= layers or not _DRAFT_NAMES.isdisjoint(name.split("."))

    def _total_heads(self, name: str, index: int) -> int:
        model, speculative = self.config.model_config, self.config.speculative_config
        if speculative is None or not self.is_draft(name, index):
            return int(model.model_arch_config[index].total_num_kv_heads)
        draft = speculative.draft_parallel_config
        if draft is not None and draft.tensor_parallel_size != self.tp.size:
            raise ConfigError(
                ConfigReason.UNSUPPORTED_MODEL,
                f"layer {name!r}: the draft model runs on {draft.tensor_parallel_size} tensor parallel ranks and "
                f"the model on {self.tp.size}: whose heads a rank holds is not known",
            )
        return int((speculative.draft_model_config or model).get_total_num_kv_heads())

    def state(self, name: str, spec: Any) -> StateSpec:
        """The state of a recurrent layer."""
        return StateSpec(
            layer=name,
            kind=spec.mamba_type.name,
            states=tuple(
                StateTensor(tuple(shape), torch_name(dtype), dtype.itemsize)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            ),
            tp=self.tp,
            channels_first=get_conv_state_layout() == "DS",
            replicated=spec.tp_replicated,
            whole_channels=self._whole_channels() if self._may_copy(spec) else None,
        )

    def _may_copy(self, spec: Any) -> bool:
        return self.tp.size > 1 and spec.mamba_type.name == "MAMBA2" and not spec.tp_replicated

    def _whole_channels(self) -> int | None:
        """Channels of the model's convolution state at tensor parallel size one."""
        model = self.config.model_config
        found, _ = model.registry.resolve_model_cls(model.architectures, model_config=model)
        shapes_of = getattr(found, "get_mamba_state_shape_from_config", None)
        if shapes_of is None:
            return None
        whole = copy.copy(self.config)
        whole.parallel_config = copy.copy(self.config.parallel_config)
        whole.parallel_config.tensor_parallel_size = 1
        conv = shapes_of(whole)[0]
        return int(conv[0 if get_conv_state_layout() == "DS" else 1])


_DRAFT_NAMES = frozenset({"mtp", "draft_model"})


def torch_name(dtype: Any) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
