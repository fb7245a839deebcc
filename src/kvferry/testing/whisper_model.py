"""A tiny model with an encoder and a decoder: Whisper, random weights. Only to be refused: its cross attention has
positions of its own."""

import json
from pathlib import Path

from kvferry.testing.models import VOCABULARY, write_tokenizer


def build_whisper(folder: Path, *, seed: int = 20240229) -> Path:
    """Write the model under ``folder`` unless it is there already, and return its own folder."""
    target = folder / "whisper"
    done = target / ".complete"
    if done.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    # Seconds to import: only the process that builds a model pays for them.
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    sizes = {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in _SIZES.items()}
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        num_mel_bins=80,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **sizes,
    )
    torch.manual_seed(seed)
    WhisperForConditionalGeneration(config).save_pretrained(target)
    WhisperFeatureExtractor().save_pretrained(target)
    write_tokenizer(target)
    settings = target / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "processor_class": "WhisperProcessor"}))
    done.touch()
    return target


_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 128}
