"""Real engines with caches that no cell has: chunks of attention, layers that read another's cache, 8-bit elements;
and one that is refused.

Blocks differ on the two sides where vLLM lets them. Right is what is right in a cell: digests of the moved pages equal
at both ends, the answers of a single engine, and every block back in both pools.

``make test`` builds these layouts without an engine (``tests/vllm/layouts/test_families.py``); the engines run with
``--cells all`` (``make test-vllm``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.comparison import Prompt, Reference, judge, take_references
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineFacts, EngineSpec
from kvferry.testing.engines import Engine, EngineError, start_engines
from kvferry.testing.model_recipes import GEMMA3N, LLAMA4, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec, report_options
from kvferry.testing.transfer_report import wait_for_reports
from kvferry.testing.whisper_model import build_whisper

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

TEXT = token_ids("Not every ferry has one deck; some have two, and some share a deck with the ferry behind. " * 10)
LENGTHS = (2, 65, 128, 129, 300, 513, 700)
TOKENS = 8


def without_avx512() -> str | None:
    import torch

    return None if torch.cpu._is_avx512_supported() else "vLLM has no 8-bit cache on a CPU without AVX-512"


def kinds(facts: EngineFacts) -> set[str]:
    return {group.kind for group in facts.groups}


def has_chunks(facts: EngineFacts) -> bool:
    return kinds(facts) == {"ChunkedLocalAttentionSpec", "FullAttentionSpec"}


def shares(facts: EngineFacts) -> bool:
    """Six layers; the last two read the caches of two others, and have none."""
    return {name.split(".")[2] for group in facts.groups for name in group.layers} == {"0", "1", "2", "3"}


def is_8_bit(facts: EngineFacts) -> bool:
    return {tensor.dtype for tensor in facts.tensors.values()} == {"torch.uint8"}


@dataclass(frozen=True)
class Case:
    model: TinyModel
    is_there: Callable[[EngineFacts], bool]
    """Whether an engine really has such a cache."""
    blocks: tuple[int, int] = (64, 128)
    dtype: str | None = None
    """Other than the model's own."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    why_not: Callable[[], str | None] = lambda: None
    """Why this machine cannot run it."""

    @property
    def exact(self) -> bool:
        return self.model.exact and self.dtype is None and not self.engine_args

    def spec(self, name: str, side: int, models: Path) -> EngineSpec:
        block = self.blocks[side]
        return EngineSpec(
            name=name,
            model=str(build_model(self.model, models)),
            dtype=self.dtype or self.model.dtype,
            custom_ops=self.model.custom_ops,
            block_size=block,
            num_blocks=6144 // block,
            max_model_len=1024,
            engine_args=dict(self.engine_args),
        )


CASES = {
    "chunked local attention": Case(LLAMA4, has_chunks),
    "shared caches": Case(GEMMA3N, shares),
    **{
        dtype: Case(QWEN3, is_8_bit, dtype="bfloat16", engine_args={"kv_cache_dtype": dtype}, why_not=without_avx512)
        for dtype in ("fp8_e4m3", "fp8_e5m2")
    },
}


@dataclass(frozen=True)
class Site:
    pair: Pair
    single: Engine
    references: tuple[Reference, ...]
    report: Path


@contextmanager
def sites(case: Case, folder: Path, *, models: Path, forge: EngineForge) -> Iterator[Site]:
    sides = [case.spec(name, side, models) for side, name in enumerate(("prefill", "decode"))]
    spec = pair_spec(*sides, options=report_options(folder, transport="mooncake"))
    single = case.spec("single", 1, models)
    with start_engines([spec.prefill, spec.decode, single], logs=folder, forge=forge) as engines:
        homes = [(engine, engine.inspect().free_blocks) for engine in engines[:2]]
        prompts = [Prompt(f"prompt-{length}", tuple(TEXT[:length]), TOKENS) for length in LENGTHS]
        references = take_references(engines[2], prompts)
        yield Site(Pair(spec, *engines[:2]), engines[2], references, folder / "transfers.jsonl")
        for engine, home in homes:
            engine.wait_for_free_blocks(home, timeout=15)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_carried(
    case: Case, tmp_path: Path, model_folder: Path, forge: EngineForge, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    if (why := case.why_not()) is not None:
        pytest.skip(why)
    with sites(case, tmp_path, models=model_folder, forge=forge) as site:
        assert all(case.is_there(engine.inspect()) for engine in (site.pair.prefill, site.pair.decode))
        for reference in site.references:
            prompt = reference.prompt
            served = site.pair.generate(prompt.tokens, max_tokens=TOKENS, name=prompt.name)
            verdict = judge(reference, served.decode, single=site.single, exact=case.exact)
            assert verdict.equal, (prompt.name, verdict)
            assert served.decode.cached_tokens >= len(prompt.tokens) - 1
            assert wait_for_reports([site.report], [served.transfer_id], 15)[served.transfer_id].problems() == ()
        answers = {tuple(reference.alone.tokens) for reference in site.references}
        assert len(answers) > 3, "the answer does not depend on the prompt"


def test_an_encoder_beside_a_decoder_is_refused_at_the_start(
    tmp_path: Path, model_folder: Path, forge: EngineForge, request: pytest.FixtureRequest
) -> None:
    """vLLM's CPU backend starts this model without a connector."""
    if request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    model = str(build_whisper(model_folder))
    plain = EngineSpec(name="plain", model=model, dtype="float32", block_size=32, num_blocks=128, max_model_len=256)
    with start_engines([plain], logs=tmp_path, forge=forge) as (engine,):
        assert kinds(engine.inspect()) == {"FullAttentionSpec", "CrossAttentionSpec"}
    joined = pair_spec(plain, plain, options={"transport": "mooncake"}).prefill
    said = "ConfigError: unsupported-model: .*encoder_attn.*: encoder-decoder attention has positions of its own"
    with pytest.raises(EngineError, match=said), start_engines([joined], logs=tmp_path, forge=forge):
        pass
