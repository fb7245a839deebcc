"""Real engines that are told to end while bytes move: they are gone in time, and the other side gets over it."""

import time
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import Done, Generation, Shutdown
from kvferry.testing.engines import Engine

from .long_writes import PROMPT, TOKENS, Slow, slow_pair

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

LIMIT_S = 5.0
CORE = [("prefill", 1), ("decode", 1), ("prefill", 2)]
CASES = [*CORE, ("decode", 2)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = CASES if metafunc.config.getoption("--cells") == "all" else CORE
    metafunc.parametrize(("side", "tp"), chosen, ids=[f"{side}-tp{tp}" for side, tp in chosen])


def end_in_time(engine: Engine) -> None:
    """Shut it down; nothing of the connector is left, and vLLM had to kill no worker."""
    began = time.monotonic()
    ended = cast(Done, engine.ask(Shutdown(), timeout=20))
    took = time.monotonic() - began
    assert ended.value, f"{engine.spec.name}: a thread of the connector, or a worker, is left"
    assert took < LIMIT_S, f"{engine.spec.name} took {took:.1f} s"
    assert "sending SIGTERM" not in engine.log.read_text()


def doors(slow: Slow) -> int:
    """How many runtimes have a debug socket: each takes its own away at the end of an orderly close."""
    return len([*Path(slow.debug).iterdir()])


def test_an_engine_ends_in_time_while_bytes_move(
    side: str, tp: int, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    with slow_pair(tmp_path, models=model_folder, forge=forge, tp=tp) as slow:
        prefill, decode = slow.engines
        ticket = slow.pair.submit(PROMPT, max_tokens=TOKENS, name="moving")
        slow.wait_until_writing(ticket.transfer_id)
        assert doors(slow) == 2 * tp
        if side == "prefill":
            end_in_time(prefill)
            assert cast(Generation, ticket.decode.result(10)).finish_reason == "error", "the cache had come already"
        else:
            end_in_time(decode)
            told = slow.stories(ticket.transfer_id, "producer")
            assert len(told) == tp
            assert not any("WriteDone" in event.event for one in told for event in one.events), "it had come already"
        assert doors(slow) == tp
        left, home = (decode, slow.homes[1]) if side == "prefill" else (prefill, slow.homes[0])
        facts = left.wait_for_free_blocks(home, timeout=15)
        assert (facts.free_blocks, facts.held) == (home, 0)
        assert left.generate(PROMPT[:200], max_tokens=2, request_id="alone").finish_reason == "length"
        end_in_time(left)
        assert doors(slow) == 0
