"""The ZeroMQ options that every socket of ours has, and what they buy.

Heartbeats are answered by the peer's own libzmq, so they need nothing of the peer's program: a dead or stopped process
is noticed in seconds, a busy one is not mistaken for either. A connection is one life: it is never made again behind
our back, because a message queued for the old process must not reach the new one at the same port.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from kvferry.errors import ConfigError, ConfigReason, ProtocolReason, RemoteProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """Times are seconds."""

    heartbeat: float = 1.0
    silence: float = 3.0
    """A peer whose libzmq has not answered for this long is lost."""

    connect: float = 3.0
    """So long may it take to connect and shake hands."""

    idle: float = 30.0
    """A shared connection that carries nothing for this long is closed."""

    max_message: int = 64 << 20
    """Bytes; a peer that sends a larger frame is cut off."""

    max_queued: int = 10_000
    """Frames waiting for one peer; at one more it is taken as lost."""

    max_unread: int = 10_000
    """Frames of one peer that wait to be read here; then its connection waits, and others do not.

    Heartbeats wait with it: a process that stays so far behind for as long as ``silence`` is lost to that peer. So this
    is more than a peer has under way when all goes well."""

    backlog: int = 1_024
    """Connections that wait to be accepted."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(ConfigReason.INVALID_VALUE, f"{name} must be above 0")


def make_context() -> zmq.asyncio.Context:
    """A context with room for many peers."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 60_000)
    return context


def make_socket(context: zmq.asyncio.Context, kind: int, options: SocketOptions) -> zmq.asyncio.Socket:
    """A socket with the options of this room."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, options.max_message)
    socket.setsockopt(zmq.SNDHWM, options.max_queued)
    socket.setsockopt(zmq.RCVHWM, options.max_unread)
    socket.setsockopt(zmq.BACKLOG, options.backlog)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(options.heartbeat * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(options.silence * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(options.connect * 1000))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, round(options.connect * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


def send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> zmq.ZMQError | None:
    """Send without waiting; the error if it cannot be done at once, to a peer that is gone or takes nothing."""
    sent = cast("asyncio.Future[object]", socket.send_multipart(frames, flags=zmq.NOBLOCK))
    error = sent.exception()  # a send that may not block is done when it returns
    if error is not None and not isinstance(error, zmq.ZMQError):
        raise error
    return error


def deliver(call: Callable[..., object], *args: object) -> None:
    """Hand a frame over. A fault in the callback is the loop's to report, and ends no socket."""
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 - whatever it is, the next frame is read
        loop = asyncio.get_running_loop()
        loop.call_exception_handler({"message": f"{call!r} failed on a frame", "exception": error})


def endpoint(host: str, port: int | None) -> str:
    """``tcp://host:port``; ``None`` stands for any free port."""
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{'*' if port is None else port}"


def check_endpoint(address: str) -> str:
    """An address that a peer gave us to connect to; raises :class:`RemoteProtocolError`."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        port = None
        parts = urlsplit("")
    if parts.scheme != "tcp" or not parts.hostname or not port or parts.path or parts.query or parts.username:
        raise RemoteProtocolError(ProtocolReason.MALFORMED, f"not an address tcp://host:port: {address[:200]!r}")
    return address
