"""Real engines whose prefill side is killed or stopped while a decode request waits for it.

The client is told (or its prompt recomputed, and the answer is right) within 10 s, the blocks are back within 15 s, and
the decode engine goes on serving. Of one cache group, and of several: attention beside a state, or a window.
"""

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import GEMMA3, LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, PairSpec, pair_spec

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

PROMPT = token_ids("a prompt whose cache will never come, since its prefill engine is gone; " * 4)
CORE = [
    ("fail", signal.SIGKILL, QWEN3),
    ("recompute", signal.SIGSTOP, QWEN3),
    ("fail", signal.SIGKILL, LFM2),
    ("recompute", signal.SIGKILL, GEMMA3),
    ("recompute", signal.SIGKILL, LFM2),
]
CASES = [*CORE, ("fail", signal.SIGSTOP, GEMMA3)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = CASES if metafunc.config.getoption("--cells") == "all" else CORE
    ids = [f"{policy}-{how.name}-{model.name}" for policy, how, model in chosen]
    metafunc.parametrize(("policy", "how", "model"), chosen, ids=ids)


def with_policy(spec: PairSpec, policy: str) -> PairSpec:
    transfer: dict[str, Any] = {**(spec.decode.kv_transfer or {}), "kv_load_failure_policy": policy}
    return replace(spec, decode=msgspec.structs.replace(spec.decode, kv_transfer=transfer))


def spec_of(name: str, model: TinyModel, folder: Path) -> EngineSpec:
    return EngineSpec(
        name=name, model=str(build_model(model, folder)), dtype=model.dtype, custom_ops=model.custom_ops,
        block_size=64, num_blocks=64, max_model_len=1024,
    )  # fmt: skip


def test_the_decode_side_survives(
    policy: str, how: signal.Signals, model: TinyModel, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    specs = [spec_of(name, model, model_folder) for name in ("prefill", "decode")]
    spec = with_policy(pair_spec(*specs, options={"transport": "mooncake"}), policy)
    with start_engines([spec.prefill, spec.decode], logs=tmp_path, forge=forge) as (prefill, decode):
        pair = Pair(spec, prefill, decode)
        facts = decode.inspect()
        assert (len(facts.groups) > 1) == (model is not QWEN3)
        free = facts.free_blocks
        want = pair.generate(PROMPT, max_tokens=6, name="before").decode.tokens
        waiting = decode.submit(pair.decode_command(PROMPT[1:], "never-published", "waits", max_tokens=6))
        deadline = time.monotonic() + 10
        while decode.inspect().free_blocks == free:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        prefill.kill(how)
        gone = time.monotonic()
        answer = waiting.result(10)
        assert time.monotonic() - gone < 10
        assert answer.finish_reason == ("error" if policy == "fail" else "length")
        decode.wait_for_free_blocks(free, timeout=15 - (time.monotonic() - gone))
        alone = decode.generate(PROMPT, max_tokens=6, request_id="alone")
        assert alone.tokens == want
        computed = decode.generate(PROMPT[1:], max_tokens=6, request_id="computed").tokens
        assert answer.tokens == (computed if policy == "recompute" else [])
        prefill.kill()
