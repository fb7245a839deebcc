"""Which tiny models there are: the fields of their ``config.json``, and what vLLM needs to run them on a CPU.

Each stands for a family of cache layouts: grouped heads, a short convolution's state beside attention, a sliding
window beside full attention, one latent row per token, a gated delta net's state beside attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

Shapes = Mapping[str, tuple[int, ...]]
"""Weights by name."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One architecture, small enough that an engine computes a thousand tokens in a second on one core."""

    name: str
    dtype: str
    """Of the weights and the cache, as vLLM's ``--dtype`` spells it."""
    config: Mapping[str, Any]
    """The architecture's fields of ``config.json``; vocabulary and token ids are added when it is built."""
    exact: bool
    """Whether answers are compared token by token; else by teacher-forced log probabilities."""
    has_state: bool = False
    """Whether some layers keep a recurrent state instead of keys and values."""
    tied_head: bool = False
    """Whether vLLM always takes the embedding as the output head."""
    embedding_scale: float = 1.0
    """Standard deviation of the embedding, where the model multiplies it before use."""
    final_norm: str = "model.norm.weight"
    """The weight that scales what the output head sees."""
    custom_ops: tuple[str, ...] = ()
    """vLLM's ``compilation_config.custom_ops`` that this model needs on the CPU."""
    more_weights: Callable[[Shapes], Shapes] | None = None
    """Weights that transformers' module leaves out of the checkpoint, from those that it has."""


_COMMON: Final[Mapping[str, Any]] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}

QWEN3: Final = TinyModel(
    name="qwen3",
    dtype="float32",
    exact=True,
    config={
        **_COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    },
)

QWEN3_ONE_HEAD: Final = replace(QWEN3, name="qwen3_one_head", config={**QWEN3.config, "num_key_value_heads": 1})
"""Of keys and values there is one head: where an engine has several ranks, each holds a copy of it."""

LFM2: Final = TinyModel(
    name="lfm2",
    dtype="float32",
    exact=True,
    has_state=True,
    tied_head=True,
    final_norm="model.embedding_norm.weight",
    custom_ops=("none",),
    config={
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 128,
        "block_dim": 128,
        "conv_dim": 128,
        "num_attention_heads": 4,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "block_ff_dim": 256,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "max_position_embeddings": 8192,
    },
)

GEMMA3: Final = TinyModel(
    name="gemma3",
    dtype="float32",
    exact=True,
    embedding_scale=128**-0.5,
    config={
        **_COMMON,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 32,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 96,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
    },
)

DEEPSEEK_V2: Final = TinyModel(
    name="deepseek_v2",
    dtype="float32",
    exact=True,
    custom_ops=("none",),
    config={
        **_COMMON,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    },
)

QWEN3_NEXT: Final = TinyModel(
    name="qwen3_next",
    dtype="bfloat16",
    exact=False,
    has_state=True,
    config={
        **_COMMON,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    },
)

GEMMA3N: Final = TinyModel(
    name="gemma3n",
    dtype="float32",
    exact=True,
    tied_head=True,
    embedding_scale=128**-0.5,
    config={
        **_COMMON,
        "model_type": "gemma3n_text",
        "architectures": ["Gemma3nForCausalLM"],
        "head_dim": 32,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 96,
        "laurel_rank": 16,
        "altup_num_inputs": 2,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 320,
        "activation_sparsity_pattern": [0.0] * 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
    },
)
"""The last two of six layers read the caches of two others."""

LLAMA4: Final = TinyModel(
    name="llama4",
    dtype="float32",
    exact=True,
    config={
        **_COMMON,
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "head_dim": 32,
        "intermediate_size": 256,
        "intermediate_size_mlp": 256,
        "num_hidden_layers": 4,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 100,
        "attention_chunk_size": 128,
        "use_qk_norm": False,
        "no_rope_layers": [1, 1, 1, 0],
        "attn_temperature_tuning": False,
        "layer_types": [*["chunked_attention"] * 3, "full_attention"],
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    },
)
"""Three layers look at their own chunk of 128 tokens only. No layer has experts."""

MODELS: Final[Mapping[str, TinyModel]] = {m.name: m for m in (QWEN3, LFM2, GEMMA3, DEEPSEEK_V2, QWEN3_NEXT)}
