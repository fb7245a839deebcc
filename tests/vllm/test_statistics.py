"""Statistics by value: through vLLM's own scheduler, aggregation, log line and Prometheus registry."""

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvferry.runtime import End, Interval, Receive, Write
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.vllm.holds import HeldBlocks
from kvferry.vllm.metadata import Publish, Pull
from kvferry.vllm.metrics import METRICS
from kvferry.vllm.statistics import FerryStats

from . import engine_core as core

pytestmark = pytest.mark.vllm

TRANSFER = KVTransferConfig(
    kv_connector="FerryConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_both", engine_id="e"
)
PRODUCED = Interval(
    writes=(Write(1 << 20, 3, 0.002, 0.5), Write(3 << 20, 5, 0.004, 1.5)),
    ends=Counter({End("producer", "done", ""): 2, End("producer", "expired", "expired"): 1}),
)
CONSUMED = Interval(
    receives=(Receive(300, 0.01, 0.2),),
    ends=Counter({End("consumer", "done", ""): 1, End("consumer", "failed", "peer-lost"): 2}),
    counts=Counter({"verified_pages": 60, "verified_bytes": 4096, "verify_mismatches": 1, "retries": 2}),
)


def joined_stats() -> FerryStats:
    """Two ranks and the scheduler, each across a process border as vLLM sends it."""
    first, second = FerryStats.of_worker([PRODUCED, CONSUMED]), FerryStats.of_worker([CONSUMED])
    assert first is not None
    assert second is not None
    whole = pickle.loads(pickle.dumps(first)).aggregate(pickle.loads(pickle.dumps(second)))
    return whole.aggregate(FerryStats.of_scheduler(HeldBlocks(12, 4)))


def wire(stats: FerryStats) -> dict[str, Any]:
    """The dictionary as the front end gets it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))


def test_ranks_are_joined_and_survive_the_way_to_the_front_end() -> None:
    stats = joined_stats()
    assert wire(stats) == {
        "writes": [[1 << 20, 3, 0.002, 0.5], [3 << 20, 5, 0.004, 1.5]],
        "receives": [[300, 0.01, 0.2], [300, 0.01, 0.2]],
        "ends": {"producer done": 2, "producer expired expired": 1, "consumer done": 2, "consumer failed peer-lost": 4},
        "counts": {"verified_pages": 120, "verified_bytes": 8192, "verify_mismatches": 2, "retries": 4},
        "holds": [12, 4],
    }
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert FerryStats.of_worker([Interval(), Interval()]) is None


def test_the_log_line_sums_up_and_says_nothing_of_nothing() -> None:
    logging, lines = KVConnectorLogging(TRANSFER), []
    logging.observe(wire(joined_stats()))
    logging.observe(FerryStats.of_scheduler(HeldBlocks(7, 0)).to_dict())
    logging.log(lambda form, *args: lines.append(form % args))
    logging.log(lambda form, *args: lines.append(form % args))
    assert lines == [
        "KV Transfer metrics: writes=2, MB written=4.0, MB/s while writing=2.0, descriptors per write=4.0, "
        "bind ms mean=3.0, bind ms p90=3.8, write ms mean=1000.0, write ms p90=1400.0, fetches=2, tokens fetched=600, "
        "wait ms mean=200.0, wait ms p90=200.0, verified pages=120, verify mismatches=2, retries=4, "
        "not done: consumer failed peer-lost=4, "
        "not done: producer expired expired=1, blocks held=7, blocks quarantined=0"
    ]


@pytest.fixture
def prometheus() -> Iterator[KVConnectorProm]:
    unregister_vllm_metrics()
    config = SimpleNamespace(kv_transfer_config=TRANSFER)
    yield KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    unregister_vllm_metrics()


def sample(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:kvferry_{name}", {"model_name": "m", "engine": str(engine), **labels})


def test_prometheus_shows_every_metric_by_value(prometheus: KVConnectorProm) -> None:
    prometheus.observe(wire(joined_stats()), 1)
    assert sample("sent_bytes_total", 1) == 4 << 20
    assert sample("descriptors_total", 1) == 8
    assert sample("received_tokens_total", 1) == 600
    assert (sample("verified_pages_total", 1), sample("verified_bytes_total", 1)) == (120, 8192)
    assert (sample("verify_mismatches_total", 1), sample("retries_total", 1)) == (2, 4)
    assert (sample("verify_mismatches_total", 0), sample("retries_total", 0)) == (0, 0)
    assert sample("transfers_total", 1, side="producer", outcome="done") == 2
    assert sample("transfers_total", 1, side="consumer", outcome="failed") == 4
    assert sample("failures_total", 1, side="consumer", reason="peer-lost") == 4
    assert sample("failures_total", 1, side="producer", reason="expired") == 1
    assert (sample("write_bytes_count", 1), sample("write_bytes_sum", 1)) == (2, 4 << 20)
    assert (sample("write_descriptors_count", 1), sample("write_descriptors_sum", 1)) == (2, 8)
    assert (sample("bind_seconds_count", 1), sample("bind_seconds_sum", 1)) == (2, 0.006)
    assert (sample("write_seconds_count", 1), sample("write_seconds_sum", 1)) == (2, 2.0)
    assert (sample("resolve_seconds_count", 1), sample("resolve_seconds_sum", 1)) == (2, 0.02)
    assert (sample("wait_seconds_count", 1), sample("wait_seconds_sum", 1)) == (2, 0.4)
    assert (sample("write_seconds_bucket", 1, le="0.5"), sample("write_seconds_bucket", 1, le="0.25")) == (1, 0)
    assert (sample("held_blocks", 1), sample("quarantined_blocks", 1)) == (12, 4)
    prometheus.observe(FerryStats.of_scheduler(HeldBlocks(0, 0)).to_dict(), 1)
    assert (sample("held_blocks", 1), sample("quarantined_blocks", 1)) == (0, 0)


def test_an_engine_shows_zeros_before_its_first_transfer_and_help_texts(prometheus: KVConnectorProm) -> None:
    assert sample("sent_bytes_total", 0) == 0
    assert sample("wait_seconds_count", 0) == 0
    shown = {family.name: family.documentation for family in REGISTRY.collect()}
    assert {one.full_name: one.text for one in METRICS}.items() <= shown.items()


def test_inside_a_multi_connector_they_get_through() -> None:
    child = {"kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both"}
    multi = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [child]}
    )
    sent = MultiKVConnectorStats(data={"FerryConnector": joined_stats()}).to_dict()
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
    unregister_vllm_metrics()
    metrics = KVConnectorProm(
        VllmConfig(kv_transfer_config=multi), ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    metrics.observe(arrived, 1)
    assert sample("sent_bytes_total", 1) == 4 << 20
    built = MultiConnector.build_kv_connector_stats(arrived)
    assert built is not None
    assert built.reduce()["FerryConnector"]["tokens fetched"] == 600
    unregister_vllm_metrics()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(QWEN3, tmp_path_factory.mktemp("models"))


def test_blocks_held_for_a_published_prompt_are_told_until_they_are_quiet(model: Path) -> None:
    engine = core.make_core(model, "kv_producer", core.full_attention(), stats=True)
    engine.add("p", range(10, 50), params={"do_remote_decode": True, "transfer_id": "t1"})
    first = engine.schedule()
    first.finish()
    assert first.stats is not None
    assert first.stats["holds"] == [3, 0]
    second = engine.schedule()
    (publish,) = second.orders
    assert isinstance(publish, Publish)
    second.finish()
    assert second.stats is None, "nothing has changed"
    third = engine.schedule()
    third.finish(quiet=[publish.ticket])
    assert third.stats is not None
    assert third.stats["holds"] == [0, 0]


def test_blocks_of_a_failed_fetch_are_quarantined_until_they_are_quiet(model: Path) -> None:
    engine = core.make_core(model, "kv_consumer", core.full_attention(), stats=True)
    params = {
        "do_remote_prefill": True,
        "transfer_id": "t1",
        "remote_engine_id": "engine-p",
        "remote_bootstrap_addr": "http://127.0.0.1:8998",
    }
    engine.add("d", range(10, 50), params=params)
    told = []
    step = engine.schedule()
    (pull,) = step.orders
    assert isinstance(pull, Pull)
    step.finish()
    told.append(step.stats)
    step = engine.schedule()
    step.finish(failed=["d"])
    told.append(step.stats)
    step = engine.schedule()
    step.finish(quiet=[pull.ticket])
    told.append(step.stats)
    assert [one["holds"] for one in told if one] == [[3, 0], [3, 3], [0, 0]]
