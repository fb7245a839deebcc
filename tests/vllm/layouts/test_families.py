"""Layouts of families of models that no engine here serves: vLLM builds them, without weights, and registers them.

vLLM's own model code and allocator make the caches of a tiny configuration (:mod:`kvferry.vllm.dump`); nothing runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.cli.layout import prepare_environment
from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Component, Layout, bind_layout, parse_layout
from kvferry.plan import compile_plan
from kvferry.testing.draft_models import DEEPSEEK_V3_MTP, EAGLE, EAGLE3, QWEN3_NEXT_MTP, build_head
from kvferry.testing.model_recipes import LFM2, QWEN3, Shapes, TinyModel
from kvferry.testing.models import VOCABULARY, full_config

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

COMMON = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 256,
}
MAMBA2 = {
    "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "num_heads": 8, "head_dim": 32, "state_size": 64,
    "n_groups": 2, "conv_kernel": 4, "expand": 2, "num_hidden_layers": 3, "layer_norm_epsilon": 1e-5, "chunk_size": 64,
    "use_conv_bias": True, "use_bias": False, "hidden_act": "silu", "time_step_rank": 8, "rms_norm": True,
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_hidden_layers": 4, "attn_layer_period": 2,
    "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
    "num_experts_per_tok": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "use_mamba_kernels": False, "hidden_act": "silu",
}  # fmt: skip
GEMMA3N = {
    "model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 6, "head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 96, "num_kv_shared_layers": 2,
    "laurel_rank": 16, "altup_num_inputs": 2, "altup_active_idx": 0, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCABULARY, "activation_sparsity_pattern": [0.0] * 6, "rope_theta": 10000.0,
    "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "altup_coef_clip": 120.0, "altup_correct_scale": True, "final_logit_softcapping": 30.0,
}  # fmt: skip

LLAMA4 = {
    "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4, "head_dim": 32,
    "intermediate_size_mlp": 256, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 96, "use_qk_norm": False, "no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": False,
    "layer_types": [*["chunked_attention"] * 3, "full_attention"], "rope_theta": 10000.0, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip
KIMI_LINEAR = {
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "num_hidden_layers": 2,
    "linear_attn_config": {
        "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 4, "kv_lora_rank": 512, "mla_use_nope": True,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "hidden_act": "silu",
}  # fmt: skip

Dump = Callable[..., Layout]


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    """Writes a configuration, lets vLLM build it, and reads rank 0's layout."""
    prepare_environment()
    from kvferry.vllm.dump import dump_layouts

    def dumped(config: dict[str, Any], **engine: Any) -> Layout:
        arguments = {
            "model": str(model_folder(tmp_path / "model", config)),
            "dtype": "bfloat16",
            "num_gpu_blocks_override": 48,
            "max_model_len": 512,
            "enable_prefix_caching": False,
            "block_size": 64,
            **engine,
        }
        return parse_layout(dump_layouts(arguments, folder=tmp_path / "out")[0].read_bytes())

    return dumped


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**COMMON, **config}))
    return folder


def axes(component: Component) -> dict[str, tuple[int, int]]:
    return {axis.name: (axis.count, axis.total) for axis in component.axes}


def test_mamba2(dump: Dump) -> None:
    layout = dump(MAMBA2)
    assert [group.kind for group in layout.groups] == ["state"]
    parts = {c.component: c for c in layout.components if c.layer == layout.components[0].layer}
    assert {name: axes(part) for name, part in parts.items()} == {
        "conv.x": {"channel": (256, 256), "tap": (3, 3)},
        "conv.B": {"channel": (128, 128), "tap": (3, 3)},
        "conv.C": {"channel": (128, 128), "tap": (3, 3)},
        "ssm": {"head": (8, 8)},
    }
    assert parts["ssm"].content.type == "float32:32x64"


def test_mamba1(dump: Dump) -> None:
    layout = dump(JAMBA)
    assert sorted(group.kind for group in layout.groups) == ["attention", "state"]
    state = {c.component: axes(c) for c in layout.components if layout.groups[c.group].kind == "state"}
    assert state == {"conv": {"channel": (256, 256), "tap": (3, 3)}, "ssm": {"channel": (256, 256)}}
    assert {c.component for c in layout.components} - state.keys() == {"k", "v"}
    assert len({c.block_stride for c in layout.components}) == 1, "both kinds lie in pages of one size"


def test_shared_caches(dump: Dump) -> None:
    layout = dump(GEMMA3N)
    assert len({c.layer for c in layout.components}) == 4, "two of six layers read the cache of others"
    assert [group.sliding_window for group in layout.groups].count(95) == 1


def test_chunked_local_attention(dump: Dump) -> None:
    layout = dump(LLAMA4)
    chunks = {c.layer_index: layout.groups[c.group].chunk for c in layout.components}
    assert chunks == {0: 96, 1: 96, 2: 96, 3: None}
    assert {group.sliding_window for group in layout.groups} == {None}


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_cache(dump: Dump, dtype: str) -> None:
    layout = dump({**full_config(QWEN3), "torch_dtype": "bfloat16"}, kv_cache_dtype=dtype)
    assert {c.component: (c.content.type, c.content.nbytes) for c in layout.components} == {
        "k": (dtype, 1),
        "v": (f"{dtype}:v32", 32),
    }


def test_draft_layers(dump: Dump, tmp_path: Path) -> None:
    """Two heads where the model has four: the draft's own number, from its own configuration."""
    draft = {**full_config(QWEN3), "num_hidden_layers": 1, "num_key_value_heads": 2}
    speculative = {"method": "draft_model", "model": str(model_folder(tmp_path / "draft", draft))}
    layout = dump(full_config(QWEN3), dtype="float32", speculative_config={**speculative, "num_speculative_tokens": 2})
    heads = {c.layer: axes(c)["head"] for c in layout.components}
    assert sorted(heads.values()) == [(2, 2), (4, 4), (4, 4), (4, 4), (4, 4)]
    (draft_layer,) = [layer for layer, count in heads.items() if count == (2, 2)]
    assert "draft" in draft_layer
    assert {c.layer for c in layout.components if c.optional} == {draft_layer}, "a producer may lack it"


@pytest.mark.parametrize("head", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
def test_an_eagle_heads_layer_is_numbered_on_from_the_models(dump: Dump, tmp_path: Path, head: Shapes) -> None:
    method = "eagle3" if head is EAGLE3 else "eagle"
    speculative = {"method": method, "model": str(build_head(head, tmp_path)), "num_speculative_tokens": 2}
    layout = dump(full_config(QWEN3), dtype="float32", speculative_config=speculative)
    heads = {c.layer: axes(c)["head"] for c in layout.components if c.optional}
    assert heads == {"model.layers.4.self_attn.attn": (2, 2)}


@pytest.mark.parametrize(
    ("model", "layer"),
    [(DEEPSEEK_V3_MTP, "model.layers.3.self_attn.attn"), (QWEN3_NEXT_MTP, "mtp.layers.0.self_attn.attn")],
    ids=["mla", "gdn"],
)
def test_a_predicting_layer_of_the_model_itself(dump: Dump, model: TinyModel, layer: str) -> None:
    block = 16 if model is DEEPSEEK_V3_MTP else 640
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    layout = dump(full_config(model), dtype=model.dtype, block_size=block, speculative_config=speculative)
    assert {c.layer for c in layout.components if c.optional} == {layer}


def test_a_state_with_room_for_guesses_is_not_one_without(dump: Dump) -> None:
    """An engine that guesses keeps more taps of a convolution; which of them are live, a peer cannot know."""
    guessing = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    plain = dump(full_config(LFM2), dtype="float32")
    ahead = dump(full_config(LFM2), dtype="float32", speculative_config=guessing)
    taps = [{axes(c)["tap"] for c in layout.components if c.component == "conv"} for layout in (plain, ahead)]
    assert taps == [{(2, 2)}, {(5, 5)}]
    for sides in ((plain, ahead), (ahead, plain)):
        with pytest.raises(PlanError) as refused:
            compile_plan(*([bind_layout(side).placement] for side in sides))
        assert refused.value.reason is PlanReason.INCOMPATIBLE_CONTENT


@pytest.mark.parametrize(
    ("fused", "missing"),
    [
        ("1", "ModuleNotFoundError: No module named 'cutlass'"),
        ("0", "is not supported by attention backend(s): CPU_MLA"),
    ],
    ids=["as it comes", "without its fused kernels"],
)
def test_kimi_linear_is_built_by_no_vllm_that_is_known_for_a_cpu(fused: str, missing: str, tmp_path: Path) -> None:
    """So there is no layout to read. Once this fails, read it: the support page calls the family untested.

    In a process of its own: this family's warm-up looks through all modules that are imported, tests' among them.
    """
    folder = model_folder(tmp_path / "model", KIMI_LINEAR)
    words = ["--model", folder, "--out", tmp_path / "out", "--dtype", "bfloat16", "--max-model-len", "512"]
    words += ["--num-blocks", "48", "--block-size", "16", "--engine-args", '{"enable_prefix_caching": false}']
    answer = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", "layout", "dump", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "VLLM_KIMI_K3_GEMM_AR": fused},
    )
    assert answer.returncode != 0, answer.stdout
    refusal = json.loads(answer.stderr.splitlines()[-1])["error"]
    assert refusal["reason"] == "invalid-value"
    assert missing in refusal["message"]
