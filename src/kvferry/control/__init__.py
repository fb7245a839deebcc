"""Messages between processes: a ZeroMQ exchange in upstream's form, and the bootstrap service.

Glossary
    listener   the producer's socket; a *connection* is one consumer as it names it
    link       one connection of a consumer to one producer rank, for one life; lost once, never made again
    directory  who has registered; a *card* is what kvferry adds to upstream's entries
    hello      a pull that no rank is paired with, to learn whether a producer is kvferry
"""

from kvferry.control.bootstrap import BootstrapService
from kvferry.control.bootstrap_client import BootstrapClient, FoundEngine
from kvferry.control.directory import Directory, EngineCard, EngineEntry, RankCard, RankEntry, Registration
from kvferry.control.hello import greet
from kvferry.control.links import Link, Links
from kvferry.control.listener import Listener
from kvferry.control.sockets import SocketOptions

__all__ = [
    "BootstrapClient",
    "BootstrapService",
    "Directory",
    "EngineCard",
    "EngineEntry",
    "FoundEngine",
    "Link",
    "Links",
    "Listener",
    "RankCard",
    "RankEntry",
    "Registration",
    "SocketOptions",
    "greet",
]
