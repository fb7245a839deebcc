"""The engines and the prompts of a cell (:mod:`kvferry.testing.cells`), and the single engine beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvferry.testing.cells import Blocks, Cache, Cell, Chunks, Model, Peer, Split
from kvferry.testing.comparison import Prompt
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.model_recipes import MODELS, TinyModel
from kvferry.testing.models import token_ids
from kvferry.testing.pair import pair_spec
from kvferry.testing.upstream_pair import Role, member

KERNEL_BLOCK: Final = 32
MAX_MODEL_LEN: Final = 2048
CHUNK_TOKENS: Final = 192
"""Tokens of a step where prompts are computed in chunks."""

STEP_TOKENS: Final = 4096
"""Tokens of a step elsewhere: more than all prompts that are sent at once."""

CACHE_TOKENS: Final = 6144
"""Room of each engine's cache."""

_SIZES: Final[Mapping[Blocks, tuple[int, int]]] = {
    Blocks.EQUAL: (128, 128),
    Blocks.SMALLER: (128, 64),
    Blocks.LARGER: (128, 768),
    Blocks.UNEVEN: (96, 64),
}
_STATE_SIZES: Final[Mapping[Blocks, tuple[int, int]]] = {
    # vLLM makes the attention page of this model at least as large as its state: 640 tokens.
    Blocks.EQUAL: (640, 640),
    Blocks.SMALLER: (1280, 640),
    Blocks.LARGER: (640, 1280),
    Blocks.UNEVEN: (640, 960),
}
_LENGTHS: Final = (7, 64, 129, 385, 700)
"""Of the first prompts."""

_TOKENS: Final = 10


def block_sizes(cell: Cell) -> tuple[int, int]:
    """The logical blocks of prefill and decode."""
    if cell.model is Model.DEEPSEEK_V2:
        return 16, 16
    return (_STATE_SIZES if cell.model is Model.QWEN3_NEXT else _SIZES)[cell.blocks]


def prompts_of(model: str) -> tuple[Prompt, ...]:
    """Printable text of several lengths; the last prompt is asked a second time.

    It is longer than every block, so that a prefix cache can find something.
    """
    text = f"A ferry crosses the river {model} at night, with one lamp at the bow; "
    prompts = [
        Prompt(f"prompt-{n}", tuple(token_ids(f"{n} times. " + text * (n // len(text) + 1))[:n]), _TOKENS)
        for n in (*_LENGTHS, 1400 if model == Model.QWEN3_NEXT else 850)
    ]
    return (*prompts, Prompt(f"{prompts[-1].name}-again", prompts[-1].tokens, _TOKENS))


def single_spec(tiny: TinyModel, folder: Path) -> EngineSpec:
    """An engine that does both jobs."""
    block = 16 if tiny.name == Model.DEEPSEEK_V2 else 640 if tiny.name == Model.QWEN3_NEXT else 128
    return _engine_spec("single", tiny, folder, block=block)


def cell_specs(cell: Cell, folder: Path, report: Path) -> list[EngineSpec]:
    """The engines of a cell: prefill and decode, and the same once more under vLLM's connector where that is a side."""
    sides = _sides(cell, folder)
    if cell.peer is Peer.NONE:
        pair = pair_spec(*sides, options={"transport": cell.moves.value, "transfer_report": str(report)})
        return [pair.prefill, pair.decode]
    blocks = block_sizes(cell)
    declared = {} if blocks[0] == blocks[1] else {"upstream_peer": {"block_size": blocks[cell.peer is Peer.DECODE]}}
    there: Role = "prefill" if cell.peer is Peer.PREFILL else "decode"
    upstream = msgspec.structs.replace(sides[there == "decode"], name="upstream")
    prefill, decode = sides
    return [
        member(prefill, "prefill", "ferry", transfer_report=str(report), **(declared if there == "decode" else {})),
        member(decode, "decode", "ferry", transfer_report=str(report), **(declared if there == "prefill" else {})),
        member(upstream, there, "upstream", transfer_report=str(report)),
    ]


def _sides(cell: Cell, folder: Path) -> tuple[EngineSpec, EngineSpec]:
    tiny = MODELS[cell.model]
    prefill, decode = (
        _engine_spec(
            name,
            tiny,
            folder,
            block=block,
            kernel_block=KERNEL_BLOCK if cell.split is Split.ON else None,
            prefix_caching=cell.cache is Cache.ON,
            max_batched_tokens=CHUNK_TOKENS if cell.chunks is Chunks.ON else STEP_TOKENS,
            engine_args={"tensor_parallel_size": tp},
        )
        for name, block, tp in zip(("prefill", "decode"), block_sizes(cell), cell.tp.sizes, strict=True)
    )
    return prefill, decode


def _engine_spec(name: str, tiny: TinyModel, folder: Path, *, block: int, **changed: Any) -> EngineSpec:
    return EngineSpec(
        name=name,
        model=str(folder),
        dtype=tiny.dtype,
        custom_ops=tiny.custom_ops,
        block_size=block,
        num_blocks=max(12, CACHE_TOKENS // block),
        max_model_len=MAX_MODEL_LEN,
        **changed,
    )
