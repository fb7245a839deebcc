"""Faults of the field that live between vLLM's scheduler and the connector, each by its id, on vLLM's own scheduler."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.vllm.metadata import Publish, Pull

from . import engine_core as core
from .test_scheduler import for_decode, for_prefill, prompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(QWEN3, tmp_path_factory.mktemp("models"))


def blocks_of(engine: core.Core, name: str) -> set[int]:
    return {block for table in engine.scheduler.kv_cache_manager.get_block_ids(name) for block in table}


@pytest.mark.parametrize("how", ["ends", "is preempted", "is aborted"])
def test_c01_blocks_that_a_queued_send_will_read_are_not_handed_out(model: Path, how: str) -> None:
    """Publishing only enqueues; whatever becomes of the request, others get other blocks until the send is quiet."""
    engine = core.make_core(model, "kv_producer", core.full_attention(), blocks=9, caching=False)
    free = engine.free_blocks
    engine.add("a", prompt(40), params=for_prefill("t1"))
    engine.run()
    (publish,) = engine.schedule().orders
    assert isinstance(publish, Publish)
    queued = {block for table in publish.tables for block in table.blocks if block is not None}
    assert len(queued) == 3
    pool = engine.scheduler.kv_cache_manager.block_pool
    if how == "is preempted":
        # What a preemption does to blocks: they go back without a word to the connector.
        again = engine.add("again", prompt(40, first=70), params=None, max_tokens=9)
        engine.run()
        engine.scheduler.running.remove(again)
        engine.scheduler._preempt_request(again, 0.0)
    elif how == "is aborted":
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    taken: set[int] = set()
    while pool.get_num_free_blocks():
        taken |= {block.block_id for block in pool.get_new_blocks(1)}
    assert not taken & queued
    assert len(taken) == free - 3
    assert all(pool.blocks[block].ref_cnt == 1 for block in queued)
    engine.schedule().finish(quiet=[publish.ticket])
    assert pool.get_num_free_blocks() == 3


def test_p10_the_transfer_id_travels_in_the_parameters_and_no_local_id_is_ever_compared(model: Path) -> None:
    """Each engine puts a suffix of its own behind a request id; both orders carry what the router chose."""
    prefill = core.make_core(model, "kv_producer", core.full_attention())
    prefill.add("cmpl-7-0-1c9f", prompt(40), params=for_prefill("chosen by the router"))
    prefill.run()
    (publish,) = prefill.schedule().orders
    decode = core.make_core(model, "kv_consumer", core.full_attention())
    decode.add("cmpl-7-0-e02b", prompt(40), params=for_decode("chosen by the router"))
    (pull,) = decode.schedule().orders
    assert isinstance(publish, Publish)
    assert isinstance(pull, Pull)
    assert publish.transfer == pull.transfer == "chosen by the router"
    assert publish.request != pull.request
