"""Models that guess ahead: what vLLM's speculative decoding needs, made here like the models that it guesses for.

Three kinds, which differ in where the cache of the guessing layers comes from. A *draft model* is a whole model with a
cache of its own, of which layers and heads may be other ones. An *Eagle head* is one more layer behind the model's own
that reads the model's hidden states. *MTP layers* are part of the model's own checkpoint. All have random weights, so
what they guess is nearly always wrong; but it depends on the cache of their layers, which is what tests look at.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvferry.testing.model_recipes import DEEPSEEK_V2, QWEN3, QWEN3_NEXT, Shapes, TinyModel
from kvferry.testing.models import VOCABULARY, write_weights

# ---------------------------------------------------------------------------------------------------- draft models

SMALL_QWEN3: Final = replace(
    QWEN3, name="qwen3_draft", config={**QWEN3.config, "num_hidden_layers": 1, "num_key_value_heads": 2}
)
"""A draft model with half the key-value heads and a quarter of the layers."""

# ----------------------------------------------------------------------------------------------------- Eagle heads

_HIDDEN: Final = int(QWEN3.config["hidden_size"])
_HEAD_DIM: Final = 32
_HEADS: Final = 4
_KV_HEADS: Final = 2
_INNER: Final = 256


def _block(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (_HEADS * _HEAD_DIM, inputs),
        f"{prefix}.self_attn.k_proj.weight": (_KV_HEADS * _HEAD_DIM, inputs),
        f"{prefix}.self_attn.v_proj.weight": (_KV_HEADS * _HEAD_DIM, inputs),
        f"{prefix}.self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": (_INNER, _HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (_INNER, _HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (_HIDDEN, _INNER),
        f"{prefix}.post_attention_layernorm.weight": (_HIDDEN,),
    }


EAGLE: Final[Mapping[str, tuple[int, ...]]] = {"fc.weight": (_HIDDEN, 2 * _HIDDEN), **_block("layers.0", _HIDDEN)}
"""The weights of a head after the first Eagle paper; embedding and output head are the model's."""

EAGLE3: Final[Mapping[str, tuple[int, ...]]] = {
    "fc.weight": (_HIDDEN, 3 * _HIDDEN),
    **_block("midlayer", 2 * _HIDDEN),
    "midlayer.input_layernorm.weight": (_HIDDEN,),
    "midlayer.hidden_norm.weight": (_HIDDEN,),
    "norm.weight": (_HIDDEN,),
    "lm_head.weight": (VOCABULARY, _HIDDEN),
}
"""The weights of a head after the third one: it reads the hidden states of three layers and has its own output."""


def build_head(weights: Mapping[str, tuple[int, ...]], folder: Path, *, seed: int = 20240301) -> Path:
    """Write an Eagle head for :data:`QWEN3`, with two key-value heads where the model has four; returns its folder."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": QWEN3.config["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # what a head of the third paper reads
        "tie_word_embeddings": False,
        "torch_dtype": QWEN3.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    recipe = json.dumps([config, weights, seed], sort_keys=True)
    target = folder / f"eagle-{hashlib.sha256(recipe.encode()).hexdigest()[:10]}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    write_weights(dict(weights), target, dtype=QWEN3.dtype, seed=seed)
    return target


# ------------------------------------------------------------------------------------------------------ MTP layers


def _deepseek_layer(shapes: Shapes) -> Shapes:
    """One more layer behind the last, and what joins a token's embedding to a hidden state before it."""
    hidden = shapes["model.norm.weight"]
    layers = int(DEEPSEEK_V3_MTP.config["num_hidden_layers"])
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    return {
        **{new + name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)},
        f"{new}enorm.weight": hidden,
        f"{new}hnorm.weight": hidden,
        f"{new}eh_proj.weight": (*hidden, 2 * hidden[0]),
        f"{new}shared_head.norm.weight": hidden,
        f"{new}shared_head.head.weight": shapes["lm_head.weight"],
        f"{new}embed_tokens.weight": shapes["model.embed_tokens.weight"],
    }


DEEPSEEK_V3_MTP: Final[TinyModel] = replace(
    DEEPSEEK_V2,
    name="deepseek_v3_mtp",
    more_weights=_deepseek_layer,
    config={
        **DEEPSEEK_V2.config,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    },
)
"""MLA with a predicting layer of its own kind behind the last one."""


def _qwen3_next_layer(shapes: Shapes) -> Shapes:
    hidden = shapes["model.norm.weight"]
    attention = "model.layers.3."
    return {
        **{
            "mtp.layers.0." + name.removeprefix(attention): shape
            for name, shape in shapes.items()
            if name.startswith(attention)
        },
        "mtp.fc.weight": (*hidden, 2 * hidden[0]),
        "mtp.norm.weight": hidden,
        "mtp.pre_fc_norm_hidden.weight": hidden,
        "mtp.pre_fc_norm_embedding.weight": hidden,
    }


QWEN3_NEXT_MTP: Final[TinyModel] = replace(
    QWEN3_NEXT,
    name="qwen3_next_mtp",
    more_weights=_qwen3_next_layer,
    config={**QWEN3_NEXT.config, "num_nextn_predict_layers": 1},
)
"""Gated delta net beside attention, with a predicting layer of attention."""
