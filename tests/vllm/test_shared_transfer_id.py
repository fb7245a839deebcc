"""One transfer id for several requests, as some routers send a list of prompts: the first request fetches, no other."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvferry.protocol import PromptMark
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.vllm.metadata import Publish, Pull, Release

from . import engine_core as core
from .test_scheduler import SOURCE, for_decode, for_prefill, prompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(QWEN3, tmp_path_factory.mktemp("models"))


def test_the_second_request_computes_its_prompt_here(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    engine.add("d1", prompt(40), params=for_decode())
    engine.add("d2", prompt(40, first=90), params=for_decode())
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    assert pull.request == "d1"
    assert step.output.num_scheduled_tokens == {"d2": 40}


def test_a_request_that_is_none_of_the_transfers_releases_nothing(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    engine.add("d1", prompt(40), params=for_decode())
    engine.run()
    engine.add("d2", prompt(40, first=90), params=for_decode())
    engine.scheduler.finish_requests("d2", RequestStatus.FINISHED_ABORTED)
    assert engine.run() == ()


def test_a_transfer_that_was_released_is_not_pulled(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), core.sliding_window(64))
    engine.add("first", prompt(33), params=None)
    engine.run()
    engine.add("d1", prompt(33), params=for_decode())
    engine.add("d2", prompt(33, first=90), params=for_decode())
    step = engine.schedule()
    assert step.orders == (Release("t1", "d1", SOURCE),)
    assert step.output.num_scheduled_tokens == {"d1": 1, "d2": 33}


def test_both_sides_say_alike_what_a_prompt_is(model: Path) -> None:
    producer = core.make_core(model, "kv_producer", core.full_attention())
    producer.add("p", prompt(40), params=for_prefill())
    producer.run()
    (publish,) = producer.schedule().orders
    assert isinstance(publish, Publish)
    digests = {}
    for tokens in ([*prompt(40)], prompt(39), [*prompt(39), 7], prompt(40, first=11)):
        consumer = core.make_core(model, "kv_consumer", core.full_attention())
        consumer.add("d", tokens, params=for_decode())
        (pull,) = consumer.schedule().orders
        assert isinstance(pull, Pull)
        digests[tuple(tokens)] = PromptMark(pull.span.stop, pull.prompt) in publish.prompt
    assert list(digests.values()) == [True, True, False, False]
