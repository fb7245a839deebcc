"""Real engines, and requests that are aborted at every stage of their life: no block is lost on either side.

A prompt that is being computed, a cache that waits to be fetched, a decode request that waits for its cache, one whose
cache is on its way, one that has begun to answer; and a storm of all of these at once.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec, Generate, Generation
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec

from .long_writes import PROMPT, TOKENS, Slow, slow_pair, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

SHORT = PROMPT[:300]


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


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, forge: EngineForge) -> Iterator[Slow]:
    with slow_pair(tmp_path_factory.mktemp("aborts"), models=model_folder, forge=forge) as one:
        yield one


def serves(slow: Slow, name: str) -> None:
    """All blocks are home, and the pair goes on as if nothing had been."""
    slow.settle()
    alone = slow.pair.decode.generate(SHORT, max_tokens=TOKENS, request_id=f"{name}-alone")
    after = slow.pair.generate(SHORT, max_tokens=TOKENS, name=f"{name}-after").decode
    assert (after.tokens, after.cached_tokens) == (alone.tokens, len(SHORT))
    slow.settle()


def test_a_prompt_aborted_while_it_is_computed(slow: Slow) -> None:
    """Its decode request is told at once, and not after a time-out."""
    ticket = slow.pair.submit(PROMPT, max_tokens=TOKENS, name="computing")
    prefill, home = slow.pair.prefill, slow.homes[0]

    def computing() -> bool:
        facts = prefill.inspect()
        return facts.running == 1 and 0 < home - facts.free_blocks < len(PROMPT) // 128

    wait_until(computing, seconds=20)  # the first chunks are done, the last one is not: its blocks are not taken yet
    assert prefill.abort("computing-p")
    aborted = time.monotonic()
    ends = [cast(Generation, future.result(10)).finish_reason for future in (ticket.prefill, ticket.decode)]
    assert ends == ["abort", "error"]
    assert time.monotonic() - aborted < 3
    serves(slow, "computing")


def test_a_prefill_request_aborted_when_its_cache_waits(slow: Slow) -> None:
    """It is too late: the cache is there, is kept, and is fetched."""
    prefill, decode = slow.engines
    prefill.ask(slow.pair.prefill_command(SHORT, "waits", "waits"))
    held = prefill.inspect().free_blocks
    assert held < slow.homes[0]
    assert not prefill.abort("waits-p")
    assert prefill.inspect().free_blocks == held
    fetched = cast(Generation, decode.ask(slow.pair.decode_command(SHORT, "waits", "waits", max_tokens=TOKENS)))
    assert fetched.cached_tokens == len(SHORT)
    assert fetched.tokens == decode.generate(SHORT, max_tokens=TOKENS, request_id="waits-alone").tokens
    serves(slow, "waits")


def test_a_decode_request_aborted_while_bytes_move(slow: Slow) -> None:
    """The write is stopped, and neither its source nor its destination goes back before it has."""
    ticket = slow.pair.submit(PROMPT, max_tokens=TOKENS, name="moving")
    slow.wait_until_writing(ticket.transfer_id)
    assert slow.pair.decode.abort("moving-d")
    assert cast(Generation, ticket.decode.result(5)).finish_reason == "abort"
    serves(slow, "moving")
    (producer,) = slow.stories(ticket.transfer_id, "producer")
    events = [event.event for event in producer.events]
    stopped = next(event for event in producer.events if "CancelWrite" in event.actions)
    assert "WriteDone" not in events[: producer.events.index(stopped)], "the abort came while bytes moved"
    assert producer.events[-1].state == ""
    (consumer,) = slow.stories(ticket.transfer_id, "consumer")
    assert any("ended aborted" in action for event in consumer.events for action in event.actions)
    assert "DestinationReleased" in consumer.events[-1].actions


def test_one_who_leaves_while_bytes_move_costs_another_nothing(slow: Slow) -> None:
    """Although both come by the same engine, and so many blocks are waiting to be quiet."""
    leaves = slow.pair.submit(PROMPT, max_tokens=TOKENS, name="leaves")
    slow.wait_until_writing(leaves.transfer_id)
    stays = slow.pair.submit(SHORT, max_tokens=TOKENS, name="stays")
    slow.wait_until_pulling(stays.transfer_id)
    assert slow.pair.decode.abort("leaves-d")
    served = stays.result(30).decode
    alone = slow.pair.decode.generate(SHORT, max_tokens=TOKENS, request_id="stays-alone")
    assert (served.finish_reason, served.tokens, served.cached_tokens) == ("length", alone.tokens, len(SHORT))
    (producer,) = slow.stories(leaves.transfer_id, "producer")
    assert not any(event.event == "WriteDone" for event in producer.events), "the abort came while bytes moved"
    slow.settle()


def test_a_decode_request_aborted_after_its_first_token(slow: Slow) -> None:
    transfer = "first-token"
    slow.pair.prefill.ask(slow.pair.prefill_command(SHORT, transfer, transfer))
    command = slow.pair.decode_command(SHORT, transfer, transfer, max_tokens=200)
    goes = Generate(
        prompt=command.prompt, max_tokens=200, request_id=command.request_id,
        kv_transfer_params=command.kv_transfer_params, abort_after=1,
    )  # fmt: skip
    answer = cast(Generation, slow.pair.decode.ask(goes))
    alone = slow.pair.decode.generate(SHORT, max_tokens=1, request_id="first-token-alone")
    assert (answer.finish_reason, answer.tokens) == ("abort", alone.tokens)
    serves(slow, transfer)
