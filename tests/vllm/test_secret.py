"""Real engines with a shared secret: the option reaches every rank, the cache moves, and no log shows it."""

from pathlib import Path

import httpx
import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

SECRET = "5b3f0d6a9c1e47b28d5502f0a7e6c4d1"
PROMPT = token_ids("the same secret on both sides, and a strange engine in between; " * 4)


def test_engines_with_a_secret_serve_each_other_and_no_one_else(
    tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    model = build_model(QWEN3, model_folder)
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(SECRET)
    prefill, decode, stranger = (
        EngineSpec(name=name, model=str(model), dtype=QWEN3.dtype, block_size=64, num_blocks=32, max_model_len=1024)
        for name in ("prefill", "decode", "stranger")
    )
    spec = pair_spec(prefill, decode, options={"transport": "mooncake", "secret_file": str(file)})
    outside = pair_spec(prefill, stranger, options={"transport": "mooncake"}).decode
    transfer = {**(outside.kv_transfer or {}), "kv_load_failure_policy": "fail"}
    outside = msgspec.structs.replace(outside, kv_transfer=transfer)
    with start_engines([spec.prefill, spec.decode, outside], logs=tmp_path / "logs", forge=forge) as engines:
        pair = Pair(spec, engines[0], engines[1])
        listed = httpx.get(f"{spec.bootstrap}/query").json()
        (card,) = [entry["kvferry"] for entry in listed.values()]
        assert all(rank["secure"].startswith("tcp://") for rank in card["ranks"])
        want = engines[1].generate(PROMPT, max_tokens=6, request_id="alone").tokens
        served = pair.generate(PROMPT[::-1], max_tokens=6, name="moved").decode
        assert served.finish_reason == "length"
        assert engines[1].generate(PROMPT, max_tokens=6, request_id="again").tokens == want
        refused = Pair(spec, engines[0], engines[2]).generate(PROMPT, max_tokens=6, name="stranger").decode
        assert refused.finish_reason == "error"
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir() if path.is_file())
    assert "(CURVE)" in logs
    assert "set secret_file (or KVFERRY_SECRET) here too" in logs
    assert SECRET not in logs
