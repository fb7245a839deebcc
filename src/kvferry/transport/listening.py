"""On which TCP ports this process listens, as the kernel has it.

An engine of others' tells one of its ports at best, and takes more. What it took are those that are there after it was
built and were not before. Other threads may have begun to listen meanwhile, so there may be too many, never too few.
And it takes any that are free; to keep it from some, they are taken while it looks. To keep every process of the host
from some, they are bound for good: nobody else can bind them then, and who connects is refused.
"""

import contextlib
import os
import re
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
_LISTENING: Final = "0A"
_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_FILES: Final = Path("/proc/self/fd")


def listening_ports() -> frozenset[int]:
    """The ports; none where the kernel does not say."""
    ours: set[str] = set()
    try:
        for name in os.listdir(_FILES):
            ours |= _inode_of(name)
    except OSError:
        return frozenset()
    return frozenset(port for table in _TABLES for port in _ports_in(table, ours))


def _inode_of(name: str) -> set[str]:
    try:
        found = _SOCKET.fullmatch(os.readlink(_FILES / name))
    except OSError:
        return set()  # closed meanwhile
    return {found[1]} if found else set()


def _ports_in(table: Path, inodes: set[str]) -> set[int]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return set()
    rows = [line.split() for line in lines]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING and row[9] in inodes}


@contextlib.contextmanager
def taken(ports: Collection[int]) -> Iterator[None]:
    """Listen on these ports, as far as nobody else does, and speak to nobody who comes."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            for family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):
                    stack.enter_context(_take(family, port))
        yield


def _take(family: socket.AddressFamily, port: int) -> socket.socket:
    one = socket.socket(family)
    try:
        # Connections of the one who listened here last do not stand in the way, and one that listens stops all others.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(("", port))
        one.listen(1)
    except OSError:
        one.close()
        raise
    return one


class Kept:
    """Ports on which nobody on this host listens until they are let go, and those who connect are refused."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def keep(self, ports: Collection[int]) -> None:
        """Bind these ports, as far as nobody else has them; those that are kept already stay so."""
        for port in set(ports) - self._held.keys():
            with contextlib.suppress(OSError):
                self._held[port] = _bind(port)

    def close(self) -> None:
        """Let all of them go."""
        while self._held:
            self._held.popitem()[1].close()


def _bind(port: int) -> socket.socket:
    """Bind a port in both families, without listening."""
    both = socket.has_dualstack_ipv6()
    one = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        if both:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Connections of the one who listened here last do not stand in the way; after that nobody may share the port.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("", port))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        one.close()
        raise
    return one
