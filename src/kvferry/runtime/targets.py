"""Where a producer may write to: the check between a consumer's word and the engine's first byte.

A consumer names the address that it receives at, and the engine would write to whatever that is. So the address has to
lie in the networks that are allowed. A name is resolved here, once; all that it resolves to must be allowed, and what
is handed to the engine is an address, so that nobody can let the name mean another one a moment later.

Transports whose addresses name no host (``cma``, ``memory``) have rules of their own and are left alone.
"""

import asyncio
import socket
from typing import Final

from kvferry.control import Networks
from kvferry.control.networks import plain_address
from kvferry.errors import ProtocolReason, RemoteProtocolError

HOSTLESS: Final = frozenset({"cma", "memory"})
"""Transports whose addresses name processes, not hosts."""

RESOLVE_TIMEOUT: Final = 5.0
MAX_NAME: Final = 253


async def allowed_target(address: str, networks: Networks, *, transport: str) -> str:
    """The address to write to, with the host as a number; raises ``RemoteProtocolError`` (TARGET_REFUSED)."""
    if transport in HOSTLESS:
        return address
    host, port = _split(address)
    if check_numeric_target(address, networks):
        return address
    found = await _resolve(host, address)
    _check(address, found, networks)
    return f"[{found[0]}]:{port}" if ":" in found[0] else f"{found[0]}:{port}"


def check_numeric_target(address: str, networks: Networks) -> bool:
    """The part of it that needs no resolver; whether that was all."""
    host, _ = _split(address)
    numeric = plain_address(host)
    if numeric is None:
        return False
    _check(address, [str(numeric)], networks)
    return True


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    digits = port.isascii() and port.isdecimal() and len(port) <= 5
    if not host or len(host) > MAX_NAME or not (digits and 0 < int(port) < 65_536):
        raise _refused(f"{address[:120]!r} is not host:port")
    return host, int(port)


async def _resolve(host: str, address: str) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise _refused(f"the host of {address[:120]!r} cannot be resolved: {type(error).__name__}") from error
    return list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))


def _check(address: str, found: list[str], networks: Networks) -> None:
    for one in found:
        if not networks.holds(one):
            meant = "" if one in address else f" ({one})"
            raise _refused(
                f"{address[:120]!r}{meant} is not in a network that this producer may write to ({networks}): list the "
                "network in write_targets of the producer, if the consumer belongs there"
            )


def _refused(message: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.TARGET_REFUSED, f"the consumer's address {message}")
