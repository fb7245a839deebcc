"""Modes of an engine that a connector must live with, on vLLM's own scheduler: who loads nothing, and who is told."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import BlockStored
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from kvferry.errors import ConfigError
from kvferry.protocol import Span
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.vllm.config import parse_config
from kvferry.vllm.connector import FerryConnector
from kvferry.vllm.endpoint import read_options
from kvferry.vllm.metadata import Expect, Publish, Pull, Release

from . import engine_core as core
from .test_scheduler import SOURCE, for_decode, for_prefill, prompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(QWEN3, tmp_path_factory.mktemp("models"))


def run_until(engine: core.Core, name: str, *, steps: int = 80) -> list[Any]:
    """Steps until the request is gone; all orders given meanwhile."""
    orders: list[Any] = []
    for _ in range(steps):
        if name not in engine.scheduler.requests:
            return orders
        orders += engine.run()
    pytest.fail(f"{name} did not end in {steps} steps")


# ------------------------------------------------------------------------------------------------ chunked prefill


def test_a_prompt_computed_in_chunks_is_published_once_when_it_is_whole(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention(), max_num_batched_tokens=64, max_num_seqs=4)
    engine.add("p", prompt(150), params=for_prefill())
    steps = []
    while engine.scheduler.requests:
        step = engine.schedule()
        steps.append((step.output.num_scheduled_tokens.get("p"), step.orders))
        step.finish()
    (publish,) = engine.schedule().orders
    assert isinstance(publish, Publish)
    assert publish.tokens == 150
    assert [tokens for tokens, _ in steps] == [64, 64, 22]
    assert [orders for _, orders in steps] == [(), (Expect("t1"),), ()]


# ----------------------------------------------------------------------------------------------------- preemption


def test_a_preempted_prefill_is_computed_again_and_published_once(model: Path) -> None:
    specs = core.full_attention(), core.sliding_window(64)
    engine = core.make_core(model, "kv_producer", *specs, caching=False, max_num_batched_tokens=32, max_num_seqs=4)
    request = engine.add("p", prompt(49), params=for_prefill(), max_tokens=1)
    assert engine.run() == ()
    assert request.num_computed_tokens == 32
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    orders = run_until(engine, "p")
    expect, publish = [*orders, *engine.schedule().orders]
    assert expect == Expect("t1")
    assert isinstance(publish, Publish)
    assert request.num_preemptions == 1
    assert (publish.tokens, request.num_prompt_tokens) == (48, 48), "the last token is left once, not twice"


def test_a_preempted_decode_request_is_computed_here_and_pulls_no_second_time(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), blocks=8, caching=False)
    free = engine.free_blocks
    engine.add("local", prompt(40), params=None, max_tokens=60)
    engine.run()
    engine.add("d", prompt(40, first=90), params=for_decode(), max_tokens=20)
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    step.finish(received=["d"], quiet=[pull.ticket])
    request = engine.scheduler.requests["d"]
    orders = run_until(engine, "d", steps=200)
    assert request.num_preemptions > 0
    assert orders == []
    assert request.num_output_tokens == 20
    run_until(engine, "local", steps=200)
    assert engine.free_blocks == free


# ------------------------------------------------------------------------------------------ nothing can be loaded


@pytest.mark.parametrize("specs", [[core.full_attention()], [core.full_attention(), core.sliding_window(64)]])
@pytest.mark.parametrize("how", ["prompt logprobs", "prompt embeddings"])
def test_a_prompt_whose_cache_does_not_say_enough_is_computed_here(model: Path, how: str, specs: list[Any]) -> None:
    """The log probabilities of a prompt come from computing it; embeddings have no ids to compare."""
    asked: dict[str, Any] = {"prompt_logprobs": 1} if how == "prompt logprobs" else {"embeds": torch.zeros(40, 128)}
    consumer = core.make_core(model, "kv_consumer", *specs, enable_prompt_embeds=True)
    consumer.add("d", prompt(40), params=for_decode(), **asked)
    step = consumer.schedule()
    assert step.orders == (Release("t1", "d", SOURCE),)
    assert step.output.num_scheduled_tokens == {"d": 40}
    producer = core.make_core(model, "kv_producer", *specs, enable_prompt_embeds=True)
    request = producer.add("p", prompt(40), params=for_prefill(), **asked)
    assert request.num_prompt_tokens == 40


def test_a_prompt_of_one_token_is_moved_where_its_cache_is_all_there_is(model: Path) -> None:
    producer = core.make_core(model, "kv_producer", core.full_attention())
    producer.add("p", prompt(1), params=for_prefill())
    producer.run()
    (publish,) = producer.schedule().orders
    assert isinstance(publish, Publish)
    assert publish.tokens == 1
    consumer = core.make_core(model, "kv_consumer", core.full_attention())
    consumer.add("d", prompt(1), params=for_decode(), max_tokens=1)
    step = consumer.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    assert pull.span == Span(0, 1)
    step.finish(received=["d"], quiet=[pull.ticket])
    step = consumer.schedule()
    assert step.output.num_scheduled_tokens == {"d": 1}
    (answer,) = step.finish()
    assert answer.finish_reason is not None
    assert not consumer.scheduler.requests


def test_a_first_token_that_ends_the_request_ends_it_on_both_sides(model: Path) -> None:
    consumer = core.make_core(model, "kv_consumer", core.full_attention())
    free = consumer.free_blocks
    consumer.add("d", prompt(40), params=for_decode(), max_tokens=9)
    step = consumer.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    step.finish(received=["d"], quiet=[pull.ticket])
    (answer,) = consumer.schedule().finish(token=core.EOS)
    assert answer.new_token_ids == [core.EOS]
    assert answer.finish_reason is not None
    assert not consumer.scheduler.requests
    assert consumer.run() == ()
    assert consumer.free_blocks == free


# --------------------------------------------------------------------------------------------------- KV events


def test_blocks_that_came_are_told_as_stored_when_they_are_there(model: Path) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = core.make_core(model, "kv_consumer", core.full_attention(), kv_events_config=events)
    tokens = prompt(40)
    engine.add("d", tokens, params=for_decode(), max_tokens=3)
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    step.finish()
    manager = engine.scheduler.kv_cache_manager
    assert manager.take_events() == [], "nothing is there yet"
    engine.schedule().finish(received=["d"], quiet=[pull.ticket])
    engine.scheduler.schedule()
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == tokens[:32]


# --------------------------------------------------------------------------------------------------- sleep mode


def test_sleep_mode_is_refused_by_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the connector, when vLLM builds it; from 0.33 on by vLLM, which asks the connector's class before that.

    No CPU can sleep, and vLLM says so before it comes to connectors: so here its platform says that it can.
    """
    assert (
        FerryConnector.supports_sleep_mode(KVTransferConfig(kv_connector="FerryConnector", kv_role="kv_both")) is False
    )
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: True)
    with pytest.raises((ConfigError, ValueError), match="sleep mode unmaps|does not support sleep mode"):
        core.make_core(model, "kv_both", core.full_attention(), enable_sleep_mode=True)
    awake = core.make_core(model, "kv_both", core.full_attention()).scheduler.connector
    assert isinstance(awake, FerryConnector)
    with pytest.raises(ConfigError, match="sleep mode unmaps"):
        awake.unregister_kv_caches()  # how 0.33 puts to sleep an engine that was not started for it


# ------------------------------------------------------------------------------------------- data parallel ranks


@pytest.mark.parametrize("rank", [0, 2])
def test_a_data_parallel_rank_registers_under_its_number(model: Path, rank: int) -> None:
    """The engine id is another for each rank too: vLLM adds the number to it before it builds the connector."""
    vllm_config = EngineArgs(model=str(model), dtype="float32", enforce_eager=True).create_engine_config()
    vllm_config.parallel_config.data_parallel_index = rank
    vllm_config.parallel_config.data_parallel_rank_local = rank
    chosen = {"bootstrap_port": 8998, "side_channel_port": 7000, "secure_port": 7100}
    vllm_config.parallel_config.world_size = 4
    options = read_options(vllm_config, parse_config(chosen), rank=0, host="127.0.0.1")
    assert options.dp_rank == rank
    assert (options.port, options.secure_port) == (7000 + 4 * rank, 7100 + 4 * rank), "ranks of one host"
    assert (options.bootstrap.serve is not None) == (rank == 0), "one bootstrap service for all ranks"
