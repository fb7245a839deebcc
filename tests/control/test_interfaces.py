"""Which interfaces the bootstrap service listens on, asked over each of them."""

import asyncio
import socket
from collections.abc import Sequence

import httpx
import pytest

from kvferry.control import ALL, BootstrapService, every_interface, listen_on
from kvferry.errors import ConfigError, ConfigReason

LOOPBACKS = ("127.0.0.1", "[::1]")


def require_ipv6() -> None:
    try:
        listen_on("::1", 0).close()
    except OSError:
        pytest.skip("no IPv6 here")


def answered_at(*hosts: str) -> list[str]:
    """The loopback addresses at which a service answers that listens beside these hosts."""

    async def ask() -> list[str]:
        service = BootstrapService(on_release=lambda *_: None)
        port = await service.start(every_interface(*hosts), 0)
        try:
            return [address for address in LOOPBACKS if await answers(f"http://{address}:{port}/query")]
        finally:
            await service.close()

    return asyncio.run(ask())


async def answers(url: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            return (await client.get(url)).json() == {}
        except httpx.ConnectError:
            return False


@pytest.mark.parametrize(
    ("hosts", "where"),
    [
        (["::1", "127.0.0.1"], LOOPBACKS),
        (["10.0.0.3", "fd00::3"], LOOPBACKS),
        (["10.0.0.3", "127.0.0.1"], LOOPBACKS[:1]),
    ],
)
def test_beside_an_ipv6_address_both_families_are_served(hosts: Sequence[str], where: Sequence[str]) -> None:
    require_ipv6()
    assert answered_at(*hosts) == list(where)


def test_a_port_that_is_taken_in_one_family_is_not_free_in_both() -> None:
    require_ipv6()
    with listen_on("0.0.0.0", 0) as taken, pytest.raises(OSError, match="Address already in use$"):
        listen_on(ALL, taken.getsockname()[1])


def test_without_ipv6_it_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_ipv6", False)
    service = BootstrapService(on_release=lambda *_: None)
    with pytest.raises(ConfigError, match="cannot listen on :: port 0: IPv6 is off on this machine") as refusal:
        asyncio.run(service.start(ALL, 0))
    assert refusal.value.reason is ConfigReason.INVALID_VALUE
    assert answered_at("127.0.0.1") == ["127.0.0.1"]
