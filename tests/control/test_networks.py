"""Networks, by value."""

import pytest

from kvferry.control import Networks
from kvferry.control.networks import MAX_NETWORKS, plain_address
from kvferry.errors import ConfigError


@pytest.mark.parametrize(
    ("networks", "inside", "outside"),
    [
        (["10.0.0.0/8"], ["10.0.0.0", "10.255.255.255", "::ffff:10.1.2.3"], ["11.0.0.0", "::a00:1", "fd00::1"]),
        (["fd00::/8"], ["fd00::1", "fdff::"], ["fe00::", "10.0.0.1"]),
        (["fe80::/10"], ["fe80::1%eth0"], ["fec0::1"]),
        (["192.0.2.7"], ["192.0.2.7"], ["192.0.2.8"]),
        (["0.0.0.0/0"], ["8.8.8.8", "::ffff:8.8.8.8"], ["::1", "2001:db8::1"]),
        ([], [], ["127.0.0.1", "::1"]),
    ],
)
def test_what_lies_in_them(networks: list[str], inside: list[str], outside: list[str]) -> None:
    made = Networks.parse(networks, option="x")
    assert [one for one in inside if not made.holds(one)] == []
    assert [one for one in outside if made.holds(one)] == []
    assert not any(made.holds(text) for text in ("", "localhost", "10", "10.0.0.0/8", "\u0661.0.0.1"))


@pytest.mark.parametrize("text", ["", "here", "10.0.0.1/8", "10.0.0.0/33", "::1/129", "10.0.0.0-10.0.0.9"])
def test_what_is_no_network_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Networks.parse(["10.0.0.0/8", text], option="write_targets")
    assert "write_targets" in caught.value.message
    assert repr(text) in caught.value.message


def test_a_list_has_an_end() -> None:
    with pytest.raises(ConfigError):
        Networks.parse(["10.0.0.1"] * (MAX_NETWORKS + 1), option="x")


def test_addresses_are_made_plain() -> None:
    assert str(plain_address("::ffff:127.0.0.1")) == "127.0.0.1"
    assert str(plain_address("fe80::1%eth0")) == "fe80::1"
    assert plain_address("name") is None
