"""What a failed load leaves behind in vLLM: no cached block of it, and alternatives that are used or let go."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from kvferry.protocol import Source, Span
from kvferry.runtime import Alternative
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.vllm.metadata import Pull, Release
from kvferry.vllm.request import MAX_ALTERNATIVES

from . import engine_core as core

pytestmark = pytest.mark.vllm

SOURCE = Source(engine="engine-p", bootstrap="http://127.0.0.1:8998")
OTHER = Source(engine="engine-q", bootstrap="http://127.0.0.1:8999")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(QWEN3, tmp_path_factory.mktemp("models"))


def params(transfer: str = "t1", *others: object) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": SOURCE.engine,
        "remote_bootstrap_addr": SOURCE.bootstrap,
        "remote_alternatives": list(others),
    }


def other(transfer: str) -> dict[str, str]:
    return {"transfer_id": transfer, "remote_engine_id": OTHER.engine, "remote_bootstrap_addr": OTHER.bootstrap + "/"}


def prompt(tokens: int = 40) -> list[int]:
    return [10 + index for index in range(tokens)]


def failed_pull(engine: core.Core) -> Pull:
    """A decode request whose load failed, before its blocks are quiet."""
    engine.add("d1", prompt(), params=params("t1"))
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    answers = step.finish(failed=["d1"])
    assert [one.finish_reason for one in answers] in ([], [FinishReason.ERROR])
    return pull


def test_after_a_failed_load_the_next_request_finds_nothing_cached(model: Path) -> None:
    """Blocks of a load enter vLLM's prefix cache when the load is said to have come, and not before."""
    engine = core.make_core(model, "kv_consumer", core.full_attention(), policy="fail")
    pull = failed_pull(engine)
    engine.schedule().finish(quiet=[pull.ticket])
    engine.add("d2", prompt(), params=params("t2"))
    (again,) = engine.schedule().orders
    assert isinstance(again, Pull)
    assert again.span == Span(0, 40)


def test_after_a_recomputation_only_what_was_computed_is_cached(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), policy="recompute")
    pull = failed_pull(engine)
    doubtful = {block for block in pull.tables[0].blocks if block is not None}
    step = engine.schedule()
    computed = set(engine.scheduler.kv_cache_manager.get_block_ids("d1")[0])
    step.finish(quiet=[pull.ticket])
    engine.add("d2", prompt(), params=params("t2"))
    (again,) = engine.schedule().orders
    assert isinstance(again, Pull)
    assert again.span == Span(32, 40), "two full blocks are found"
    found = set(engine.scheduler.kv_cache_manager.get_block_ids("d2")[0][:2])
    assert found <= computed
    assert not found & doubtful


def test_a_pull_carries_the_alternatives_that_say_it_all(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    broken = [7, {"transfer_id": "t5"}, {**other("t6"), "remote_engine_id": 3}, other("t1"), other("t2")]
    engine.add("d", prompt(), params=params("t1", other("t2"), *broken, other("t3")))
    (pull,) = engine.schedule().orders
    assert isinstance(pull, Pull)
    assert pull.alternatives == (Alternative("t2", OTHER), Alternative("t3", OTHER))


def test_what_is_no_list_is_no_alternative(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    engine.add("d", prompt(), params=params("t1") | {"remote_alternatives": other("t2")})
    (pull,) = engine.schedule().orders
    assert isinstance(pull, Pull)
    assert pull.alternatives == ()


def test_there_is_a_bound_on_alternatives(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention())
    engine.add("d", prompt(), params=params("t", *(other(f"t{number}") for number in range(50))))
    (pull,) = engine.schedule().orders
    assert isinstance(pull, Pull)
    assert len(pull.alternatives) == MAX_ALTERNATIVES


def test_a_request_that_needs_nothing_lets_all_producers_go(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), core.sliding_window(64))
    engine.add("first", prompt(33), params=None)
    engine.run()
    engine.add("d", prompt(33), params=params("t1", other("t2")))
    assert engine.schedule().orders == (Release("t1", "d", SOURCE), Release("t2", "d", OTHER))
