"""Real engines of two pipeline stages on one side and of one on the other: each stage sends or gets its own layers."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.comparison import Prompt, judge, take_references
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec, report_options
from kvferry.testing.transfer_report import wait_for_reports

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

TEXT = token_ids("Two carriages, one rail: the first half of the train crosses before the second does. " * 8)


@pytest.mark.parametrize(
    ("model", "stages"), [(QWEN3, (2, 1)), (LFM2, (1, 2))], ids=["dense-2-to-1", "state-and-attention-1-to-2"]
)
def test_unequal_pipelines(
    model: TinyModel, stages: tuple[int, int], tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    def spec_of(name: str, stages: int) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=str(build_model(model, model_folder)),
            dtype=model.dtype,
            custom_ops=model.custom_ops,
            block_size=128,
            num_blocks=32,
            max_model_len=1024,
            engine_args={"pipeline_parallel_size": stages},
        )

    spec = pair_spec(
        *(spec_of(name, count) for name, count in zip(("prefill", "decode"), stages, strict=True)),
        options=report_options(tmp_path, transport="mooncake"),
    )
    specs = [spec.prefill, spec.decode, spec_of("single", 1)]
    with start_engines(specs, logs=tmp_path, forge=forge) as (prefill, decode, single):
        pair = Pair(spec, prefill, decode)
        homes = [(engine, engine.inspect().free_blocks) for engine in (prefill, decode)]
        prompts = [Prompt(f"prompt-{length}", tuple(TEXT[:length]), 8) for length in (7, 129, 500)]
        for reference in take_references(single, prompts):
            served = pair.generate(reference.prompt.tokens, max_tokens=8, name=reference.prompt.name)
            assert judge(reference, served.decode, single=single, exact=True).equal
            transfer = wait_for_reports([tmp_path / "transfers.jsonl"], [served.transfer_id], 15)[served.transfer_id]
            assert transfer.problems() == ()
            ranks = {(line.producer_rank, line.consumer_rank) for line in transfer.consumer}
            assert ranks == {(p, d) for p in range(stages[0]) for d in range(stages[1])}
        for engine, home in homes:
            engine.wait_for_free_blocks(home, timeout=15)
