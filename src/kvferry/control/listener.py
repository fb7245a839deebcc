"""The producer's door: a ROUTER socket on which consumer ranks pull, and by which they are answered.

One payload frame each way, as upstream has it. A message of any other shape is dropped and counted; it never stops
the listener. A guard, where one is set, decides who may connect at all. Whether a consumer is still there is found out
by answering it: sending to a connection that is gone fails at once (mandatory routing), which is why open pulls are
kept alive by empty answers.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import zmq
import zmq.asyncio

from kvferry.control.doors import Gatekeeper, Guard
from kvferry.control.networks import plain_address
from kvferry.control.sockets import SocketOptions, deliver, endpoint, make_context, make_socket, send_now
from kvferry.errors import ConfigError, ConfigReason

logger = logging.getLogger(__name__)

_FRAMES: Final = 2

_KNOWN_PEERS: Final = 4_096
"""Connections whose peer's address is remembered."""


class Listener:
    """Receives on one address. Made, used and closed on one event loop.

    ``on_message(connection, data)`` and ``on_lost(connection)`` are called on that loop, never from inside ``send``.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[bytes, bytes], object],
        on_lost: Callable[[bytes], object],
        options: SocketOptions | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._options = options or SocketOptions()
        self._guard = guard
        self._keeper: Gatekeeper | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        """``tcp://host:port`` once started."""
        self.malformed = 0
        """Messages of another shape than one frame."""

    async def start(self, host: str, port: int = 0) -> str:
        """Bind to exactly this host; port 0 takes a free one. Returns the address."""
        self._context = make_context()
        self._socket = make_socket(self._context, zmq.ROUTER, self._options)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._guard is not None:
            self._keeper = Gatekeeper(self._context, self._guard)
            self._guard.arm(self._socket)
        try:
            self._socket.bind(endpoint(host, port or None))
        except zmq.ZMQError as error:
            await self.close()
            raise ConfigError(
                ConfigReason.INVALID_VALUE, f"cannot listen on {endpoint(host, port)}: {error.strerror}"
            ) from error
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        self.address = endpoint(host, int(bytes(bound).decode().rstrip("\0").rpartition(":")[2]))
        self._task = asyncio.get_running_loop().create_task(self._receive(self._socket))
        return self.address

    def address_of(self, connection: bytes) -> str:
        """The IP address that a connection comes from, while its message is being dealt with; else empty."""
        return self._peers.get(connection, "")

    @property
    def refused(self) -> int:
        """Connections that the guard has not let in."""
        return self._keeper.refused if self._keeper is not None else 0

    def send(self, connection: bytes, data: bytes) -> None:
        """Send one frame. To a connection that is gone nothing is sent and its loss is told."""
        if self._socket is None:
            return
        error = send_now(self._socket, [connection, data])
        if error is not None:
            logger.debug("a consumer is gone: %s", error)
            asyncio.get_running_loop().call_soon(self._on_lost, connection)

    async def close(self) -> None:
        """Stop; leaves no task, thread or port. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._keeper is not None:
            await self._keeper.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart(copy=False)
            if len(frames) != _FRAMES:
                self.malformed += 1
                logger.warning("a message of %d frames is dropped", len(frames) - 1)
                continue
            connection = frames[0].bytes
            self._remember(connection, frames[1])
            deliver(self._on_message, connection, frames[1].bytes)
            await asyncio.sleep(0)

    def _remember(self, connection: bytes, frame: zmq.Frame) -> None:
        try:
            address = plain_address(str(frame.get("Peer-Address")))
        except zmq.ZMQError:  # the connection is gone already, or this libzmq does not tell
            address = None
        self._peers[connection] = str(address or "")
        self._peers.move_to_end(connection)
        if len(self._peers) > _KNOWN_PEERS:
            self._peers.popitem(last=False)
