"""The block that a rank logs at its start, and what it refuses to start with."""

from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ConfigError, ConfigReason
from kvferry.ids import EngineId, Incarnation
from kvferry.layout import Group, bind_layout
from kvferry.runtime import Local
from kvferry.runtime.checkup import LocalAddress, mooncake_version
from kvferry.runtime.checkup import deployment as settings
from kvferry.testing.layouts import page, side_by_side, worker
from kvferry.vllm.config import parse_config
from kvferry.vllm.deployment import deployment_of
from kvferry.vllm.startup import StartUp

HOME = (LocalAddress("lo", "127.0.0.1"), LocalAddress("eth0", "10.0.0.3"))


def local() -> Local:
    layers = [page(f"l{index}", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=4) for index in range(2)]
    bound = bind_layout(worker(side_by_side(layers, base=0), groups=[Group("attention", 16, sliding_window=64)]))
    incarnation = Incarnation(EngineId("p"), "0123456789abcdef")
    return Local(incarnation, "m", 0, bound.binding, (bound.placement,), 1, 1)


def block(extra: dict[str, Any], environ: dict[str, str] | None = None) -> list[str]:
    config = parse_config(extra)
    startup = StartUp.read(deployment_of(config, explicit=extra), here=HOME, environ=environ or {})
    return list(startup.lines(local(), config, listening="tcp://10.0.0.3:4711"))


def test_the_block_says_what_was_chosen_by_whom_and_what_the_cache_is() -> None:
    here = local()
    nbytes = sum(region.nbytes for region in here.regions)
    lines = block({"host": "10.0.0.3", "transport": "mooncake"})
    assert lines[0].endswith("rank 0 of 1 of engine p@01234567")
    assert "  transport mooncake (option transport)" in lines
    assert "  address 10.0.0.3 (option host)" in lines
    assert "  interface eth0 (it has that address, which is private)" in lines
    assert "  listens on tcp://10.0.0.3:4711" in lines
    assert f"  engine {mooncake_version()}" in lines
    assert (
        f"  layout {here.placement.fingerprint[:16]}: 2 components of 2 layers in 1 regions, {nbytes:,} bytes" in lines
    )
    assert "  group 0: attention, 16 tokens a block, window of 64" in lines
    assert any(line.startswith("  limits: published caches wait 480 s") for line in lines)
    exposed = "  warning: exposure: open on every interface: the Mooncake engine's ports"
    assert [line for line in lines if line.startswith(exposed)]


def test_the_block_says_how_the_engine_moves_bytes_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_INFINIBAND", tmp_path)
    bare = block({"host": "10.0.0.3"})
    assert "  protocol tcp (default; this machine has no RDMA device)" in bare
    assert "  device none needed (this machine has no RDMA device; device_name is not set)" in bare
    assert "  side channel port any free (default)" in bare
    (tmp_path / "mlx5_0").mkdir()
    detected = block({"host": "10.0.0.3", "mooncake_protocol": "rdma"})
    assert "  protocol rdma (option mooncake_protocol; this machine has mlx5_0)" in detected
    assert "  device all that it finds (this machine has mlx5_0; device_name is not set)" in detected
    named = block({"host": "10.0.0.3", "mooncake_protocol": "tcp", "device_name": "mlx5_7", "side_channel_port": 7100})
    assert "  protocol tcp (option mooncake_protocol; this machine has mlx5_0)" in named
    assert "  device mlx5_7 (option device_name)" in named
    assert "  side channel port 7100 plus the rank (option side_channel_port)" in named


def test_cma_has_no_engine_and_warns_of_what_does_not_apply() -> None:
    lines = block({"host": "127.0.0.1", "transport": "cma", "device_name": "mlx5_0"}, {"VLLM_HOST_IP": "10.0.0.3"})
    assert "  protocol process_vm_writev (what the cma transport is; CPU memory of one host)" in lines
    assert not [line for line in lines if line.startswith("  engine")]
    assert "  skipped: settings: option device_name: the cma transport has none" in lines
    assert "  skipped: settings: VLLM_HOST_IP=10.0.0.3: option host wins" in lines


def test_a_private_network_that_is_not_private_is_refused_at_the_start() -> None:
    deployment = deployment_of(parse_config({"host": "10.0.0.3", "require_private_network": True}))
    assert StartUp.read(deployment, here=HOME, environ={}).host.ip == "10.0.0.3"
    with pytest.raises(ConfigError, match="require_private_network"):
        StartUp.read(deployment, here=(*HOME, LocalAddress("eth1", "8.8.4.4")), environ={})


def test_prefill_context_parallelism_is_refused_by_name() -> None:
    """On a CPU vLLM itself refuses it, when its configuration is put together: so it is changed after that."""
    from vllm.config import ParallelConfig, VllmConfig

    from kvferry.vllm.endpoint import check_parallel

    config = VllmConfig()
    check_parallel(config)
    config.parallel_config = ParallelConfig(prefill_context_parallel_size=2)
    with pytest.raises(ConfigError, match="prefill context parallel size 2: only 1 is supported yet") as refusal:
        check_parallel(config)
    assert refusal.value.reason is ConfigReason.UNSUPPORTED_MODEL


def test_what_vllm_detects_counts_where_no_option_does() -> None:
    assert deployment_of(parse_config({}), detected_host="10.0.0.3").host == "10.0.0.3"
    chosen = deployment_of(parse_config({"host": "127.0.0.1"}), detected_host="10.0.0.3")
    assert (chosen.host, chosen.host_why) == ("127.0.0.1", "option host")


@pytest.mark.vllm
@pytest.mark.mooncake
def test_a_real_rank_logs_it_once(tmp_path: Path, model_folder: Path, forge: Any) -> None:
    pytest.importorskip("vllm")
    from kvferry.testing.engine_wire import EngineSpec
    from kvferry.testing.engines import start_engines
    from kvferry.testing.model_recipes import QWEN3
    from kvferry.testing.models import build_model, token_ids
    from kvferry.testing.pair import pair_spec

    model = build_model(QWEN3, model_folder)
    specs = [
        EngineSpec(name=name, model=str(model), dtype=QWEN3.dtype, block_size=64, num_blocks=32, max_model_len=1024)
        for name in ("prefill", "decode")
    ]
    spec = pair_spec(*specs, options={"transport": "mooncake"})
    with start_engines([spec.prefill], logs=tmp_path, forge=forge) as (prefill,):
        prefill.generate(token_ids("hello"), max_tokens=1, request_id="r")
    text = "\n".join(path.read_text(errors="replace") for path in tmp_path.iterdir() if path.is_file())
    assert text.count("rank 0 of 1 of engine") == 1
    assert text.count("transport mooncake (option transport)") == 1
    assert "listens on tcp://127.0.0.1:" in text
