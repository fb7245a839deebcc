"""Parameters and prompts as clients and routers may give them: whatever they are, the engine goes on."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from kvferry.protocol import MAX_NAME, PromptMark
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.vllm.metadata import Publish, Pull, Release
from kvferry.vllm.request import name_for_peers, prompt_digest
from vllm import SamplingParams

from . import engine_core as core
from .test_scheduler import SOURCE, for_decode, for_prefill, prompt

pytestmark = pytest.mark.vllm

LONG = "t" * (MAX_NAME + 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(QWEN3, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("params", ["a text", 7, 1.5, ["do_remote_prefill"]])
def test_parameters_that_are_no_table_do_not_end_the_engine(model: Path, role: str, params: Any) -> None:
    """``vllm_xargs`` of a client may hold them, and vLLM asks them for a key."""
    engine = core.make_core(model, role, core.full_attention())
    engine.add("r", prompt(40), params=params)
    step = engine.schedule()
    assert (step.orders, step.output.num_scheduled_tokens) == ((), {"r": 40})
    step.finish()
    assert not engine.scheduler.requests


@pytest.mark.parametrize("key", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
@pytest.mark.parametrize("value", [LONG, "", 7, None, ["t1"], {"t1": 1}, 1 << 63], ids=repr)
def test_names_that_no_message_can_hold_are_as_good_as_none(model: Path, key: str, value: Any) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    engine.add("d", prompt(40), params=for_decode() | {key: value})
    step = engine.schedule()
    assert (step.orders, step.output.num_scheduled_tokens) == ((), {"d": 40})


def test_a_transfer_that_no_message_can_name_is_not_published(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention())
    free = engine.free_blocks
    engine.add("p", prompt(40), params=for_prefill(LONG))
    assert engine.run() == ()
    assert engine.run() == ()
    assert engine.free_blocks == free


def test_a_name_without_end_is_shortened_for_peers_alone(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    engine.add(LONG, prompt(40), params=for_decode("t1"))
    (pull,) = engine.schedule().orders
    assert isinstance(pull, Pull)
    assert pull.request == LONG
    engine.add(f"{LONG}2", prompt(40), params=for_decode("t2"))
    engine.scheduler.finish_requests(f"{LONG}2", RequestStatus.FINISHED_ABORTED)
    assert engine.schedule().orders == (Release("t2", name_for_peers(f"{LONG}2"), SOURCE),)
    assert name_for_peers("short") == "short"
    assert len({name_for_peers(name) for name in (LONG, f"{LONG}2")}) == 2
    assert len(name_for_peers(LONG)) <= MAX_NAME


def test_adapters_are_told_apart_by_their_whole_names() -> None:
    names = [None, "a", "b", "a" * 64, "a" * 65, "a" * 66]
    digests = {prompt_digest(a_request(adapter=name), 3) for name in names}
    assert len(digests) == len(names)


def test_a_prompt_that_goes_on_stays_whole_where_the_last_token_is_left_to_the_decoder(model: Path) -> None:
    """Else what comes next would stand behind a prompt that lacks a token."""
    engine = core.make_core(model, "kv_producer", core.full_attention(), core.sliding_window(32))
    session = a_request(prompt(49), params=for_prefill(), resumable=True, hasher=engine.hasher)
    engine.scheduler.add_request(session)
    engine.run()
    more = a_request(prompt(15, first=90), params=None, resumable=True, hasher=engine.hasher)
    engine.scheduler.add_request(more)
    engine.run()
    assert list(session.prompt_token_ids) == prompt(49) + prompt(15, first=90)


def test_what_the_engine_notes_of_a_prompt_is_not_read_from_a_client(model: Path) -> None:
    """Whether the last token was left to the decoder; parameters may also be one table for several requests."""
    params = for_prefill() | {"kvferry_left_last": True}
    engine = core.make_core(model, "kv_producer", core.full_attention(), core.sliding_window(32))
    engine.add("p", prompt(49), params=params)
    assert engine.run() == ()
    (publish,) = engine.schedule().orders
    assert isinstance(publish, Publish)
    assert (publish.tokens, publish.prompt_tokens) == (48, 49)
    assert PromptMark(48, prompt_digest(a_request(prompt(49)), 48)) in publish.prompt
    engine.add("one", prompt(1), params={**params, "transfer_id": "t2"})
    engine.run()
    (publish,) = engine.schedule().orders
    assert (publish.tokens, publish.prompt_tokens) == (1, 1)


def a_request(
    tokens: list[int] | None = None,
    *,
    params: Any = None,
    adapter: str | None = None,
    resumable: bool = False,
    hasher: Any = None,
) -> Request:
    extra = {"kv_transfer_params": params} if params is not None else None
    sampling = SamplingParams(max_tokens=1, extra_args=extra)
    sampling.update_from_generation_config({}, core.EOS)
    return Request(
        request_id="session",
        prompt_token_ids=tokens or [1, 2, 3],
        sampling_params=sampling,
        pooling_params=None,
        lora_request=LoRARequest(adapter, 1, "nowhere") if adapter is not None else None,
        block_hasher=hasher,
        resumable=resumable,
    )
