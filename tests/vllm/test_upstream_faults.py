"""Real engines of both connectors in one deployment: when something is wrong, and every pairing under load."""

import random
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.ids import TransferId
from kvferry.runtime.stories import ask_stories
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec, Generate
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Ticket
from kvferry.testing.transfer_report import read_reports
from kvferry.testing.upstream_pair import Fleet, Kind, Role, member

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

PROMPT = token_ids("a prompt whose cache will never come, since its prefill engine is gone; " * 4)


def spec_of(
    model: Path, role: Role, kind: Kind, *, options: Mapping[str, Any] | None = None, **transfer: Any
) -> EngineSpec:
    """``options`` of the connector; ``transfer``: other fields of vLLM's configuration of it."""
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
        **(options or {}),
    )
    return msgspec.structs.replace(made, kv_transfer={**(made.kv_transfer or {}), **transfer})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_prefill_engine_of_upstreams_is_noticed_within_ten_seconds(
    how: signal.Signals, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    model = build_model(QWEN3, model_folder)
    with tempfile.TemporaryDirectory(prefix="kvferry-") as debug, ExitStack() as stack:
        specs = [
            spec_of(model, "prefill", "upstream"),
            spec_of(model, "decode", "ferry", options={"debug_socket_dir": debug}, kv_load_failure_policy="fail"),
        ]
        prefill, decode = stack.enter_context(start_engines(specs, logs=tmp_path, forge=forge))
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
        while not asked_for("never-computed", debug) or decode.inspect().free_blocks == free:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        prefill.kill(how)
        gone = time.monotonic()
        answer = waiting.result(10)
        assert time.monotonic() - gone < 10
        assert answer.finish_reason == "error"  # type: ignore[union-attr]
        decode.wait_for_free_blocks(free, timeout=15)
        assert decode.generate(PROMPT, max_tokens=6, request_id="alone").tokens == want
        prefill.kill()


def asked_for(transfer: str, debug: str) -> bool:
    """Whether the decode engine has sent its pull."""
    told = ask_stories(debug, TransferId(transfer))
    return any(action.startswith("SendPull") for one in told for event in one.events for action in event.actions)


def test_every_pairing_of_one_deployment_answers_right_under_load(
    tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    model = build_model(QWEN3, model_folder)
    kinds: tuple[Kind, ...] = ("upstream", "ferry")
    roles: tuple[Role, ...] = ("prefill", "decode")
    report = tmp_path / "transfers.jsonl"
    specs = [spec_of(model, role, kind, options={"transfer_report": str(report)}) for kind in kinds for role in roles]
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
        steps: list[tuple[Kind, Kind]] = [
            ("upstream", "upstream"),
            ("ferry", "upstream"),
            ("upstream", "ferry"),
            ("ferry", "ferry"),
        ]
        under_way: list[UnderWay] = []
        for step, (first, second) in enumerate(steps):
            pair = fleet.pair(f"{first}-prefill", f"{second}-decode")
            for number, prompt in enumerate(prompts):
                ticket = pair.submit(prompt, max_tokens=6, name=f"step{step}-{number}")
                under_way.append(UnderWay(ticket, (first, second), want[number]))
                if len(under_way) > 10:
                    under_way.pop(0).settle(report)
        while under_way:
            under_way.pop(0).settle(report)
        for engine in engines:
            engine.wait_for_free_blocks(free[engine.spec.name], timeout=15)


@dataclass(frozen=True)
class UnderWay:
    """A request, the connectors that it goes through, and its right answer."""

    ticket: Ticket
    way: tuple[Kind, Kind]
    want: list[int]

    def settle(self, report: Path) -> None:
        """Wait for it; its pages were reported before it was answered."""
        assert self.ticket.result().decode.tokens == self.want, self.way
        if self.way == ("upstream", "upstream"):
            return  # none of them tells what it sends
        found = read_reports([report])[self.ticket.transfer_id]
        assert self.way[0] == "upstream" or found.landing_problems() == (), self.way
        assert found.landed, self.way
