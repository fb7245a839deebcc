"""Modes that only real engines show: inside vLLM's MultiConnector, the smallest requests, and an orderly end."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import Done, EngineSpec, Shutdown
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, PairSpec, pair_spec, report_options
from kvferry.testing.transfer_report import wait_for_reports

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

TEXT = token_ids("The ferry waits for nobody, and nobody waits for the ferry. " * 4)


@dataclass(frozen=True)
class Site:
    """A pair whose decode engine has FerryConnector as one of two connectors."""

    pair: Pair
    report: Path

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.pair.prefill, self.pair.decode


def beside_another(spec: EngineSpec, folder: Path) -> EngineSpec:
    """The same engine with vLLM's MultiConnector: kvferry first, then a store on disk."""
    transfer = dict(spec.kv_transfer or {})
    engine_id = transfer.pop("engine_id")  # the parent's counts for all
    store = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "store")},
    }
    whole = {
        "kv_connector": "MultiConnector",
        "kv_role": transfer["kv_role"],
        "engine_id": engine_id,
        "kv_connector_extra_config": {"connectors": [transfer, store]},
    }
    return msgspec.structs.replace(spec, kv_transfer=whole)


def spec_of(folder: Path, model: Path) -> PairSpec:
    specs = [
        EngineSpec(
            name=name,
            model=str(model),
            dtype=QWEN3.dtype,
            block_size=64,
            num_blocks=48,
            max_model_len=1024,
            engine_args={"disable_hybrid_kv_cache_manager": True},
        )
        for name in ("prefill", "decode")
    ]
    return pair_spec(*specs, options=report_options(folder, transport="mooncake"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, forge: EngineForge) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("modes")
    spec = spec_of(folder, build_model(QWEN3, model_folder))
    spec = replace(spec, decode=beside_another(spec.decode, folder))
    with start_engines([spec.prefill, spec.decode], logs=folder, forge=forge) as (prefill, decode):
        yield Site(Pair(spec, prefill, decode), folder / "transfers.jsonl")


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("wanted", [1, 5])
def test_small_requests_inside_a_multi_connector(site: Site, tokens: int, wanted: int) -> None:
    text = TEXT[wanted : wanted + tokens]
    name = f"small-{tokens}-{wanted}"
    alone = site.pair.prefill.generate(text, max_tokens=wanted, request_id=f"{name}-alone")
    served = site.pair.generate(text, max_tokens=wanted, name=name)
    assert served.decode.tokens == alone.tokens
    assert served.decode.finish_reason == "length"
    # All of the prompt came from elsewhere. Of a single token, which it computes again, vLLM says that none did.
    assert served.decode.cached_tokens == (tokens if tokens > 1 else 0)
    transfer = wait_for_reports([site.report], [served.transfer_id], 10)[served.transfer_id]
    assert transfer.problems() == ()


def test_an_engine_ends_in_time_with_transfers_open(site: Site) -> None:
    """The last test of this file: a cache that nobody fetches on one side, fetches that nobody serves on the other."""
    prefill, decode = site.engines
    published = prefill.inspect().free_blocks
    prefill.ask(site.pair.prefill_command(TEXT, "nobody-fetches", "left"))
    assert prefill.inspect().free_blocks < published
    before = decode.inspect().free_blocks
    for number in range(3):
        decode.submit(site.pair.decode_command(TEXT, f"nobody-serves-{number}", f"waits-{number}", max_tokens=4))
    deadline = time.monotonic() + 10
    while decode.inspect().free_blocks > before - 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for engine in (decode, prefill):
        began = time.monotonic()
        ended = cast(Done, engine.ask(Shutdown(), timeout=10))
        assert time.monotonic() - began < 5, engine.spec.name
        assert ended.value, f"{engine.spec.name}: a thread of the connector is left"
