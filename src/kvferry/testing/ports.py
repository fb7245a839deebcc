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
    while True:
        port = _source.randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
