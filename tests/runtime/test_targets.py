"""Where a producer may write to: what is refused before a byte moves, and that the checked address is the used one."""

import asyncio
import socket
from typing import Any

import numpy as np
import pytest

from kvferry.control import Networks
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.layout import Region
from kvferry.plan import Descriptors
from kvferry.runtime.options import PRIVATE_NETWORKS
from kvferry.runtime.targets import allowed_target
from kvferry.transport import MooncakeTransport, SubmissionState, wait


def target(address: str, networks: Networks = PRIVATE_NETWORKS, *, transport: str = "mooncake") -> str:
    return asyncio.run(allowed_target(address, networks, transport=transport))


def refused(address: str, networks: Networks = PRIVATE_NETWORKS) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        target(address, networks)
    assert caught.value.reason is ProtocolReason.TARGET_REFUSED
    return caught.value.message


def listed(*texts: str) -> Networks:
    return Networks.parse(texts, option="write_targets")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "10.1.2.3:65535", "172.31.255.255:9", "192.168.1.1:12345", "169.254.3.4:80"]
    + ["[::1]:5", "[fd00::7]:5", "[fe80::1%eth0]:5", "[::ffff:10.0.0.1]:5"],
)
def test_private_addresses_are_taken_as_they_are(address: str) -> None:
    assert target(address) == address


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8:1", "172.32.0.1:1", "100.64.0.1:1", "0.0.0.0:1", "224.0.0.1:1", "[2001:db8::1]:1", "[::]:1"]
    + ["[::ffff:8.8.8.8]:1", "11.0.0.0:1"],
)
def test_others_need_to_be_listed(address: str) -> None:
    assert "write_targets" in refused(address)
    assert target(address, listed("0.0.0.0/0", "::/0")) == address


@pytest.mark.parametrize(
    "address",
    ["", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:x", "10.0.0.1:\u0661", ":80"]
    + ["10.0.0.1:99999999999999", "10.0.0.1:" + "01" * 3000, "[]:80", "x" * 300 + ":80"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    assert "host:port" in refused(address)


def test_only_what_is_listed_counts() -> None:
    assert "10.9.0.0/16" in refused("127.0.0.1:1", listed("10.9.0.0/16"))
    assert target("10.9.1.1:1", listed("10.9.0.0/16")) == "10.9.1.1:1"
    assert "no network" in refused("127.0.0.1:1", listed())


def test_a_name_is_resolved_checked_and_replaced_by_its_address() -> None:
    known = {one[4][0] for one in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)}
    made = target("localhost:7")
    assert made.rpartition(":")[0].strip("[]") in known
    assert "8.0.0.0/8" in refused("localhost:7", listed("8.0.0.0/8"))
    assert "resolved" in refused("no-such-host.invalid:7")
    assert target("0177.0.0.1:7") == "127.0.0.1:7"  # as the engine's own resolver reads it


def test_every_address_of_a_name_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rebound": ["10.0.0.1", "93.184.216.34"]}
    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        if host not in answers:
            return real(host, *rest, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in answers[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "93.184.216.34" in refused("rebound:7")
    answers["rebound"] = ["10.0.0.1"]
    assert target("rebound:7") == "10.0.0.1:7"


def test_transports_without_hosts_are_left_alone() -> None:
    assert target("cma:1:2:3:x", listed(), transport="cma") == "cma:1:2:3:x"


@pytest.mark.mooncake
def test_the_engine_takes_the_resolved_address_of_a_receiver_that_has_a_name() -> None:
    there, here = np.zeros(4096, np.uint8), np.full(4096, 7, np.uint8)
    receiver, writer = MooncakeTransport("localhost"), MooncakeTransport("127.0.0.1")
    try:
        receiver.register([Region(there.ctypes.data, 4096)])
        writer.register([Region(here.ctypes.data, 4096)])
        named = receiver.address()
        assert named.startswith("localhost:")
        peer = writer.open_peer(target(named), [Region(there.ctypes.data, 4096)])
        rows = Descriptors.proven(
            np.array([here.ctypes.data]), np.array([there.ctypes.data]), np.array([4096], np.int64)
        )
        assert wait(writer.submit(peer, rows), timeout_s=20) is SubmissionState.DONE
        assert (there == 7).all()
    finally:
        writer.close()
        receiver.close()
