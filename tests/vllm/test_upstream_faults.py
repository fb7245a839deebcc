"""Real engines of both connectors in one deployment: when something is wrong, and every pairing under load."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec, Generate
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Ticket
from kvferry.testing.upstream_pair import Fleet, Kind, Role, member

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

PROMPT = token_ids("a prompt whose cache will never come, since its prefill engine is gone; " * 4)


def spec_of(model: Path, role: Role, kind: Kind, **transfer: Any) -> EngineSpec:
    made = member(
        EngineSpec(
            name=f"{kind}-{role}",
            model=str(model),
            dtype=QWEN3.dtype,
            block_size=64,
            num_blocks=96,
            max_model_len=1024,
        ),
        role,
        kind,
    )
    return msgspec.structs.replace(made, kv_transfer={**(made.kv_transfer or {}), **transfer})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_prefill_engine_of_upstreams_is_noticed_within_ten_seconds(
    how: signal.Signals, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    model = build_model(QWEN3, model_folder)
    specs = [
        spec_of(model, "prefill", "upstream"),
        spec_of(model, "decode", "ferry", kv_load_failure_policy="fail"),
    ]
    with start_engines(specs, logs=tmp_path, forge=forge) as (prefill, decode):
        pair = Fleet.of([prefill, decode]).pair("upstream-prefill", "ferry-decode")
        free = decode.inspect().free_blocks
        want = pair.generate(PROMPT, max_tokens=6, name="before").decode.tokens
        without_id = {"do_remote_prefill": True, "remote_engine_id": pair.prefill_engine_id}
        answered = decode.ask(
            Generate(prompt=PROMPT, max_tokens=6, request_id="no-transfer-id", kv_transfer_params=without_id)
        )
        assert answered.tokens == want  # type: ignore[union-attr]
        waiting = decode.submit(pair.decode_command(PROMPT[1:], "never-computed", "waits", max_tokens=6))
        deadline = time.monotonic() + 10
        while decode.inspect().free_blocks == free:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        prefill.kill(how)
        gone = time.monotonic()
        answer = waiting.result(10)
        assert time.monotonic() - gone < 10
        assert answer.finish_reason == "error"  # type: ignore[union-attr]
        decode.wait_for_free_blocks(free, timeout=15)
        assert decode.generate(PROMPT, max_tokens=6, request_id="alone").tokens == want
        prefill.kill()


def test_every_pairing_of_one_deployment_answers_right_under_load(
    tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    model = build_model(QWEN3, model_folder)
    kinds: tuple[Kind, ...] = ("upstream", "ferry")
    roles: tuple[Role, ...] = ("prefill", "decode")
    specs = [spec_of(model, role, kind) for kind in kinds for role in roles]
    with start_engines(specs, logs=tmp_path, forge=forge) as engines:
        fleet = Fleet.of(engines)
        free = {engine.spec.name: engine.inspect().free_blocks for engine in engines}
        source = random.Random(7)
        prompts = [
            token_ids(f"{number} requests are under way while engines are replaced; " * 20)[: source.randint(2, 600)]
            for number in range(12)
        ]
        alone = fleet.engines["ferry-decode"]
        want = [
            alone.generate(prompt, max_tokens=6, request_id=f"alone{number}").tokens
            for number, prompt in enumerate(prompts)
        ]
        steps = [("upstream", "upstream"), ("ferry", "upstream"), ("upstream", "ferry"), ("ferry", "ferry")]
        under_way: list[tuple[int, Ticket]] = []
        for step, (first, second) in enumerate(steps):
            pair = fleet.pair(f"{first}-prefill", f"{second}-decode")
            for number, prompt in enumerate(prompts):
                under_way.append((number, pair.submit(prompt, max_tokens=6, name=f"step{step}-{number}")))
                if len(under_way) > 10:
                    settle(under_way.pop(0), want)
        while under_way:
            settle(under_way.pop(0), want)
        for engine in engines:
            engine.wait_for_free_blocks(free[engine.spec.name], timeout=15)


def settle(request: tuple[int, Ticket], want: list[list[int]]) -> None:
    number, ticket = request
    assert ticket.result().decode.tokens == want[number]
