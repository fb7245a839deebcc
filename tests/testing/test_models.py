"""Tiny models: what is written can be loaded, is the same every time, and reads and writes text."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from kvferry.testing.model_recipes import GEMMA3N, LFM2, LLAMA4, MODELS, QWEN3, TinyModel
from kvferry.testing.models import VOCABULARY, build_model, text_of, token_ids

pytest.importorskip("transformers")
pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("default")  # other people's imports


def weights_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_model_is_the_same_every_time_and_another_with_another_seed(tmp_path: Path) -> None:
    first = build_model(QWEN3, tmp_path / "a")
    again = build_model(QWEN3, tmp_path / "b")
    other = build_model(QWEN3, tmp_path / "a", seed=1)
    assert first.name == again.name != other.name
    assert weights_of(first) == weights_of(again) != weights_of(other)


def test_a_model_that_exists_is_not_built_again(tmp_path: Path) -> None:
    folder = build_model(QWEN3, tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert build_model(QWEN3, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("tiny", [*MODELS.values(), GEMMA3N, LLAMA4], ids=lambda tiny: tiny.name)
def test_the_weights_fit_the_architecture(tiny: TinyModel, tmp_path: Path) -> None:
    """transformers loads every weight and misses none, but for the head that is the embedding."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = build_model(tiny, tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not set(info["missing_keys"]) - {"lm_head.weight"}
    assert not info["unexpected_keys"]
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCABULARY
    ids = torch.tensor([token_ids("the cache of another prompt")])
    with torch.no_grad():
        likeliest = model(ids).logits[0].argmax(-1).tolist()
    assert all(text_of([token]).isprintable() and text_of([token]) for token in likeliest)


def test_the_tokenizer_reads_and_writes_any_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_model(LFM2, tmp_path))
    text = "Prefill, then decode: 48 tokens\n\tøre, 三"
    assert tokenizer(text)["input_ids"] == token_ids(text)
    assert tokenizer.decode(token_ids(text)) == text == text_of(token_ids(text))
    assert len(tokenizer) == VOCABULARY
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "user: hello\nassistant: "


def test_a_changed_recipe_gets_another_folder(tmp_path: Path) -> None:
    wider = dataclasses.replace(QWEN3, config={**QWEN3.config, "intermediate_size": 512})
    assert build_model(wider, tmp_path).name != build_model(QWEN3, tmp_path).name
