"""What the option ``host`` may be: an IPv6 address, or a name. And where vLLM's own addresses have ranks register."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from kvferry.runtime.checkup import local_addresses
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec, report_options
from kvferry.testing.transfer_report import wait_for_reports
from kvferry.vllm.config import parse_config
from kvferry.vllm.endpoint import read_options

PROMPT = token_ids("over whichever address these engines were told to use, the same cache comes; " * 4)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("host", "transport", "said"),
    [
        pytest.param("::1", "mooncake", "[::], every interface in IPv6 and IPv4", marks=pytest.mark.mooncake, id="::1"),
        pytest.param("localhost", "cma", "0.0.0.0, every interface in IPv4", id="localhost"),
    ],
)
def test_engines_serve_each_other(
    host: str, transport: str, said: str, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    if host == "::1" and host not in {one.ip for one in local_addresses()}:
        pytest.skip("no IPv6 here")
    model = str(build_model(QWEN3, model_folder))
    prefill, decode = (
        EngineSpec(name=name, model=model, dtype=QWEN3.dtype, block_size=64, num_blocks=32, max_model_len=1024)
        for name in ("prefill", "decode")
    )
    spec = pair_spec(prefill, decode, options=report_options(tmp_path, transport=transport, host=host))
    spec = replace(spec, bootstrap=spec.bootstrap.replace("127.0.0.1", f"[{host}]" if ":" in host else host))
    with start_engines([spec.prefill, spec.decode], logs=tmp_path / "logs", forge=forge) as (first, second):
        want = first.generate(PROMPT, max_tokens=6, request_id="alone").tokens
        served = Pair(spec, first, second).generate(PROMPT, max_tokens=6, name="moved")
        assert served.decode.tokens == want
        reports = wait_for_reports([tmp_path / "transfers.jsonl"], [served.transfer_id], 20.0)
        log = first.log.read_text()
    assert reports[served.transfer_id].proven, reports[served.transfer_id].problems
    assert f"served by rank 0 on {said}" in log
    listens = "tcp://[::1]:" if host == "::1" else "tcp://127.0.0.1:"
    assert f"  listens on {listens}" in log


@pytest.mark.parametrize(
    ("bound", "master", "served"),
    [
        ("10.0.0.3", "127.0.0.1", "0.0.0.0"),
        ("fd00::3", "127.0.0.1", "::"),
        ("10.0.0.3", "fd00::9", "::"),
    ],
)
def test_the_bootstrap_service_is_served_where_its_clients_come(
    bound: str, master: str, served: str, model_folder: Path
) -> None:
    model = str(build_model(QWEN3, model_folder))
    vllm_config = EngineArgs(model=model, dtype="float32", enforce_eager=True).create_engine_config()
    vllm_config.parallel_config.data_parallel_master_ip = master
    made = read_options(vllm_config, parse_config({"bootstrap_port": 8998}), rank=0, host=bound).bootstrap
    assert made is not None
    assert made.serve == (served, 8998)
    assert made.url == ("http://[fd00::9]:8998" if ":" in master else "http://127.0.0.1:8998")
