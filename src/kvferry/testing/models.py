"""Tiny models made here from configurations: random weights from a fixed seed and a local byte-level tokenizer.

Nothing is downloaded. A model folder holds what vLLM and transformers expect (``config.json``, one safetensors
file, tokenizer files), so that any engine can serve it.

Random weights of the usual size make a model that repeats its last token and never looks at its cache: a wrong
transfer would go unseen. Three choices prevent that. Projections have a gain of about one, so every layer adds
as much to the residual stream as the embedding gave. Query and key norms are scaled up, so attention looks at a
few positions and the answer depends on *which* bytes the cache holds. Rows of the output head that stand for
anything but printable ASCII are zero, so greedy answers are readable and never end early. Where the head is the
embedding itself, the signs of the final norm are random: else the likeliest token is always the last one again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvferry.testing.model_recipes import Shapes, TinyModel

VOCABULARY: Final = 320
"""Rows of the embedding: special tokens, 256 bytes, and unused rows up to a multiple of 64."""

SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>")

_FIRST_BYTE = len(SPECIAL_TOKENS)
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


def token_ids(text: str) -> list[int]:
    """The ids of ``text`` in every model built here: one per UTF-8 byte.

    >>> token_ids("AB")
    [68, 69]
    """
    return [_FIRST_BYTE + byte for byte in text.encode()]


def text_of(ids: list[int]) -> str:
    """The text of ``ids``; ids that are not bytes are left out.

    >>> text_of(token_ids("kv"))
    'kv'
    """
    return bytes(i - _FIRST_BYTE for i in ids if 0 <= i - _FIRST_BYTE < 256).decode(errors="replace")


def build_model(model: TinyModel, folder: Path, *, seed: int = 20240229) -> Path:
    """Write ``model`` under ``folder`` unless it is there already, and return its own folder.

    The folder's name carries a fingerprint of the recipe, so an older recipe is never served by mistake.
    """
    target = folder / f"{model.name}-{_fingerprint(model, seed)}"
    done = target / ".complete"
    if done.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = full_config(model)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(model, config, target=target, seed=seed)
    write_tokenizer(target)
    done.touch()
    return target


def _fingerprint(model: TinyModel, seed: int) -> str:
    import hashlib

    recipe = json.dumps([dict(model.config), model.dtype, model.embedding_scale, seed, _RECIPE_VERSION], sort_keys=True)
    return hashlib.sha256(recipe.encode()).hexdigest()[:10]


_RECIPE_VERSION: Final = 1
"""Raise it when the weights or the tokenizer change."""


def full_config(model: TinyModel) -> dict[str, Any]:
    """The model's ``config.json``."""
    return {
        **model.config,
        "vocab_size": VOCABULARY,
        "torch_dtype": model.dtype,
        "tie_word_embeddings": model.tied_head,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


# --- weights -----------------------------------------------------------------------------------------------------


def _write_weights(model: TinyModel, config: Mapping[str, Any], *, target: Path, seed: int) -> None:
    # torch and transformers take seconds to import: only the process that builds a model pays for them.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "torch_dtype")}
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields)).state_dict()
    shapes = {name: tuple(values.shape) for name, values in found.items()}
    if model.more_weights is not None:
        shapes |= model.more_weights(shapes)
    generator = torch.Generator().manual_seed(seed)
    offset = 1.0 if config["model_type"].startswith(("gemma3_", "qwen3_next")) else 0.0
    weights = {name: _values(name, shapes[name], generator, offset) for name in sorted(shapes)}
    if model.tied_head:
        weights.pop("lm_head.weight", None)
        _blank_unprintable(weights["model.embed_tokens.weight"])
        norm = weights[model.final_norm]
        norm *= torch.sign(torch.randn(norm.shape, generator=generator)) * _GAIN * _HEAD_GAIN / norm.shape[0] ** 0.5
        norm /= model.embedding_scale  # the head's rows are those of the embedding, which are scaled below
    else:
        _blank_unprintable(weights["lm_head.weight"])
    weights["model.embed_tokens.weight"] *= model.embedding_scale
    _store(weights, target, model.dtype)


def write_weights(shapes: Shapes, target: Path, *, dtype: str, seed: int) -> None:
    """Random weights of these shapes, for a part of a model that transformers has no module for."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    _store({name: _values(name, shapes[name], generator, 0.0) for name in sorted(shapes)}, target, dtype)


def _store(weights: Mapping[str, Any], target: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    wanted = getattr(torch, dtype)
    stored = {name: values.to(wanted).contiguous() for name, values in _one_by_one(weights)}
    save_file(stored, str(target / "model.safetensors"), metadata={"format": "pt"})


def _values(name: str, shape: tuple[int, ...], generator: Any, norm_offset: float) -> Any:
    import torch

    if name.endswith("A_log"):
        return torch.linspace(-1.0, 1.0, shape[0])
    if name.endswith(("dt_bias", ".bias", "correction_bias")):
        return torch.zeros(shape)
    if len(shape) == 1:
        is_query_or_key = any(part in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"))
        # Two families multiply by (1 + weight); the gated norm of a linear attention does not.
        offset = 0.0 if "linear_attn.norm" in name else norm_offset
        return torch.full(shape, (_SHARPNESS if is_query_or_key else 1.0) - offset)
    noise = torch.randn(shape, generator=generator)
    if "embed_tokens" in name:
        return noise
    fan_in = shape[1] if len(shape) == 2 else shape[-1]
    return noise * (_GAIN * (_HEAD_GAIN if "lm_head" in name else 1.0) / fan_in**0.5)


def _one_by_one(weights: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Checkpoints keep one matrix per expert; transformers' module keeps all experts in one tensor."""
    for name, values in weights.items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, values
            continue
        for expert, matrix in enumerate(values):
            if leaf == "gate_up_proj":
                gate, up = matrix.chunk(2)
                yield f"{stem}.{expert}.gate_proj.weight", gate
                yield f"{stem}.{expert}.up_proj.weight", up
            else:
                yield f"{stem}.{expert}.{leaf}.weight", matrix


def _blank_unprintable(head: Any) -> None:
    head[[row for row in range(head.shape[0]) if not 0x20 <= row - _FIRST_BYTE < 0x7F]] = 0.0


_GAIN: Final = 1.2
_HEAD_GAIN: Final = 3.0
_SHARPNESS: Final = 1.6


# --- tokenizer ---------------------------------------------------------------------------------------------------


def write_tokenizer(target: Path) -> None:
    """A byte-level tokenizer, a token for each byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = _byte_alphabet()
    vocabulary = {alphabet[byte]: _FIRST_BYTE + byte for byte in range(256)}
    names = [*SPECIAL_TOKENS, *(f"<unused{i}>" for i in range(VOCABULARY - 256 - _FIRST_BYTE))]
    vocabulary |= {name: i if i < _FIRST_BYTE else 256 + i for i, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _byte_alphabet() -> list[str]:
    """One printable character for each byte, as byte-level tokenizers write them.

    Printable Latin-1 bytes stand for themselves; the rest take the characters from U+0100 on, in order.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    pick: Callable[[int], int] = lambda byte: byte if byte in plain else next(others)  # noqa: E731
    return [chr(pick(byte)) for byte in range(256)]
