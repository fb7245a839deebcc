"""Integrity and retries in real engines: right answers whatever the producer wrote, or an error; never a wrong one."""

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.runtime.report import Line
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec, Generation
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import pair_spec, query_engine_id

pytestmark = pytest.mark.vllm

PROMPT = token_ids("pages that are compared with the producer's before a token comes of them; " * 5)
TOKENS = 6
VERIFIED = re.compile(r"transfer (\S+): done as consumer: .* verified (\d+) pages \((\d+) bytes\)")


@dataclass
class Site:
    """Two prefill engines, the first of which spoils its first writes, and one decode engine."""

    prefills: list[Engine]
    bootstraps: list[str]
    decode: Engine

    def prefill(self, which: int) -> dict[str, str]:
        """Compute the prompt there; how a decode request names it."""
        transfer = f"xfer-{secrets.token_hex(8)}"
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        self.prefills[which].generate(PROMPT, max_tokens=1, request_id=f"p-{transfer}", kv_transfer_params=params)
        bootstrap = self.bootstraps[which]
        return {
            "transfer_id": transfer,
            "remote_engine_id": query_engine_id(bootstrap),
            "remote_bootstrap_addr": bootstrap,
        }

    def answer(self, first: dict[str, str], *others: dict[str, str]) -> Generation:
        """What decode makes of it."""
        params: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False, **first}
        params["remote_alternatives"] = list(others)
        name = f"d-{first['transfer_id']}"
        return self.decode.generate(PROMPT, max_tokens=TOKENS, request_id=name, kv_transfer_params=params)

    def settle(self, free: list[int]) -> None:
        """All blocks are back."""
        for engine, count in zip([*self.prefills, self.decode], free, strict=True):
            engine.wait_for_free_blocks(count, timeout=20)

    @property
    def free(self) -> list[int]:
        """Free blocks of all engines."""
        return [engine.inspect().free_blocks for engine in [*self.prefills, self.decode]]


def specs_of(model: Path, folder: Path, policy: str, wrong: int) -> tuple[list[EngineSpec], list[str]]:
    def spec(name: str) -> EngineSpec:
        return EngineSpec(
            name=name, model=str(model), dtype=QWEN3.dtype, block_size=32, num_blocks=64, max_model_len=1024,
            prefix_caching=name == "decode", bad_writes=wrong if name == "first" else 0,
        )  # fmt: skip

    report = str(folder / "report.jsonl")
    options = {"transport": "cma", "verify": "full", "retries": 1, "transfer_report": report}
    pairs = [pair_spec(spec(name), spec("decode"), options=options) for name in ("first", "second")]
    decode = pairs[0].decode
    decode = msgspec.structs.replace(
        decode, kv_transfer={**(decode.kv_transfer or {}), "kv_load_failure_policy": policy}
    )
    return [pairs[0].prefill, pairs[1].prefill, decode], [pair.bootstrap for pair in pairs]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_no_answer_is_wrong_and_verified_pages_are_counted(
    policy: str, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    specs, bootstraps = specs_of(build_model(QWEN3, model_folder), tmp_path, policy, wrong=2)
    with start_engines(specs, logs=tmp_path, forge=forge) as (first, second, decode):
        site = Site([first, second], bootstraps, decode)
        free = site.free
        want = second.generate(PROMPT, max_tokens=TOKENS, request_id="alone").tokens

        spoilt = site.answer(site.prefill(0))
        assert spoilt.finish_reason == ("error" if policy == "fail" else "length")
        assert spoilt.tokens == ([] if policy == "fail" else want)
        decode.reset_prefix_cache()

        elsewhere = site.answer(site.prefill(0), site.prefill(1))
        assert (elsewhere.finish_reason, elsewhere.tokens) == ("length", want)
        site.settle(free)
        assert decode.reset_prefix_cache()

        unneeded = site.prefill(1)
        right = site.answer(site.prefill(0), unneeded)
        assert (right.finish_reason, right.tokens) == ("length", want)
        site.settle(free)
        log = decode.log.read_text()
    lines = [msgspec.json.decode(line, type=Line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    reported = {line.transfer_id: line for line in lines if line.side == "consumer" and line.digest}
    verified = {transfer: (int(pages), int(nbytes)) for transfer, pages, nbytes in VERIFIED.findall(log)}
    assert len(verified) == 2
    assert {transfer: pages for transfer, (pages, _) in verified.items()} == {
        transfer: line.pages for transfer, line in reported.items()
    }
    sizes = QWEN3.config
    of_a_token = sizes["num_hidden_layers"] * 2 * sizes["num_key_value_heads"] * sizes["head_dim"] * 4
    assert {nbytes for _, nbytes in verified.values()} == {len(PROMPT) * of_a_token}
    assert log.count("what producer rank 0 wrote is wrong: layer ") == 2
    assert log.count("failed; its request is tried again as ") == 1
