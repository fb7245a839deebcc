"""Two real ``vllm serve`` processes and ``kvferry serve-router`` in front of them, as an operator starts them.

What comes through the router is compared with what the prefill engine answers alone. One pair serves the whole file,
since it takes minutes to start; the last test kills its prefill engine.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.mixed_load import Ends, forget_caches, plan_load, run_load, take_references
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.serve import SERVED_NAME, ServedPair, ServePair, serve_pair, serve_router
from kvferry.testing.transfer_report import read_reports

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

LIGHTHOUSE = "The keeper of the lighthouse wrote down the name of every ship that went by in the night. " * 3
MILL = "Nobody in the town had ever seen the inside of the old mill. " * 2
RIVER = "A short one about rivers."
TOKENS = 12
BLOCKS = ("--num-gpu-blocks-override", "400")
"""Fewer than eight of the longest prompts need: some wait for memory."""
SOON = 10.0
"""Within this many seconds a client must know, whatever has died."""


@dataclass(slots=True)
class Site:
    """A pair behind a router."""

    pair: ServedPair
    router: str
    report: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))

    def post(self, url: str, path: str, **body: Any) -> httpx.Response:
        return self.client.post(url + path, json=request(**body))

    def complete(self, url: str, prompt: str | list[str], **body: Any) -> list[str]:
        answer = self.post(url, "/v1/completions", prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    def chat(self, url: str, text: str) -> str:
        answer = self.post(url, "/v1/chat/completions", messages=[{"role": "user", "content": text}])
        assert answer.status_code == 200, answer.text
        said: str = answer.json()["choices"][0]["message"]["content"]
        return said

    def stream(self, url: str, path: str, **body: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", url + path, json=request(stream=True, **body)) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert answer.status_code == 200
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def pulled(self) -> int:
        """Transfers so far whose pages are the same at both ends; all others fail the test."""
        transfers = read_reports([self.report]).values()
        assert [problem for transfer in transfers for problem in transfer.problems()] == []
        return len(transfers)


def request(**body: Any) -> dict[str, Any]:
    return {"model": SERVED_NAME, "max_tokens": TOKENS, "temperature": 0, **body}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("serve")
    report = folder / "transfers.jsonl"
    pair = ServePair(
        build_model(QWEN3, folder),
        folder,
        arguments=(*("--max-model-len", "2304", "--block-size", "32"), *("--max-num-seqs", "8"), *BLOCKS),
        options={"transfer_report": str(report), "debug_socket_dir": str(folder / "debug")},
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with serve_pair(pair) as served, serve_router(served, log=folder / "router.log") as router:
        site = Site(served, router, report)
        with site.client:
            yield site


def test_a_completion(site: Site) -> None:
    before = site.pulled()
    assert site.complete(site.router, LIGHTHOUSE) == site.complete(site.pair.prefill.url, LIGHTHOUSE)
    assert site.pulled() == before + 1


def test_a_streamed_completion(site: Site) -> None:
    # vLLM joins tokens that its server had no time to send one by one, so a short answer may be one event.
    events = site.stream(site.router, "/v1/completions", prompt=MILL, max_tokens=40 * TOKENS)
    assert len(events) > 1
    text = "".join(event["choices"][0]["text"] for event in events)
    (want,) = site.complete(site.pair.prefill.url, MILL)
    assert text.startswith(want)


def test_three_prompts_in_one_request(site: Site) -> None:
    before = site.pulled()
    prompts = [f"First. {RIVER}", f"Second. {LIGHTHOUSE}", f"Third. {MILL}"]
    assert site.complete(site.router, prompts) == site.complete(site.pair.prefill.url, prompts)
    assert site.pulled() == before + 3


def test_a_chat_and_a_streamed_chat(site: Site) -> None:
    text = f"Tell me more. {RIVER}"
    want = site.chat(site.pair.prefill.url, text)
    assert site.chat(site.router, text) == want
    text = f"And more still. {RIVER}"
    events = site.stream(site.router, "/v1/chat/completions", messages=[{"role": "user", "content": text}])
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert said == site.chat(site.pair.prefill.url, text)


def test_both_engines_count_a_transfer_in_their_metrics(site: Site) -> None:
    engines = {"producer": site.pair.prefill.url, "consumer": site.pair.decode.url}
    done = {side: {"name": "transfers_total", "side": side, "outcome": "done"} for side in engines}
    before = {side: metric(site, url, **done[side]) for side, url in engines.items()}
    sent = metric(site, engines["producer"], name="sent_bytes_total")
    received = metric(site, engines["consumer"], name="received_tokens_total")
    site.complete(site.router, f"Counted. {LIGHTHOUSE}")
    for side, url in engines.items():
        wait_until(lambda side=side, url=url: metric(site, url, **done[side]) == before[side] + 1)
        wait_until(lambda url=url: metric(site, url, name="held_blocks") == 0)
        assert metric(site, url, name="quarantined_blocks") == 0
    assert metric(site, engines["producer"], name="sent_bytes_total") > sent
    assert metric(site, engines["consumer"], name="received_tokens_total") > received
    assert metric(site, engines["consumer"], name="sent_bytes_total") == 0


def wait_until(holds: Callable[[], bool], *, seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def metric(site: Site, url: str, *, name: str, **labels: str) -> float:
    """The sum of kvferry's samples of this name and these labels."""
    families = text_string_to_metric_families(site.client.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"vllm:kvferry_{name}"]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def by_hand(site: Site, transfer: str, prefilled: list[str], decoded: list[str]) -> httpx.Response:
    """Both halves of a router's work, with one transfer id for all prompts."""
    bootstrap = f"http://127.0.0.1:{site.pair.bootstrap_port}"
    (entry,) = site.client.get(f"{bootstrap}/query").json().values()
    first = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    second = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer}
    second |= {"remote_engine_id": entry["engine_id"], "remote_bootstrap_addr": bootstrap}
    url = site.pair.prefill.url
    site.post(url, "/v1/completions", prompt=prefilled, max_tokens=1, kv_transfer_params=first).raise_for_status()
    return site.post(site.pair.decode.url, "/v1/completions", prompt=decoded, kv_transfer_params=second)


def test_a_batch_under_one_transfer_id_is_answered_right(site: Site) -> None:
    """As vllm-router sends it: the first prompt is fetched, the others are computed by the decode engine."""
    before = site.pulled()
    prompts = [f"One. {MILL}", f"Two. {LIGHTHOUSE}", f"Three. {RIVER}"]
    answer = by_hand(site, "one-for-all", prompts, prompts)
    assert [choice["text"] for choice in answer.json()["choices"]] == site.complete(site.pair.prefill.url, prompts)
    assert site.pulled() == before + 1


def test_the_cache_of_another_prompt_is_refused_and_never_found_later(site: Site) -> None:
    prefilled, wanted = f"Here. {LIGHTHOUSE}", f"There. {MILL}"
    assert by_hand(site, "mixed-up", [prefilled], [wanted]).status_code == 500
    assert "mixed-up: failed (other-prompt" in site.pair.decode.log.read_text()
    assert site.complete(site.pair.decode.url, wanted) == site.complete(site.pair.prefill.url, wanted)


def test_mixed_load_with_clients_that_leave(site: Site) -> None:
    """The short form of `make load-routers`: every answer, every transfer and every block is accounted for."""
    ends = Ends(site.pair.prefill.url, site.pair.decode.url, site.report, site.report.with_name("debug"), SERVED_NAME)
    asks = plan_load(40, seed=7)

    def forget() -> None:
        forget_caches(ends.engines)

    forget()
    references = asyncio.run(take_references(ends.prefill, asks, model=ends.model, concurrency=16, forget=forget))
    audit = run_load(site.router, ends, asks, references, concurrency=16)
    assert audit.faults == []
    assert audit.ends.keys() == {"finished", "left"}
    assert audit.ends["finished"] > 20


def timed(ask: Callable[[], httpx.Response]) -> tuple[float, httpx.Response]:
    answer = ask()
    return time.monotonic(), answer


def test_a_killed_prefill_engine_under_load(site: Site) -> None:
    """Last in this file: nothing is prefilled after it."""
    prompts = [f"Number {number}. {LIGHTHOUSE}" for number in range(24)]
    want = dict(zip(prompts, site.complete(site.pair.prefill.url, prompts), strict=True))
    log = site.pair.prefill.log
    quiet = log.read_text().count("done as producer")
    with ThreadPoolExecutor(8) as pool:
        waiting = {
            prompt: pool.submit(
                lambda prompt=prompt: timed(lambda: site.post(site.router, "/v1/completions", prompt=prompt))
            )
            for prompt in prompts
        }
        deadline = time.monotonic() + 60
        while log.read_text().count("done as producer") < quiet + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        site.pair.prefill.kill()
        killed = time.monotonic()
        answers = {prompt: future.result(60) for prompt, future in waiting.items()}
    assert max(ended for ended, _ in answers.values()) - killed < SOON
    right = [prompt for prompt, (_, answer) in answers.items() if answer.status_code == 200]
    assert 3 <= len(right) < len(prompts)
    for prompt in right:
        assert answers[prompt][1].json()["choices"][0]["text"] == want[prompt]
    for prompt in want.keys() - set(right):
        answer = answers[prompt][1]
        assert answer.status_code in (500, 502, 503)
        assert answer.json()["error"]["message"]
    assert site.pair.decode.healthy
    assert site.complete(site.pair.decode.url, prompts[:4]) == [want[prompt] for prompt in prompts[:4]]
    assert site.complete(site.pair.decode.url, f"Afterwards. {RIVER}")[0]
