"""Messages between processes: a ZeroMQ exchange in upstream's form, and the bootstrap service.

Glossary
    listener   the producer's socket; a *connection* is one consumer as it names it
    link       one connection of a consumer to one producer rank, for one life; lost once, never made again
    door       a listener and who may connect to it: open, listed networks, or holders of the shared secret
    directory  who has registered; a *card* is what kvferry adds to upstream's entries
    hello      a pull that no rank is paired with, to learn whether a producer is kvferry
"""

from kvferry.control.bootstrap import BootstrapService
from kvferry.control.bootstrap_client import BootstrapClient, FoundEngine
from kvferry.control.cache_info import read_cache_info
from kvferry.control.directory import Directory, EngineCard, EngineEntry, RankCard, RankEntry, Registration
from kvferry.control.doors import CurveKeys, Guard, Keyring, ListedDoor, SecureDoor, require_curve
from kvferry.control.hello import greet
from kvferry.control.interfaces import ALL, every_interface, listen_on
from kvferry.control.links import Link, Links
from kvferry.control.listener import Listener
from kvferry.control.networks import Networks
from kvferry.control.secret import Secret, find_secret
from kvferry.control.signing import Signer, Verifier
from kvferry.control.sockets import SocketOptions
from kvferry.control.tls import ServerTls, client_context

__all__ = [
    "ALL",
    "BootstrapClient",
    "BootstrapService",
    "CurveKeys",
    "Directory",
    "EngineCard",
    "EngineEntry",
    "FoundEngine",
    "Guard",
    "Keyring",
    "Link",
    "Links",
    "ListedDoor",
    "Listener",
    "Networks",
    "RankCard",
    "RankEntry",
    "Registration",
    "Secret",
    "SecureDoor",
    "ServerTls",
    "Signer",
    "SocketOptions",
    "Verifier",
    "client_context",
    "every_interface",
    "find_secret",
    "greet",
    "listen_on",
    "read_cache_info",
    "require_curve",
]
