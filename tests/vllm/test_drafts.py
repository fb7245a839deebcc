"""Engines that guess ahead (speculative decoding): the cache of the guessing layers goes where the model's goes.

Answers cannot show it: guesses are verified. So beside answers and digests, the guesses themselves are compared with
those of a single engine, token by token and step by step. Where the prefill engine does not guess there is nothing to
fetch for these layers: the answers are right all the same, and the guesses are others, which shows that the comparison
would see a cache that did not come.

By itself this runs the cases of the core; ``--cells all`` (``make test-vllm``) runs every one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.comparison import Prompt, Reference, judge, take_references
from kvferry.testing.draft_models import DEEPSEEK_V3_MTP, EAGLE, EAGLE3, QWEN3_NEXT_MTP, SMALL_QWEN3, build_head
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import GEMMA3, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, Served, pair_spec, report_options
from kvferry.testing.transfer_report import wait_for_reports

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

TEXT = token_ids("The pilot guesses the tide, and the tide tells him whether he was right. " * 12)
LENGTHS = (7, 129, 400, 700)
TOKENS = 12

Guessing = Callable[[Path], dict[str, Any]]
"""vLLM's ``speculative_config``; models that it needs are built in the folder."""


def draft_model(folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(build_model(SMALL_QWEN3, folder)), "num_speculative_tokens": 3}


def own_model(folder: Path) -> dict[str, Any]:
    """The model guesses for itself, so that every guess is right."""
    return {"method": "draft_model", "model": str(build_model(QWEN3, folder)), "num_speculative_tokens": 3}


def eagle(folder: Path) -> dict[str, Any]:
    return {"method": "eagle", "model": str(build_head(EAGLE, folder)), "num_speculative_tokens": 3}


def eagle3(folder: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(build_head(EAGLE3, folder)), "num_speculative_tokens": 2}


def mtp(folder: Path) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": 1}


def repetition(folder: Path) -> dict[str, Any]:
    """Guesses from what was said before, by no layer at all."""
    return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Case:
    """One pair of engines."""

    name: str
    guessing: Guessing
    model: TinyModel = QWEN3
    blocks: tuple[int, int] = (128, 128)
    tp: tuple[int, int] = (1, 1)
    kernel_block: int | None = None
    transport: str = "mooncake"
    own_layers: bool = True
    """Whether layers of their own do the guessing."""
    core: bool = False


CASES = (
    Case("eagle", eagle, blocks=(128, 64), core=True),
    Case("eagle3-split", eagle3, blocks=(96, 64), kernel_block=32, transport="cma"),
    Case("draft-model", draft_model, tp=(1, 2), transport="cma"),
    Case("own-model", own_model, blocks=(64, 128)),
    Case("eagle-2-to-1", eagle, tp=(2, 1), blocks=(64, 128)),
    Case("mtp-mla", mtp, model=DEEPSEEK_V3_MTP, blocks=(16, 16), core=True),
    Case("repetition-window", repetition, model=GEMMA3, blocks=(64, 128), own_layers=False),
    Case("mtp-gdn", mtp, model=QWEN3_NEXT_MTP, blocks=(640, 640)),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        every = metafunc.config.getoption("--cells") == "all"
        chosen = [case for case in CASES if every or case.core]
        metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])


@dataclass(frozen=True)
class Site:
    """A pair, a single engine, and what that one answers."""

    pair: Pair
    single: Engine
    references: tuple[Reference, ...]
    report: Path
    exact: bool

    def serve(self, reference: Reference) -> Served:
        """One prompt through both: right, and proven at both ends."""
        served = self.pair.generate(reference.prompt.tokens, max_tokens=TOKENS, name=reference.prompt.name)
        if self.exact or served.decode.tokens != reference.alone.tokens:
            verdict = judge(reference, served.decode, single=self.single, exact=self.exact)
            assert verdict.equal, verdict
        assert served.decode.cached_tokens >= len(reference.prompt.tokens) - 1
        assert wait_for_reports([self.report], [served.transfer_id], 15)[served.transfer_id].problems() == ()
        return served


@contextmanager
def sites(
    case: Case, folder: Path, *, models: Path, forge: EngineForge, guessing: tuple[bool, bool] = (True, True)
) -> Iterator[Site]:
    """``guessing``: whether the prefill and the decode engine guess. The single engine does as the decode engine."""
    model, guesses = str(build_model(case.model, models)), case.guessing(models)

    def spec_of(name: str, side: int, *, tp: int = 1) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=model,
            dtype=case.model.dtype,
            custom_ops=case.model.custom_ops,
            block_size=case.blocks[side],
            kernel_block=case.kernel_block,
            num_blocks=max(16, 6144 // case.blocks[side]),
            max_model_len=1024,
            engine_args={"tensor_parallel_size": tp, **({"speculative_config": guesses} if guessing[side] else {})},
        )

    sides = [spec_of(name, side, tp=case.tp[side]) for side, name in enumerate(("prefill", "decode"))]
    spec = pair_spec(*sides, options=report_options(folder, transport=case.transport))
    with start_engines([spec.prefill, spec.decode, spec_of("single", 1)], logs=folder, forge=forge) as engines:
        homes = [(engine, engine.inspect().free_blocks) for engine in engines[:2]]
        prompts = [Prompt(f"prompt-{length}", tuple(TEXT[:length]), TOKENS) for length in LENGTHS]
        references = take_references(engines[2], prompts)
        yield Site(Pair(spec, *engines[:2]), engines[2], references, folder / "transfers.jsonl", exact=case.model.exact)
        for engine, home in homes:
            engine.wait_for_free_blocks(home, timeout=15)


def test_the_cache_of_guessing_layers_is_fetched(
    case: Case, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    with sites(case, tmp_path, models=model_folder, forge=forge) as site:
        layers = [layer for group in site.pair.decode.inspect().groups for layer in group.layers]
        assert (len(layers) > case.model.config["num_hidden_layers"]) == case.own_layers
        for reference in site.references:
            served = site.serve(reference)
            if case.tp[1] == 1 and case.model.exact:
                assert served.decode.guesses == reference.alone.guesses
                assert served.decode.guesses


def test_only_decode_guesses(tmp_path: Path, model_folder: Path, forge: EngineForge) -> None:
    """The prompt's part of the head's cache is missing, so it guesses otherwise; every answer is right."""
    case = Case("decode-only", eagle, blocks=(64, 128))
    with sites(case, tmp_path, models=model_folder, forge=forge, guessing=(False, True)) as site:
        guesses = [(site.serve(reference).decode.guesses, reference.alone.guesses) for reference in site.references]
        assert all(ours for ours, _ in guesses)
        assert any(ours != theirs for ours, theirs in guesses)


def test_only_prefill_guesses(
    tmp_path: Path, model_folder: Path, forge: EngineForge, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    case = Case("prefill-only", draft_model)
    with sites(case, tmp_path, models=model_folder, forge=forge, guessing=(True, False)) as site:
        for reference in site.references:
            assert site.serve(reference).decode.guesses == []
