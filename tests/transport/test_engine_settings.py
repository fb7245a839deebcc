"""Which protocol an engine will use is decided before it is built, not guessed from its return code."""

import pytest

from kvferry.errors import ConfigError, ConfigReason, TransportError, TransportReason
from kvferry.transport.engine_settings import (
    DEFAULTS,
    Build,
    check_devices,
    check_family,
    devices_of,
    engine_ports,
    engine_variables,
    family_settings,
    missing_settings,
    outstanding_limit,
    parse_variables,
    settings_for,
)

PLAIN = Build(frozenset())
NVLINK = Build(frozenset({"SUPPORT_MNNVL", "SUPPORT_INTRA_NVLINK"}))
EFA = Build(frozenset({"SUPPORT_EFA"}))


def test_the_operators_settings_are_kept() -> None:
    assert missing_settings({}) == dict(DEFAULTS)
    chosen = {"MC_LOG_LEVEL": "INFO"}
    assert missing_settings(chosen) == {name: value for name, value in DEFAULTS.items() if name != "MC_LOG_LEVEL"}


@pytest.mark.parametrize(
    ("value", "limit"), [(None, 1000), ("1024", 1000), ("65535", 1000), ("128", 128), ("0", 1), ("many", 1000)]
)
def test_the_window_respects_a_shorter_queue(value: str | None, limit: int) -> None:
    environ = {} if value is None else {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": value}
    assert outstanding_limit(environ) == limit


@pytest.mark.parametrize(
    ("protocol", "build", "environ", "settings"),
    [
        ("tcp", PLAIN, {}, {"MC_FORCE_TCP": "1"}),
        ("tcp", NVLINK, {}, {"MC_FORCE_TCP": "1"}),
        ("rdma", PLAIN, {}, {}),
        ("efa", EFA, {}, {}),
        ("nvlink", NVLINK, {}, {"MC_FORCE_MNNVL": "1"}),
        ("nvlink_intra", NVLINK, {}, {"MC_INTRANODE_NVLINK": "1"}),
    ],
)
def test_what_the_engine_is_told(
    protocol: str, build: Build, environ: dict[str, str], settings: dict[str, str]
) -> None:
    assert settings_for(protocol, build, environ) == settings


@pytest.mark.parametrize(
    ("protocol", "build", "environ", "said"),
    [
        ("shm", PLAIN, {}, "unknown protocol 'shm'"),
        ("", PLAIN, {}, "unknown protocol ''"),
        ("TCP", PLAIN, {}, "unknown protocol 'TCP'"),
        ("efa", PLAIN, {}, "SUPPORT_EFA"),
        ("nvlink", PLAIN, {}, "SUPPORT_MNNVL"),
        ("rdma", EFA, {}, "ask for 'efa'"),
        ("rdma", PLAIN, {"MC_FORCE_TCP": "1"}, "MC_FORCE_TCP"),
        ("rdma", NVLINK, {"MC_INTRANODE_NVLINK": "1"}, "MC_INTRANODE_NVLINK"),
        ("rdma", NVLINK, {"MC_FORCE_MNNVL": "1"}, "MC_FORCE_MNNVL"),
        ("nvlink", NVLINK, {"MC_INTRANODE_NVLINK": "1"}, "forces 'nvlink_intra'"),
        ("tcp", PLAIN, {"MC_TCP_PROTO": "1"}, "before the bytes have arrived"),
    ],
)
def test_what_cannot_be_had_is_refused(protocol: str, build: Build, environ: dict[str, str], said: str) -> None:
    with pytest.raises(TransportError, match=said) as refusal:
        settings_for(protocol, build, environ)
    assert refusal.value.reason is TransportReason.WRONG_PROTOCOL


def test_devices_come_from_the_engines_own_report() -> None:
    assert devices_of('{"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cuda:0": [["mlx5_0"], []]}') == ("mlx5_0", "mlx5_1")
    assert devices_of('{"cpu:0": [[], []]}') == ()
    for report in ("", "[]", '{"cpu:0": 3}', "no devices"):
        with pytest.raises(TransportError) as refusal:
            devices_of(report)
        assert refusal.value.reason is TransportReason.ENGINE_FAULT


def test_a_device_protocol_without_a_device_is_refused() -> None:
    check_devices("rdma", ("mlx5_0",), "")
    check_devices("tcp", (), "")
    with pytest.raises(TransportError, match="silently use TCP") as refusal:
        check_devices("rdma", (), "mlx5_9")
    assert refusal.value.reason is TransportReason.WRONG_PROTOCOL


def test_an_ipv6_host_tells_the_engine_before_it_is_loaded_and_is_refused_after() -> None:
    assert family_settings("fd00::3", {}, loaded=False) == {"MC_USE_IPV6": "1"}
    assert family_settings("fd00::3", {"MC_USE_IPV6": "1"}, loaded=True) == {}
    assert family_settings("a-name", {}, loaded=True) == {}
    with pytest.raises(TransportError, match="loaded for IPv4"):
        family_settings("fd00::3", {}, loaded=True)
    with pytest.raises(TransportError, match="MC_USE_IPV6 is set"):
        family_settings("10.0.0.3", {"MC_USE_IPV6": "1"}, loaded=False)


@pytest.mark.parametrize(
    ("address", "environ"), [("[fd00::3]:4711", {}), ("10.0.0.3:4711", {"MC_USE_IPV6": "1"})], ids=["v6", "v4"]
)
def test_a_peer_of_the_other_family_is_refused_by_name(address: str, environ: dict[str, str]) -> None:
    with pytest.raises(TransportError, match="one family"):
        check_family(address, environ)
    check_family(address, {} if environ else {"MC_USE_IPV6": "1"})
    check_family("a-name:4711", environ)


def test_settings_for_the_engine_are_taken_by_name() -> None:
    assert parse_variables(["MC_GID_INDEX=3", "WITH_NVIDIA_PEERMEM=1", "MC_LOG_DIR=/a=b"]) == {
        "MC_GID_INDEX": "3",
        "WITH_NVIDIA_PEERMEM": "1",
        "MC_LOG_DIR": "/a=b",
    }
    assert parse_variables([]) == {}


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["MC_GID_INDEX"], "NAME=value"),
        (["LD_PRELOAD=x.so"], "a name that the engine reads"),
        (["MC_gid=3"], "a name that the engine reads"),
        (["MC_IB_TC=\0"], "NAME=value"),
        (["MC_FORCE_TCP=1"], "mooncake_protocol says it"),
        (["MC_TCP_PROTO=1"], "before the bytes have arrived"),
        (["MC_USE_IPV6=1"], "family of host"),
        (["MC_IB_TC=1", "MC_IB_TC=2"], "given once"),
    ],
)
def test_settings_that_other_options_decide_or_that_nobody_reads_are_refused(pairs: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        parse_variables(pairs)
    assert refusal.value.reason is ConfigReason.INVALID_VALUE


def test_a_devices_memory_needs_an_engine_that_knows_devices() -> None:
    PLAIN.check_memory(["cpu"])
    Build(frozenset({"SUPPORT_CUDA"})).check_memory(["cpu", "cuda:3"])
    with pytest.raises(TransportError, match="cannot take cuda:3 memory") as refusal:
        PLAIN.check_memory(["cpu", "cuda:3"])
    assert refusal.value.reason is TransportReason.UNAVAILABLE


def test_what_the_environment_tells_an_engine() -> None:
    environ = {"MC_MIN_RPC_PORT": "21000", "MC_MAX_RPC_PORT": "many", "PATH": "/", "VLLM_HOST_IP": "10.0.0.3"}
    assert engine_variables(environ) == {"MC_MAX_RPC_PORT": "many", "MC_MIN_RPC_PORT": "21000"}
    assert engine_ports(environ) == (21000, 17000)
    assert engine_ports({}) == (15000, 17000)
