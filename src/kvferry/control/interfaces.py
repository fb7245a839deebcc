"""Which interfaces the bootstrap service listens on: all of them, in the families that its clients may come in.

Beside an engine with an IPv4 address it listens on ``0.0.0.0``. Beside one with an IPv6 address it listens on ``::``,
on one socket that takes IPv4 too: routers may know the machine by either, and vLLM has ranks register at 127.0.0.1.
"""

import errno
import os
import socket
from typing import Final

ALL_IPV4: Final = "0.0.0.0"
ALL: Final = "::"
"""Every address of both families."""


def every_interface(*hosts: str) -> str:
    """Where a service listens that is called by these addresses, or names.

    >>> every_interface("10.0.0.3", "127.0.0.1"), every_interface("fd00::3", "127.0.0.1")
    ('0.0.0.0', '::')
    """
    return ALL if any(":" in host for host in hosts) else ALL_IPV4


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket on exactly this address, for ``::`` on both families; raises ``OSError``."""
    both = host == ALL
    if both and not socket.has_dualstack_ipv6():
        raise OSError(errno.EAFNOSUPPORT, "IPv6 is off on this machine")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:  # the library's words repeat the address
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error
