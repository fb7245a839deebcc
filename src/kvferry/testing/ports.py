"""Ports for servers in tests and demos.

A port that the kernel hands out for outgoing connections may be taken between the moment it is found free and the
moment a server binds it, by any connection of any process. So these come from below that range, at random.
"""

import random
import socket

LOWEST, HIGHEST = 15_000, 32_000
"""Linux takes ports for outgoing connections from 32,768 on, unless it is told otherwise."""

_source = random.SystemRandom()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, on an IPv4 address of this machine."""
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of ``count`` such ports in a row."""
    while True:
        first = _source.randrange(LOWEST, HIGHEST - count)
        if all(_is_free(host, first + place) for place in range(count)):
            return first


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
