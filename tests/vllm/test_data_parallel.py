"""Two data parallel ranks at prefill and two at decode: four engines, any two of which may meet.

Each side is one ``vllm serve --data-parallel-size 2``: API servers that send a request to the rank that its header
``X-data-parallel-rank`` names, and an engine of its own for each rank, with an id and ports of its own. Ranks of one
side share the connector's options and one bootstrap service. (Forked from the warm process; otherwise the command of an
operator.)
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.runtime.checkup import Verdict
from kvferry.runtime.checkup.upstream import check_upstream
from kvferry.runtime.upstream_caches import Declared
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.mixed_load import forget_caches
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.ports import free_ports
from kvferry.testing.serve import (
    SERVED_NAME,
    Served,
    ServedPair,
    ServeSpec,
    serve_engines,
    serve_router_over,
    serve_vllm_router,
)
from kvferry.testing.transfer_report import Transfer, read_reports, wait_for_reports

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

RANKS = (0, 1)
VLLM_ROUTER = Path(__file__).parents[2] / ".venv-router" / "bin" / "vllm-router"
TEXT = "Two ferries leave the left bank and two the right one, and each may carry what any other brought. " * 3
TOKENS = 10


@dataclass(frozen=True)
class Site:
    """Both sides, and what the prefill side's bootstrap service lists."""

    prefill: Served
    decode: Served
    listed: Mapping[str, Any]
    report: Path
    client: httpx.Client

    @property
    def bootstrap(self) -> str:
        return f"http://127.0.0.1:{self.prefill.bootstrap_port}"

    def complete(self, url: str, prompt: str, *, rank: int | None = None, **body: Any) -> str:
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        asked = {"model": SERVED_NAME, "max_tokens": TOKENS, "temperature": 0, "prompt": prompt, **body}
        answer = self.client.post(f"{url}/v1/completions", json=asked, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def hand_over(self, prompt: str, transfer: str, *, producer: int, consumer: int | None) -> str:
        """The two requests of a router, each to the rank that is named (or to the one that vLLM chooses)."""
        first = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        second = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": self.listed[str(producer)]["engine_id"],
            "remote_bootstrap_addr": self.bootstrap,
        }
        self.complete(self.prefill.server.url, prompt, rank=producer, max_tokens=1, kv_transfer_params=first)
        return self.complete(self.decode.server.url, prompt, rank=consumer, kv_transfer_params=second)

    def proven(self, transfer: str) -> Transfer:
        """What both ends reported of a transfer, with equal digests."""
        found = wait_for_reports([self.report], [transfer], 10)[transfer]
        assert found.problems() == ()
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, forge: EngineForge) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("data-parallel")
    report = folder / "transfers.jsonl"
    model = build_model(QWEN3, model_folder)
    arguments = (
        *("--data-parallel-size", "2", "--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "8"),
        *("--num-gpu-blocks-override", "100"),
    )
    specs = [
        ServeSpec(
            role,
            role,
            model,
            folder,
            # By itself vLLM starts as many API servers as there are ranks, which share the metrics page.
            arguments=(*arguments, *(() if role == "prefill" else ("--api-server-count", "1"))),
            options={
                "transport": "mooncake",
                "mooncake_protocol": "tcp",
                "transfer_report": str(report),
                "side_channel_port": port,  # of rank 0; the other one takes the next
                "silence_timeout": 30.0,  # eight processes on two cores: one without time for seconds is not dead
            },
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
        for role, port in (("prefill", free_ports(2)), ("decode", 0))
    ]
    with serve_engines(specs, forge=forge) as (prefill, decode), httpx.Client(timeout=60, trust_env=False) as client:
        listed = client.get(f"http://127.0.0.1:{prefill.bootstrap_port}/query").json()
        yield Site(prefill, decode, listed, report, client)


def test_each_rank_is_listed_under_its_number_with_an_id_and_an_address_of_its_own(site: Site) -> None:
    assert sorted(site.listed) == ["0", "1"]
    first, second = (site.listed[str(rank)] for rank in RANKS)
    assert first["engine_id"].removesuffix("_dp0") == second["engine_id"].removesuffix("_dp1")
    ports = [int(entry["worker_addr"]["0"]["0"].rpartition(":")[2]) for entry in (first, second)]
    assert ports[1] == ports[0] + 1, "the second one's port is counted on from the option's"


@pytest.mark.parametrize("producer", RANKS)
@pytest.mark.parametrize("consumer", RANKS)
def test_from_any_rank_to_any_rank(site: Site, producer: int, consumer: int) -> None:
    prompt = f"From {producer} to {consumer}. {TEXT}"
    transfer = f"from-{producer}-to-{consumer}"
    alone = site.complete(site.prefill.server.url, prompt, rank=1 - producer)
    assert site.hand_over(prompt, transfer, producer=producer, consumer=consumer) == alone
    (line,) = site.proven(transfer).consumer
    assert line.peer_engine_id == site.listed[str(producer)]["engine_id"]
    assert line.engine_id.endswith(f"_dp{consumer}")


def test_a_decode_rank_that_vllm_chooses_fetches_too(site: Site) -> None:
    for number in range(4):
        prompt = f"{number}: wherever you like. {TEXT}"
        transfer = f"anywhere-{number}"
        served = site.hand_over(prompt, transfer, producer=number % 2, consumer=None)
        assert served == site.complete(site.prefill.server.url, prompt, rank=1), number
        site.proven(transfer)


@pytest.mark.parametrize("name", ["kvferry", "vllm-router"])
def test_a_router_lets_them_take_turns(site: Site, name: str, tmp_path: Path) -> None:
    before = set(read_reports([site.report]))
    with router_of(name, site, tmp_path / "router.log") as router:
        for number in range(4):
            prompt = f"{number} at the {name}. {TEXT}"
            assert site.complete(router, prompt) == site.complete(site.prefill.server.url, prompt, rank=0)
    found = {name: site.proven(name) for name in set(read_reports([site.report])) - before}
    assert len(found) == 4
    producers = [line.peer_engine_id for one in found.values() for line in one.consumer]
    assert sorted(producers) == sorted(2 * [site.listed[str(rank)]["engine_id"] for rank in RANKS])


def router_of(name: str, site: Site, log: Path) -> AbstractContextManager[str]:
    if name == "kvferry":
        prefills = [(site.prefill.server.url, site.prefill.bootstrap_port)]
        return serve_router_over(prefills, [site.decode.server.url], log=log)
    if not VLLM_ROUTER.exists():
        pytest.skip("vllm-router is not installed: `make test-vllm` and `make load-routers` do it")
    pair = ServedPair.of(site.prefill, site.decode)
    # Without this option it names the first rank's engine for every prompt, whichever rank computed it.
    return serve_vllm_router(pair, VLLM_ROUTER, log=log, arguments=("--intra-node-data-parallel-size", "2"))


def test_what_vllm_tells_of_its_caches_can_be_compared_with_a_declaration(site: Site) -> None:
    """The metric that ``kvferry doctor --upstream-peer`` reads, from engines of this release."""
    for served in (site.prefill, site.decode):
        found = check_upstream(served.server.url, Declared(block_size=32))
        assert (found.verdict, found.facts["told"]) == (Verdict.OK, {"block_size": 32})
        assert check_upstream(served.server.url, Declared(block_size=64)).verdict is Verdict.FAILED


def test_each_rank_counts_for_itself_and_holds_nothing_at_the_end(site: Site) -> None:
    """Last in this file."""
    forget_caches([site.prefill.server.url, site.decode.server.url])
    for served, side in ((site.prefill, "producer"), (site.decode, "consumer")):
        families = list(text_string_to_metric_families(site.client.get(f"{served.server.url}/metrics").text))
        done = {
            sample.labels["engine"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "vllm:kvferry_transfers_total"
            and (sample.labels["side"], sample.labels["outcome"]) == (side, "done")
        }
        assert set(done) == {"0", "1"}
        assert min(done.values()) >= 2
        held = [s.value for family in families for s in family.samples if s.name == "vllm:kvferry_held_blocks"]
        assert held == [0, 0]
