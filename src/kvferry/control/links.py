"""The consumer's side of the exchange: connections to producer ranks, each for one life.

A :class:`Link` is one DEALER socket, one connection, never reconnected; when it cannot be made, breaks, or its peer's
libzmq falls silent, it is lost and over. :class:`Links` keeps them by pull: pulls to kvferry producers share one
connection for each address and are told apart by their number, a pull to an upstream producer, whose errors name
nobody, has a connection of its own.

With keys, every link speaks CURVE and never falls back to plain, but for those to a producer of upstream's.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvferry.control.doors import CurveKeys, Keyring, be_client
from kvferry.control.sockets import SocketOptions, check_endpoint, deliver, make_context, make_socket, send_now
from kvferry.errors import ProtocolReason, RemoteProtocolError

logger = logging.getLogger(__name__)

_LOST: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CLOSE_FAILED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
LATE_TURNS: Final = 50
"""Turns of the loop between a deadline that passed and the verdict: what had come before it is seen in them."""

_WATCHED: Final = _LOST | zmq.EVENT_HANDSHAKE_SUCCEEDED

K = TypeVar("K", bound=Hashable)


class Link:
    """One connection. ``on_frame(data)`` for each frame, ``on_lost()`` at most once, both on the loop."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        *,
        on_frame: Callable[[bytes], object],
        on_lost: Callable[[], object],
        options: SocketOptions,
        keys: CurveKeys | None = None,
    ) -> None:
        check_endpoint(address)
        self._on_frame = on_frame
        self._on_lost = on_lost
        try:
            self._socket = make_socket(context, zmq.DEALER, options)
        except zmq.ZMQError as error:  # this process may have no more files
            raise RemoteProtocolError(ProtocolReason.PEER_LOST, f"no socket for {address}: {error.strerror}") from error
        if keys is not None:
            be_client(self._socket, keys)
        self._connect(address)
        loop = asyncio.get_running_loop()
        self._late: asyncio.Handle = loop.call_later(options.connect, self._be_late, LATE_TURNS)
        self._tasks = [loop.create_task(self._receive()), loop.create_task(self._watch())]
        self.lost = False

    def _connect(self, address: str) -> None:
        try:
            self._monitor = self._socket.get_monitor_socket(_WATCHED)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.disable_monitor()
            self._socket.close()
            said = f"cannot connect to {address}: {error.strerror}"
            raise RemoteProtocolError(ProtocolReason.PEER_LOST, said) from error

    def _shut(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Queue one frame; it goes out when the connection is made, on this connection or not at all."""
        if self.lost:
            return
        if send_now(self._socket, [data]) is not None:
            self._lose()

    def close(self) -> None:
        """Drop the connection and what is queued on it. The loss is not told."""
        if self._socket.closed:
            return
        self.lost = True
        self._late.cancel()
        for task in self._tasks:
            task.cancel()
        self._shut()

    async def closed(self) -> None:
        """Wait for the tasks of a link that was closed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 1:
                logger.warning("a reply of %d frames is dropped", len(frames))
                continue
            deliver(self._on_frame, frames[0])

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event & _LOST:
                self._lose()
                return
            self._late.cancel()

    def _be_late(self, turns: int) -> None:
        """The connection is not made in time, or this loop was too busy to hear of it: let it look first."""
        if turns:
            self._late = asyncio.get_running_loop().call_soon(self._be_late, turns - 1)
        else:
            self._lose()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            self._late.cancel()
            asyncio.get_running_loop().call_soon(self._on_lost)


@dataclass(slots=True)
class _Shared(Generic[K]):
    link: Link
    keys: dict[int, K] = field(default_factory=dict)
    idle: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class _Route:
    address: str
    number: int | None


class _HeadBody(msgspec.Struct, frozen=True):
    pull: int | None = None


class _Head(msgspec.Struct, frozen=True):
    kvferry: _HeadBody | None = None


_HEAD: Final = msgspec.msgpack.Decoder(_Head)


class Links(Generic[K]):
    """All connections of one consumer rank. Made, used and closed on one event loop."""

    def __init__(
        self,
        *,
        on_reply: Callable[[K, bytes], object],
        on_lost: Callable[[K], object],
        options: SocketOptions | None = None,
        keys: Keyring | None = None,
    ) -> None:
        """``keys``: of the secret, where there is one; producers that are kvferry are spoken to with them only."""
        self._keys = keys
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._options = options or SocketOptions()
        self._context = make_context()
        self._shared: dict[str, _Shared[K]] = {}
        self._own: dict[K, Link] = {}
        self._routes: dict[K, _Route] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._shared) + len(self._own)

    def pull(self, key: K, address: str, data: bytes, *, number: int | None) -> None:
        """Send a pull. ``number``: of a pull to a kvferry producer; ``None``: the producer is upstream's.

        Replies come to ``on_reply`` and a lost connection to ``on_lost`` until the pull is forgotten. A pull that is
        sent again under its key, by a new number, gets the replies to the new number only.
        """
        check_endpoint(address)
        self.forget(key)
        if number is None:
            link = self._link(address, lambda frame: self._reply(key, frame), lambda: self._lose_own(key), plain=True)
            self._own[key] = link
            self._routes[key] = _Route(address, None)
            link.send(data)
            return
        shared = self._sharing(address)
        self._routes[key] = _Route(address, number)
        shared.keys[number] = key
        shared.link.send(data)

    def note(self, address: str, data: bytes) -> None:
        """Send a message that has no answer of its own, to a kvferry rank."""
        shared = self._sharing(address)
        shared.link.send(data)
        self._mind_idle(address, shared)

    def is_open(self, address: str) -> bool:
        """Whether there is a shared connection to this address that is not lost."""
        shared = self._shared.get(address)
        return shared is not None and not shared.link.lost

    def forget(self, key: K) -> None:
        """Nothing more is expected for this pull."""
        route = self._routes.pop(key, None)
        if route is None:
            return
        if route.number is None:
            self._shut(self._own.pop(key))
            return
        shared = self._shared.get(route.address)
        if shared is not None and shared.keys.pop(route.number, None) is not None:
            self._mind_idle(route.address, shared)

    async def ask(self, address: str, data: bytes, *, timeout: float, plain: bool = False) -> bytes:
        """Send one frame on a connection of its own and wait for one back; raises :class:`RemoteProtocolError`.

        ``plain``: without keys, to find out whether a producer is upstream's.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def came(frame: bytes) -> None:
            if not answer.done():
                answer.set_result(frame)

        def lost() -> None:
            if not answer.done():
                answer.set_exception(_lost(address))

        link = self._link(address, came, lost, plain=plain)
        link.send(data)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            raise _lost(address) from error
        finally:
            link.close()
            await link.closed()

    async def close(self) -> None:
        """Drop everything; leaves no task or thread. Safe to call twice."""
        self._routes.clear()
        for shared in self._shared.values():
            if shared.idle is not None:
                shared.idle.cancel()
        for link in (*self._own.values(), *(shared.link for shared in self._shared.values())):
            self._shut(link)
        self._own.clear()
        self._shared.clear()
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        if not self._context.closed:
            self._context.destroy(linger=0)

    def _link(
        self,
        address: str,
        on_frame: Callable[[bytes], object],
        on_lost: Callable[[], object],
        *,
        plain: bool = False,
    ) -> Link:
        keys = None if plain or self._keys is None else self._keys.of(address)
        return Link(self._context, address, on_frame=on_frame, on_lost=on_lost, options=self._options, keys=keys)

    def _sharing(self, address: str) -> _Shared[K]:
        shared = self._shared.get(address)
        if shared is None or shared.link.lost:
            if shared is not None:
                self._lose_shared(address, shared)
            link = self._link(
                address, lambda frame: self._sorted(address, frame), lambda: self._lose_link(address, link)
            )
            shared = self._shared[address] = _Shared(link)
        if shared.idle is not None:
            shared.idle.cancel()
            shared.idle = None
        return shared

    def _sorted(self, address: str, frame: bytes) -> None:
        """Give a frame of a shared connection to the pull whose number it bears."""
        shared = self._shared.get(address)
        try:
            head = _HEAD.decode(frame)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            logger.warning("an unreadable reply from %s is dropped", address)
            return
        if shared is None or head.kvferry is None or head.kvferry.pull is None:
            logger.warning("a reply from %s that names no pull is dropped", address)
            return
        key = shared.keys.get(head.kvferry.pull)
        if key is not None:
            self._on_reply(key, frame)

    def _reply(self, key: K, frame: bytes) -> None:
        if key in self._own:
            self._on_reply(key, frame)

    def _lose_own(self, key: K) -> None:
        if key in self._own:
            self.forget(key)
            self._on_lost(key)

    def _lose_link(self, address: str, link: Link) -> None:
        shared = self._shared.get(address)
        if shared is not None and shared.link is link:
            self._lose_shared(address, shared)

    def _lose_shared(self, address: str, shared: _Shared[K]) -> None:
        del self._shared[address]
        self._shut(shared.link)
        for key in list(shared.keys.values()):
            self._routes.pop(key, None)
            self._on_lost(key)

    def _mind_idle(self, address: str, shared: _Shared[K]) -> None:
        if shared.keys or shared.idle is not None:
            return
        loop = asyncio.get_running_loop()
        shared.idle = loop.call_later(self._options.idle, self._close_idle, address, shared)

    def _close_idle(self, address: str, shared: _Shared[K]) -> None:
        if self._shared.get(address) is shared and not shared.keys:
            del self._shared[address]
            self._shut(shared.link)

    def _shut(self, link: Link) -> None:
        link.close()
        task = asyncio.get_running_loop().create_task(link.closed())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _lost(address: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.PEER_LOST, f"no answer from {address}")
