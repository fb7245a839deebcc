"""Which protocol an engine will use is decided before it is built, not guessed from its return code."""

import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.transport.engine_settings import (
    DEFAULTS,
    Build,
    check_devices,
    check_family,
    devices_of,
    family_settings,
    missing_settings,
    outstanding_limit,
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
