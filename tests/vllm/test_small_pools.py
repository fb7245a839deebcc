"""Real engines with too few blocks: vLLM preempts requests on both sides, and nothing is lost or moved twice.

A preempted prefill is computed again from its start, in other blocks, before it is published. A preempted decode
request drops what it fetched and computes its prompt itself: by then the prefill engine has nothing of it any more.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.comparison import Prompt, judge, take_references
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import GEMMA3, LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec, report_options
from kvferry.testing.transfer_report import wait_for_reports

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

BLOCK = 32
BLOCKS = 26
"""Of each pool: three prompts fit, but not with their answers."""
PROMPTS = 6
LENGTH = 250
"""Of each prompt: eight blocks."""
TOKENS = 50
"""Of each answer: two more blocks."""


def small(name: str, model: TinyModel, folder: Path, **engine: Any) -> EngineSpec:
    return EngineSpec(
        name=name,
        model=str(folder),
        dtype=model.dtype,
        custom_ops=model.custom_ops,
        block_size=BLOCK,
        num_blocks=BLOCKS + 3 * model.has_state,  # a state takes a block
        max_model_len=384,
        max_batched_tokens=512,
        engine_args={"disable_log_stats": False, **engine},
    )


@pytest.fixture(params=[QWEN3, LFM2, GEMMA3], ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> TinyModel:
    tiny: TinyModel = request.param
    return tiny


def test_requests_that_are_preempted_on_both_sides_are_answered_right(
    model: TinyModel, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    folder = build_model(model, model_folder)
    specs = [
        # Prompts are computed a little at a time, many side by side: so they grow until there is no room.
        small("prefill", model, folder, long_prefill_token_threshold=32),
        small("decode", model, folder),
    ]
    spec = pair_spec(*specs, options=report_options(tmp_path, transport="mooncake"))
    with start_engines([spec.prefill, spec.decode], logs=tmp_path, forge=forge) as (prefill, decode):
        pair = Pair(spec, prefill, decode)
        homes = [engine.inspect().free_blocks for engine in (prefill, decode)]
        prompts = [
            Prompt(
                f"p{number}",
                tuple(token_ids(f"{number} passengers too many for so small a boat, " * 8)[:LENGTH]),
                TOKENS,
            )
            for number in range(PROMPTS)
        ]
        references = take_references(decode, prompts)
        before = [engine.count("vllm:num_preemptions") for engine in (prefill, decode)]
        tickets = [pair.submit(p.tokens, max_tokens=p.max_tokens, name=p.name) for p in prompts]
        served = [ticket.result() for ticket in tickets]
        after = [engine.count("vllm:num_preemptions") for engine in (prefill, decode)]
        assert all(now > then for now, then in zip(after, before, strict=True)), f"preempted: {before}, {after}"
        for engine, home in zip((prefill, decode), homes, strict=True):
            engine.wait_for_free_blocks(home, 15)
        transfers = wait_for_reports([tmp_path / "transfers.jsonl"], [one.transfer_id for one in served], 15)
        for reference, one in zip(references, served, strict=True):
            verdict = judge(reference, one.decode, single=decode, exact=model.exact)
            assert verdict.equal, f"{reference.prompt.name}: {verdict.how}: {verdict.detail}"
            transfer = transfers[one.transfer_id]
            assert transfer.problems() == ()
            assert len(transfer.consumer) == 1, "fetched once, whatever happened afterwards"
