"""A checkup decides as it says: who wins, what is refused, what strangers can reach, what arrives."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import ConfigError, TransportError, TransportReason
from kvferry.runtime.checkup import (
    Deployment,
    LocalAddress,
    Verdict,
    Way,
    check_address,
    check_exposure,
    check_ports,
    choices_of,
    deliver_to_peer,
    deliver_to_self,
    local_addresses,
    require_private_network,
    resolve_host,
    skipped,
)
from kvferry.runtime.checkup import deployment as settings
from kvferry.runtime.checkup.line import Line
from kvferry.runtime.checkup.marker import PAGE, compare_page, digest_parts, receive_marker, write_marker
from kvferry.transport import CmaTransport

HOME = (LocalAddress("lo", "127.0.0.1"), LocalAddress("lo", "::1"), LocalAddress("eth0", "10.0.0.3"))
OUTSIDE = (*HOME, LocalAddress("eth1", "203.0.113.9"), LocalAddress("eth1", "8.8.4.4"))


def chosen(deployment: Deployment, environ: dict[str, str] | None = None) -> dict[str, tuple[str, str]]:
    choices, _ = choices_of(deployment, HOME, environ or {})
    return {one.name: (one.value, one.why) for one in choices}


# ------------------------------------------------------------------------------------------------ who decides


def test_an_option_wins_over_a_variable_and_a_variable_over_what_is_detected() -> None:
    environ = {"VLLM_HOST_IP": "10.0.0.3", "VLLM_MOONCAKE_BOOTSTRAP_PORT": "9001"}
    option = Deployment(host="127.0.0.1", bootstrap_port=9002, explicit=frozenset({"host", "bootstrap_port"}))
    assert chosen(option, environ)["address"] == ("127.0.0.1", "option host")
    assert chosen(option, environ)["bootstrap"] == (
        "port 9002, served by rank 0 on 0.0.0.0, every interface in IPv4",
        "option bootstrap_port",
    )
    assert [one.said for one in skipped(option, environ)] == [
        "VLLM_HOST_IP=10.0.0.3: option host wins",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT: option bootstrap_port wins",
    ]
    variable = Deployment()
    assert chosen(variable, environ)["address"] == ("10.0.0.3", "VLLM_HOST_IP")
    assert chosen(variable, environ)["bootstrap"][1] == "VLLM_MOONCAKE_BOOTSTRAP_PORT"
    assert skipped(variable, environ) == ()
    assert chosen(Deployment(host="10.0.0.3"))["bootstrap"] == (
        "port 8998, served by rank 0 on 0.0.0.0, every interface in IPv4",
        "default",
    )


@pytest.mark.parametrize(
    "deployment", [Deployment(host="::1"), Deployment(host="10.0.0.3", register_host="fd00::9")], ids=["host", "vLLM"]
)
def test_an_ipv6_address_has_the_bootstrap_service_in_both_families(deployment: Deployment) -> None:
    assert chosen(deployment)["bootstrap"] == (
        "port 8998, served by rank 0 on [::], every interface in IPv6 and IPv4",
        "default",
    )


def test_what_the_engine_is_told_and_where_it_will_listen() -> None:
    environ = {"MC_IB_TC": "7", "MC_LOG_LEVEL": "INFO"}
    told = Deployment(host="10.0.0.3", variables=("MC_IB_TC=3", "MC_MIN_RPC_PORT=16000"))
    assert chosen(told, environ)["engine variables"] == (
        "MC_IB_TC=3, MC_LOG_LEVEL=INFO, MC_MIN_RPC_PORT=16000",
        "MC_IB_TC: option mooncake_env; MC_LOG_LEVEL: environment; MC_MIN_RPC_PORT: option mooncake_env",
    )
    assert chosen(told, environ)["engine ports"] == (
        "two free ones from 16000 to 17000 for each engine",
        "MC_MIN_RPC_PORT: option mooncake_env",
    )
    assert [one.said for one in skipped(told, environ)] == ["MC_IB_TC=7: option mooncake_env wins"]
    plain = chosen(Deployment(host="10.0.0.3"))
    assert plain["engine ports"][1] == "the engine's default"
    assert "engine variables" not in plain
    cma = Deployment(transport="cma", host="10.0.0.3", variables=("MC_IB_TC=3",), explicit=frozenset({"mooncake_env"}))
    assert not {"engine ports", "engine variables"} & set(chosen(cma, environ))
    assert [one.said for one in skipped(cma, environ)] == ["option mooncake_env: the cma transport has none"]


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine one with network devices of these names."""
    monkeypatch.setattr(settings, "_INFINIBAND", tmp_path / "infiniband")

    def found(*names: str) -> None:
        for name in names:
            (tmp_path / "infiniband" / name).mkdir(parents=True)

    return found


def mooncake(*explicit: str, **options: str) -> dict[str, tuple[str, str]]:
    return chosen(Deployment(host="10.0.0.3", explicit=frozenset(explicit), **options))


def test_the_protocol_is_the_default_or_what_was_asked_for_and_never_what_was_detected(
    devices: Callable[..., None],
) -> None:
    none = "this machine has no RDMA device"
    assert mooncake()["protocol"] == ("tcp", f"default; {none}")
    assert mooncake("mooncake_protocol", protocol="tcp")["protocol"] == ("tcp", f"option mooncake_protocol; {none}")
    assert mooncake("mooncake_protocol", protocol="rdma")["protocol"] == ("rdma", f"option mooncake_protocol; {none}")
    devices("mlx5_1", "mlx5_0")
    seen = "this machine has mlx5_0, mlx5_1"
    assert mooncake()["protocol"] == ("tcp", f"default; {seen}")
    assert mooncake("mooncake_protocol", protocol="tcp")["protocol"] == ("tcp", f"option mooncake_protocol; {seen}")
    assert mooncake("mooncake_protocol", protocol="rdma")["protocol"] == ("rdma", f"option mooncake_protocol; {seen}")


@pytest.mark.parametrize(
    ("protocol", "value"),
    [
        ("tcp", "none needed"),
        ("rdma", "all that it finds"),
        ("efa", "all that it finds"),
        ("nvlink", "none needed"),
        ("nvlink_intra", "none needed"),
    ],
)
def test_a_device_that_was_named_wins_over_those_detected(
    protocol: str, value: str, devices: Callable[..., None]
) -> None:
    assert mooncake(protocol=protocol)["device"] == (
        value,
        "this machine has no RDMA device; device_name is not set",
    )
    devices("mlx5_0")
    assert mooncake(protocol=protocol)["device"] == (value, "this machine has mlx5_0; device_name is not set")
    named = mooncake("device_name", protocol=protocol, device="mlx5_7,mlx5_8")
    assert named["device"] == ("mlx5_7,mlx5_8", "option device_name")


def test_the_side_channel_takes_any_free_port_unless_one_was_named() -> None:
    def port(*explicit: str, number: int = 0) -> tuple[str, str]:
        deployment = Deployment(host="10.0.0.3", side_channel_port=number, explicit=frozenset(explicit))
        return chosen(deployment, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"})["side channel port"]

    assert port() == ("any free", "default")
    assert port("side_channel_port") == ("any free", "option side_channel_port")
    assert port("side_channel_port", number=7100) == ("7100 plus the rank", "option side_channel_port")


def test_without_any_setting_the_address_is_one_of_this_machine() -> None:
    choices, host = choices_of(Deployment(), local_addresses(), {})
    assert host.ip in {one.ip for one in local_addresses()}
    assert "detected" in next(one.why for one in choices if one.name == "address")


def test_options_that_mean_nothing_beside_others_are_said() -> None:
    cma = Deployment(transport="cma", host="10.0.0.3", explicit=frozenset({"transport", "device_name"}))
    assert [one.said for one in skipped(cma, {})] == ["option device_name: the cma transport has none"]
    assert "device" not in chosen(cma)
    elsewhere = Deployment(
        host="10.0.0.3", bootstrap_address="10.0.0.9:8998", bootstrap_port=1, explicit=frozenset({"bootstrap_port"})
    )
    assert [one.verdict for one in skipped(elsewhere, {})] == [Verdict.SKIPPED]
    assert chosen(elsewhere)["bootstrap"] == ("10.0.0.9:8998", "option bootstrap_server_address")


def test_variables_of_other_connectors_are_said_to_be_without_effect() -> None:
    environ = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "60", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    assert [one.said for one in skipped(Deployment(host="10.0.0.3"), environ)] == [
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: not read here; in its place: options publish_timeout and pull_timeout",
        "VLLM_NIXL_SIDE_CHANNEL_PORT: not read here; in its place: option side_channel_port",
    ]


# ------------------------------------------------------------------------------------------------- addresses


def test_the_kernels_list_has_the_loopback_addresses() -> None:
    assert LocalAddress("lo", "127.0.0.1") in local_addresses()


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("0.0.0.0", "every address"),
        ("::", "every address"),
        ("198.51.100.7", "no address of this machine"),
        ("fe80::1", "link-local"),
        ("no-such-name.invalid", "neither an IP address nor a name"),
        ("a" * 70 + ".example", "neither an IP address nor a name"),
    ],
)
def test_a_host_that_peers_could_not_use_is_refused_by_what_is_wrong(host: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_host(host, HOME)


def test_ipv6_that_is_off_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"host ::1 is no address .* 127\.0\.0\.1 and no IPv6 address: IPv6 is off here"
    ):
        resolve_host("::1", (LocalAddress("lo", "127.0.0.1"),))
    assert resolve_host("127.0.0.2", HOME).ip == "127.0.0.2"
    with pytest.raises(ConfigError, match=r"this machine has [^a-z]*$"):
        resolve_host("fd00::9", (LocalAddress("lo", "127.0.0.1"), LocalAddress("lo", "::1")))


def test_a_name_becomes_one_address_and_an_address_stays() -> None:
    assert resolve_host("localhost", HOME).ip == "127.0.0.1"
    assert (resolve_host("::1", HOME).ip, resolve_host("[::1]", HOME).interface) == ("::1", "lo")
    assert resolve_host("10.0.0.3", HOME).interface == "eth0"
    assert check_address(resolve_host("localhost", HOME)).verdict is Verdict.WARNING
    assert check_address(resolve_host("127.0.0.1", HOME)).verdict is Verdict.NOTE
    assert check_address(resolve_host("10.0.0.3", HOME)).verdict is Verdict.OK


# -------------------------------------------------------------------------------------------- who can reach it


def test_a_public_interface_is_refused_even_when_another_address_is_bound() -> None:
    deployment = Deployment(host="10.0.0.3", private_only=True)
    host = resolve_host("10.0.0.3", OUTSIDE)
    require_private_network(deployment, host, HOME)
    with pytest.raises(ConfigError, match=r"8\.8\.4\.4 on eth1 is public"):
        require_private_network(deployment, host, OUTSIDE)
    assert check_exposure(deployment, host, OUTSIDE).verdict is Verdict.FAILED
    require_private_network(replace(deployment, private_only=False), host, OUTSIDE)
    assert check_exposure(replace(deployment, private_only=False), host, OUTSIDE).verdict is Verdict.WARNING


def test_what_listens_on_one_address_alone_is_judged_by_that_address() -> None:
    quiet = Deployment(transport="cma", produces=False, host="10.0.0.3", private_only=True)
    require_private_network(quiet, resolve_host("10.0.0.3", OUTSIDE), OUTSIDE)
    assert check_exposure(quiet, resolve_host("10.0.0.3", OUTSIDE), OUTSIDE).verdict is Verdict.OK
    with pytest.raises(ConfigError, match=r"8\.8\.4\.4 is public"):
        require_private_network(quiet, resolve_host("8.8.4.4", OUTSIDE), OUTSIDE)
    serving = replace(quiet, produces=True)
    with pytest.raises(ConfigError, match="bootstrap"):
        require_private_network(serving, resolve_host("10.0.0.3", OUTSIDE), OUTSIDE)


def test_a_public_ipv6_address_counts_where_something_listens_in_ipv6() -> None:
    here = (*HOME, LocalAddress("eth0", "2600::7"))
    host = resolve_host("10.0.0.3", here)
    bootstrap_alone = Deployment(transport="cma", host="10.0.0.3", private_only=True)
    require_private_network(bootstrap_alone, host, here)
    assert check_exposure(bootstrap_alone, host, here).facts["addresses"] == ["10.0.0.3"]
    for everywhere in (
        replace(bootstrap_alone, transport="mooncake"),
        replace(bootstrap_alone, register_host="fd00::9"),
    ):
        with pytest.raises(ConfigError, match="2600::7 on eth0 is public"):
            require_private_network(everywhere, host, here)
        assert check_exposure(replace(everywhere, private_only=False), host, here).facts["addresses"] == [
            "10.0.0.3",
            "2600::7",
        ]


def test_addresses_that_cannot_be_listed_count_as_public() -> None:
    deployment = Deployment(host="10.0.0.3", private_only=True)
    with pytest.raises(ConfigError, match="cannot be listed"):
        require_private_network(deployment, resolve_host("10.0.0.3", ()), ())


def test_the_warning_names_the_addresses_and_the_way_to_close_them() -> None:
    finding = check_exposure(Deployment(), resolve_host("127.0.0.1", HOME), HOME)
    assert finding.verdict is Verdict.WARNING
    assert "10.0.0.3" in finding.said
    assert "all registered memory" in finding.said
    assert "firewall" in finding.advice


def test_a_taken_port_fails_and_a_free_one_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        deployment = Deployment(host="127.0.0.1", side_channel_port=port, produces=False)
        (finding,) = check_ports(deployment, resolve_host("127.0.0.1", HOME), {})
        assert (finding.verdict, finding.facts["port"]) == (Verdict.FAILED, port)
    (finding,) = check_ports(deployment, resolve_host("127.0.0.1", HOME), {})
    assert finding.verdict is Verdict.OK


def test_the_bootstrap_port_is_tried_where_it_will_be_served() -> None:
    if "::1" not in {one.ip for one in local_addresses()}:
        pytest.skip("no IPv6 here")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        (finding,) = check_ports(Deployment(bootstrap_port=port), resolve_host("::1", HOME), {})
        assert (finding.verdict, finding.said) == (
            Verdict.FAILED,
            f"[::]:{port} cannot be bound: Address already in use",
        )
        (finding,) = check_ports(Deployment(bootstrap_port=port), resolve_host("127.0.0.1", HOME), {})
        assert (finding.verdict, finding.said) == (Verdict.OK, f"0.0.0.0:{port} is free")
    (finding,) = check_ports(Deployment(bootstrap_port=port), resolve_host("::1", HOME), {})
    assert (finding.verdict, finding.said) == (Verdict.OK, f"[::]:{port} is free in IPv6 and IPv4")


# ----------------------------------------------------------------------------------------------- marker pages


@pytest.fixture
def peers() -> Iterator[tuple[Line, Line]]:
    ours, theirs = (Line(one) for one in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "way",
    [
        Way("cma", "127.0.0.1"),
        pytest.param(Way("mooncake", "127.0.0.1"), marks=pytest.mark.mooncake),
    ],
    ids=lambda way: way.transport,
)
def test_a_child_writes_a_page_that_is_equal_at_both_ends(way: Way) -> None:
    delivery = deliver_to_self(way)
    assert (delivery.transport, delivery.nbytes, len(delivery.seconds)) == (way.transport, PAGE, 2)
    assert all(0 < one < 30 for one in delivery.seconds)


def test_a_page_that_differs_is_told_to_the_writer(peers: tuple[Line, Line]) -> None:
    writer, receiver = peers
    failure: list[TransportError] = []

    def receive() -> None:
        try:
            receive_marker(receiver, Way("cma", "127.0.0.1"))
        except TransportError as error:
            failure.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    engine = CmaTransport()
    writer.say(marker=1, transport="cma", protocol="process_vm_writev", writer=engine.address(), nbytes=PAGE)
    writer.hear()
    page = np.zeros(PAGE, np.uint8)
    page[5] = 1
    writer.say(digests=digest_parts(page), seconds=0.1)  # says that it wrote, and has not
    with pytest.raises(TransportError, match="1 of 16 parts of the page that arrived are others"):
        writer.hear()
    thread.join(10)
    engine.close()
    assert [one.reason for one in failure] == [TransportReason.ENGINE_FAULT]


def test_a_page_that_comes_after_the_word_is_told_from_one_that_never_comes() -> None:
    page, meant = np.zeros(PAGE, np.uint8), np.full(PAGE, 7, np.uint8)

    def arrive(seconds: float) -> None:
        page[:] = 7

    told = digest_parts(meant)
    assert compare_page(page, told, sleep=arrive) == (
        "the write was reported as done when 16 of 16 parts had not arrived; they came later"
    )
    assert compare_page(page, told) is None
    assert compare_page(page, [])


def test_a_refusal_of_either_side_reaches_the_other(peers: tuple[Line, Line]) -> None:
    writer, receiver = peers
    writer.say(marker=1, transport="pigeon", protocol="", writer="", nbytes=PAGE)
    with pytest.raises(TransportError, match="pigeon"):
        receive_marker(receiver, Way("cma", "127.0.0.1"))
    with pytest.raises(TransportError, match=r"the other side says: no transport 'pigeon'") as caught:
        writer.hear()
    assert caught.value.reason is TransportReason.UNAVAILABLE


@pytest.mark.parametrize("line", [b"HTTP/1.1 400 Bad Request\r\n", b"[]\n", b"{}\n", b"", b'{"page": -1}\n'])
def test_a_stranger_that_answers_otherwise_is_no_traceback(line: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            stream, _ = server.accept()
            with stream:
                stream.recv(4096)
                stream.sendall(line)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransportError) as caught:
            deliver_to_peer(server.getsockname()[:2], Way("cma", "127.0.0.1"))
        thread.join(10)
    assert caught.value.reason is TransportReason.PEER_UNREACHABLE


def test_nobody_there_says_what_should_run_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with pytest.raises(TransportError, match="doctor --serve"):
        deliver_to_peer(address, Way("cma", "127.0.0.1"))


def test_a_writer_closes_its_engine_when_the_receiver_hangs_up(peers: tuple[Line, Line]) -> None:
    writer, receiver = peers
    threads = set(threading.enumerate())
    receiver.close()
    with pytest.raises(TransportError):
        write_marker(writer, Way("cma", "127.0.0.1"))
    assert set(threading.enumerate()) == threads
