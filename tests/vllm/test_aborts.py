"""Real engines, decode requests that are aborted while they wait: no block is lost on either side."""

import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec

pytestmark = [pytest.mark.vllm]


def test_aborted_decodes_give_their_blocks_back_on_both_sides(
    tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    model = build_model(QWEN3, model_folder)
    specs = [
        EngineSpec(name=name, model=str(model), dtype=QWEN3.dtype, block_size=64, num_blocks=64, max_model_len=1024)
        for name in ("prefill", "decode")
    ]
    spec = pair_spec(*specs, options={"transport": "cma"})
    with start_engines([spec.prefill, spec.decode], logs=tmp_path, forge=forge) as (prefill, decode):
        pair = Pair(spec, prefill, decode)
        free = prefill.inspect().free_blocks, decode.inspect().free_blocks
        prompts = [token_ids(f"{index} prompts, some of which nobody waits for any more " * 5) for index in range(6)]
        waiting = [
            decode.submit(pair.decode_command(prompt, f"t{index}", f"r{index}", max_tokens=4))
            for index, prompt in enumerate(prompts)
        ]
        deadline = time.monotonic() + 10
        while decode.inspect().waiting < len(prompts):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for index in range(0, 6, 2):
            assert decode.abort(f"r{index}-d")
        for index, prompt in enumerate(prompts):
            prefill.ask(pair.prefill_command(prompt, f"t{index}", f"r{index}"))
        answers = [one.result(20) for one in waiting]
        assert [answer.finish_reason for answer in answers] == ["abort", "length"] * 3
        prefill.wait_for_free_blocks(free[0], timeout=15)
        decode.wait_for_free_blocks(free[1], timeout=15)
        for index in (1, 3):
            alone = decode.generate(prompts[index], max_tokens=4, request_id=f"alone{index}")
            assert alone.tokens == answers[index].tokens
