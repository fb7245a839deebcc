"""The scheduler half against vLLM's own scheduler: which orders it gives, and which blocks stay out of the pool."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import RequestStatus

from kvferry.protocol import Source, Span, Table
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.vllm.metadata import Cancel, Expect, Publish, Pull, Release, Withdraw

from . import engine_core as core

pytestmark = pytest.mark.vllm

SOURCE = Source(engine="engine-p", bootstrap="http://127.0.0.1:8998")
NULL = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(QWEN3, tmp_path_factory.mktemp("models"))


def for_prefill(transfer: str = "t1") -> dict[str, Any]:
    return {"do_remote_decode": True, "transfer_id": transfer}


def for_decode(transfer: str = "t1") -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": SOURCE.engine,
        "remote_bootstrap_addr": SOURCE.bootstrap,
    }


def prompt(tokens: int, first: int = 10) -> list[int]:
    return [first + index % 200 for index in range(tokens)]


# --------------------------------------------------------------------------------------------------- producer


@pytest.mark.parametrize(("token", "max_tokens"), [(7, 1), (core.EOS, 4)], ids=["length", "end-of-sequence"])
def test_a_computed_prompt_is_published_however_it_ends(model: Path, token: int, max_tokens: int) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention())
    free = engine.free_blocks
    engine.add("p", prompt(40), params=for_prefill(), max_tokens=max_tokens)
    assert engine.run(token=token) == ()  # one step computes it, so it is never expected
    step = engine.schedule()
    (publish,) = step.orders
    assert isinstance(publish, Publish)
    assert (publish.transfer, publish.request, publish.tokens) == ("t1", "p", 40)
    assert publish.tables[0].first_token == 0
    assert len(publish.tables[0].blocks) == 3
    assert not engine.scheduler.requests
    assert engine.free_blocks == free - 3
    assert engine.scheduler.has_requests()
    step.finish(quiet=[publish.ticket])
    assert engine.free_blocks == free
    assert not engine.scheduler.has_requests()


def test_held_blocks_are_not_handed_out(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention(), blocks=8, caching=False)
    engine.add("p1", prompt(40), params=for_prefill("t1"))
    engine.run()
    engine.add("p2", prompt(40, first=50), params=for_prefill("t2"))
    engine.run()
    engine.add("p3", prompt(40, first=90), params=for_prefill("t3"))
    first, second = engine.schedule().orders[0], engine.free_blocks
    assert isinstance(first, Publish)
    assert second == 1
    assert engine.scheduler.get_request_counts() == (0, 1)


def test_an_aborted_prompt_is_withdrawn_and_its_blocks_go(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention())
    free = engine.free_blocks
    engine.add("p", prompt(40), params=for_prefill(), max_tokens=9)
    assert [engine.run(), engine.run()] == [(), (Expect("t1"),)]
    engine.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    (withdraw,) = engine.schedule().orders
    assert withdraw == Withdraw("t1", "the prefill request ended as FINISHED_ABORTED")
    assert engine.free_blocks == free


def test_a_prompt_aborted_in_the_queue_is_withdrawn(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention())
    engine.add("p", prompt(40), params=for_prefill())
    engine.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    assert [type(order) for order in [*engine.run(), *engine.run()]] == [Withdraw]
    assert not engine.scheduler.has_requests()


def test_a_prompt_that_waits_for_its_turn_is_expected_already(model: Path) -> None:
    """Routers may send decode at once, and a pull for a transfer that nobody has spoken of is not kept for long."""
    engine = core.make_core(model, "kv_producer", core.full_attention(), max_num_seqs=1, max_num_batched_tokens=64)
    engine.add("p1", prompt(150), params=for_prefill("t1"))
    engine.add("p2", prompt(150, first=90), params=for_prefill("t2"))
    assert engine.run() == ()
    step = engine.schedule()
    assert step.output.num_scheduled_tokens == {"p1": 64}
    assert step.orders == (Expect("t1"), Expect("t2"))


@pytest.mark.parametrize("published", [True, False])
def test_an_abort_takes_nothing_from_another_request_of_the_same_transfer(model: Path, published: bool) -> None:
    """As when a client's library sends a prefill request a second time, and gives the first one up."""
    engine = core.make_core(model, "kv_producer", core.full_attention())
    engine.add("p1", prompt(40), params=for_prefill(), max_tokens=1 if published else 9)
    engine.run()
    engine.add("p2", prompt(40), params=for_prefill(), max_tokens=9)
    engine.run()
    assert engine.run() == (Expect("t1"),)
    engine.scheduler.finish_requests("p2", RequestStatus.FINISHED_ABORTED)
    assert engine.run() == ()
    engine.scheduler.finish_requests("p1", RequestStatus.FINISHED_ABORTED)
    assert [type(order) for order in engine.run()] == [] if published else [Withdraw]


def test_an_engine_of_both_roles_fetches_a_prompt_and_hands_it_on(model: Path) -> None:
    engine = core.make_core(model, "kv_both", core.full_attention())
    engine.add("b", prompt(40), params=for_prefill() | for_decode())
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    step.finish()
    step = engine.schedule()
    assert step.orders == (Expect("t1"),)
    step.finish(received=["b"], quiet=[pull.ticket])
    engine.run()
    (publish,) = engine.schedule().orders
    assert isinstance(publish, Publish)
    assert publish.tokens == 40


def test_who_waits_for_an_engine_of_both_roles_is_told_when_its_own_fetch_is_given_up(model: Path) -> None:
    engine = core.make_core(model, "kv_both", core.full_attention())
    engine.add("b", prompt(40), params=for_prefill() | for_decode())
    engine.run()
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert [type(order) for order in engine.schedule().orders] == [Cancel, Withdraw]


def test_a_prefill_without_transfer_id_is_not_published(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention())
    free = engine.free_blocks
    engine.add("p", prompt(40), params={"do_remote_decode": True})
    assert engine.run() == ()
    assert engine.run() == ()
    assert engine.free_blocks == free


@pytest.mark.parametrize("extra", [core.state(), core.sliding_window(32)], ids=["state", "window"])
def test_beside_full_attention_the_last_token_stays_with_the_decoder(model: Path, extra: Any) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention(), extra, caching=False)
    request = engine.add("p", prompt(49), params=for_prefill(), max_tokens=5)
    assert request.num_prompt_tokens == 48
    engine.run()
    (publish,) = engine.schedule().orders
    assert isinstance(publish, Publish)
    assert publish.tokens == 48
    assert len(publish.tables[0].blocks) == 3
    assert publish.tables[1].first_token == 0


def test_a_state_is_published_as_its_one_entry(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention(), core.state(), caching=False)
    engine.add("p", prompt(49), params=for_prefill())
    engine.run()
    (publish,) = engine.schedule().orders
    assert isinstance(publish, Publish)
    (block,) = publish.tables[1].blocks
    assert block is not None
    assert block not in publish.tables[0].blocks


def test_a_window_lists_what_is_kept_and_nothing_else(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention(), core.sliding_window(32))
    engine.add("p", prompt(81), params=for_prefill())
    engine.run()
    (publish,) = engine.schedule().orders
    assert isinstance(publish, Publish)
    assert [block is None for block in publish.tables[1].blocks] == [True, True, True, False, False]


# --------------------------------------------------------------------------------------------------- consumer


def test_a_decode_request_pulls_its_prompt_and_goes_on_when_it_came(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    free = engine.free_blocks
    engine.add("d", prompt(40), params=for_decode(), max_tokens=2)
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    assert (pull.transfer, pull.request, pull.source, pull.span) == ("t1", "d", SOURCE, Span(0, 40))
    assert len(pull.tables[0].blocks) == 3
    step.finish()
    assert engine.run() == ()
    engine.schedule().finish(received=["d"], quiet=[pull.ticket])
    step = engine.schedule()
    assert step.output.num_scheduled_tokens == {"d": 1}
    step.finish()
    engine.run()
    assert engine.free_blocks == free


def test_only_what_is_missing_is_pulled(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    engine.add("first", prompt(40), params=None)
    engine.run()
    engine.add("d", prompt(40), params=for_decode())
    (pull,) = engine.schedule().orders
    assert isinstance(pull, Pull)
    assert pull.span == Span(32, 40)
    assert pull.tables == (Table(32, pull.tables[0].blocks),)
    assert len(pull.tables[0].blocks) == 1


@pytest.mark.parametrize("specs", [[core.full_attention()], [core.full_attention(), core.sliding_window(64)]])
def test_a_full_hit_pulls_nothing_and_frees_the_producer(model: Path, specs: list[KVCacheSpec]) -> None:
    engine = core.make_core(model, "kv_consumer", *specs)
    engine.add("first", prompt(33), params=None)
    engine.run()
    engine.add("d", prompt(33), params=for_decode())
    step = engine.schedule()
    assert step.orders == (Release("t1", "d", SOURCE),)
    assert step.output.num_scheduled_tokens == {"d": 1}


def test_a_one_token_prompt_beside_a_state_is_computed_here(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), core.state(), caching=False)
    engine.add("d", prompt(1), params=for_decode())
    assert engine.run() == (Release("t1", "d", SOURCE),)


@pytest.mark.parametrize("absent", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
def test_incomplete_parameters_compute_the_prompt_here(model: Path, absent: str) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    params = for_decode()
    del params[absent]
    engine.add("d", prompt(40), params=params)
    step = engine.schedule()
    assert step.orders == ()
    assert step.output.num_scheduled_tokens == {"d": 40}


def test_a_request_that_ended_in_the_queue_frees_the_producer(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    engine.add("d", prompt(40), params=for_decode())
    engine.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    assert engine.schedule().orders == (Release("t1", "d", SOURCE),)


def test_an_abort_keeps_the_blocks_until_they_are_quiet(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    free = engine.free_blocks
    engine.add("d", prompt(40), params=for_decode())
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    step.finish()
    engine.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    step = engine.schedule()
    assert step.orders == (Cancel(pull.ticket),)
    step.finish(received=["d"])
    assert not engine.scheduler.requests
    assert engine.free_blocks == free - 3
    engine.schedule().finish(quiet=[pull.ticket])
    assert engine.free_blocks == free


def test_policy_fail_tells_the_client_at_once_and_keeps_the_blocks(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), policy="fail")
    free = engine.free_blocks
    engine.add("d", prompt(40), params=for_decode())
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    (answer,) = step.finish(failed=["d"])
    assert (answer.request_id, answer.finish_reason) == ("d", FinishReason.ERROR)
    assert engine.free_blocks == free - 3
    engine.schedule().finish(quiet=[pull.ticket])
    assert engine.free_blocks == free


@pytest.mark.parametrize("groups", [1, 2])
def test_policy_recompute_runs_in_other_blocks(model: Path, groups: int) -> None:
    specs = [core.full_attention(), core.sliding_window(64)][:groups]
    engine = core.make_core(model, "kv_consumer", *specs, policy="recompute")
    engine.add("d", prompt(40), params=for_decode())
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    step.finish(failed=["d"])
    step = engine.schedule()
    assert step.output.num_scheduled_tokens == {"d": 40}
    taken = {block for table in engine.scheduler.kv_cache_manager.get_block_ids("d") for block in table}
    doubtful = {block for table in pull.tables for block in table.blocks if block is not None}
    assert not taken & doubtful


def test_blocks_are_held_until_every_rank_is_quiet(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), ranks=2)
    free = engine.free_blocks
    engine.add("d", prompt(40), params=for_decode())
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    step.finish(failed=["d"], quiet=[pull.ticket], ranks=1)
    assert engine.free_blocks == free - 3
    engine.schedule().finish(quiet=[pull.ticket], ranks=1)
    assert engine.free_blocks == free


def test_a_window_is_pulled_by_position(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), core.sliding_window(32))
    engine.add("d", prompt(81), params=for_decode())
    (pull,) = engine.schedule().orders
    assert isinstance(pull, Pull)
    assert pull.span == Span(0, 80)
    assert [block is None for block in pull.tables[1].blocks] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("tokens", "cached", "options", "pulls"),
    [
        (46, 0, {}, True),
        (47, 0, {}, False),  # its last token looks at position 15, and vLLM's connector keeps the window from 16 on
        (47, 32, {}, True),
        (48, 0, {}, True),
        (47, 0, {"upstream_peer": {"block_size": 32}}, True),
        (63, 0, {"upstream_peer": {"block_size": 32}}, False),
    ],
)
def test_a_prompt_of_which_vllms_connector_has_given_back_a_block_is_computed_here(
    model: Path, tokens: int, cached: int, options: dict[str, Any], pulls: bool
) -> None:
    specs = [core.full_attention(), core.sliding_window(32)]
    engine = core.make_core(model, "kv_consumer", *specs, options=options)
    engine.add("one", prompt(20), params=for_decode("t0"))
    engine.schedule().finish(received=["one"], upstream=[SOURCE.engine])
    if cached:
        engine.add("first", prompt(cached), params=None)
        engine.run()
    engine.add("d", prompt(tokens, first=10 if cached else 60), params=for_decode())
    found = [type(order) for order in engine.schedule().orders if order.request == "d"]
    assert found == [Pull if pulls else Release]


class Heard(logging.Handler):
    """What one logger says, wherever else that goes and however loud the process is: `kvferry layout dump`, tested in
    this process, makes all of vLLM quiet."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[list[str]]:
    logger, handler = logging.getLogger("vllm.kvferry.vllm.scheduler"), Heard()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_why_a_prompt_is_computed_here_is_said_once(model: Path, heard: list[str]) -> None:
    """vLLM asks in every step in which the request has to wait."""
    specs = [core.full_attention(), core.sliding_window(32)]
    engine = core.make_core(model, "kv_consumer", *specs, max_num_seqs=2, max_num_batched_tokens=64)
    engine.add("one", prompt(20), params=for_decode("t0"))
    engine.schedule().finish(received=["one"], upstream=[SOURCE.engine])
    request = engine.add("d", prompt(47, first=60), params=for_decode())
    for _ in range(5):
        assert engine.scheduler.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert sum("request d: its prompt is computed here" in one for one in heard) == 1


def test_from_kvferry_such_a_prompt_is_pulled(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), core.sliding_window(32))
    engine.add("d", prompt(47), params=for_decode())
    (pull,) = engine.schedule().orders
    assert isinstance(pull, Pull)
    assert pull.tables[1].blocks[0] is not None
