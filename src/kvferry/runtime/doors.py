"""The doors of one producer rank, and what each is for.

Without a secret there is one, plain and open to all. With a secret there is the secure one, for kvferry peers; and,
where networks of upstream peers are listed, a plain one that admits just those networks, and through which nothing of
ours is spoken: whoever knows the extension has to know the secret too. A connection is named by its door's letter and
the name that the door's socket gives it.
"""

from collections.abc import Callable
from typing import Final

from kvferry.control import CurveKeys, Guard, ListedDoor, Listener, SecureDoor, SocketOptions
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.protocol import Note, Pull
from kvferry.runtime.options import RuntimeOptions, UpstreamPeers

PLAIN: Final = b"p"
SECURE: Final = b"s"


class Doors:
    """The listeners of one rank. Opened, used and closed on one event loop; takes replies, as an outlet."""

    def __init__(
        self,
        *,
        on_message: Callable[[bytes, bytes], object],
        on_lost: Callable[[bytes], object],
        options: RuntimeOptions,
        sockets: SocketOptions,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._options = options
        self._sockets = sockets
        self._listeners: dict[bytes, Listener] = {}
        self.keys = CurveKeys.of(options.secret) if options.secret is not None else None
        """Of the secure door."""

    async def open(self) -> None:
        """Bind all of them; the first one that cannot be bound is an error."""
        host, port = self._options.host, self._options.port
        if self.keys is None:
            await self._listener(PLAIN, None).start(host, port)
            return
        listed = self._options.upstream_peers.beside_a_secret().networks
        await self._listener(SECURE, SecureDoor(self.keys)).start(host, self._secure_port(beside=bool(listed.members)))
        if listed.members:
            await self._listener(PLAIN, ListedDoor(listed)).start(host, port)

    @property
    def address(self) -> str:
        """What upstream's fields tell: of the plain door; where there is none, of the secure one."""
        return self._listeners[PLAIN if PLAIN in self._listeners else SECURE].address

    @property
    def secure_address(self) -> str:
        """Of the secure door; empty when there is none."""
        return self._listeners[SECURE].address if SECURE in self._listeners else ""

    @property
    def ferry_address(self) -> str:
        """Where kvferry peers knock."""
        return self.secure_address or self.address

    @property
    def refused(self) -> int:
        """Connections that were not let in."""
        return sum(one.refused for one in self._listeners.values())

    def address_of(self, connection: bytes) -> str:
        """The IP address that a connection comes from, while its message is being dealt with; else empty."""
        listener = self._listeners.get(connection[:1])
        return listener.address_of(connection[1:]) if listener is not None else ""

    def send(self, connection: bytes, data: bytes) -> None:
        """Send one frame; to a connection that is gone, nowhere."""
        listener = self._listeners.get(connection[:1])
        if listener is not None:
            listener.send(connection[1:], data)

    async def close(self) -> None:
        """Stop; leaves no task, thread or port. Safe to call twice."""
        for listener in self._listeners.values():
            await listener.close()

    def _listener(self, letter: bytes, guard: Guard | None) -> Listener:
        made = Listener(
            on_message=lambda connection, data: self._on_message(letter + connection, data),
            on_lost=lambda connection: self._on_lost(letter + connection),
            options=self._sockets,
            guard=guard,
        )
        self._listeners[letter] = made
        return made

    def _secure_port(self, *, beside: bool) -> int:
        """The port of its own if it has one; a door that stands alone takes the rank's only port."""
        return self._options.secure_port or (0 if beside else self._options.port)


def check_upstream_peer(message: Pull | Note, peers: UpstreamPeers, address: str) -> None:
    """Refuse a pull in upstream's form that comes from an address outside the listed networks.

    What the pull says of its host is not asked: that is where is written to, not who speaks.
    """
    if not isinstance(message, Pull) or message.kvferry is not None or peers.everywhere or not peers.any:
        return
    if not peers.admits(address):
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER,
            f"vLLM's own MooncakeConnector at {address or 'an unknown address'} is refused as a peer: it is not in "
            f"upstream_peers ({peers.networks})",
        )


def check_door(connection: bytes, message: Pull | Note, *, guarded: bool) -> None:
    """Refuse a message of kvferry's own that came through the plain door of a guarded rank."""
    if guarded and connection.startswith(PLAIN) and message.kvferry is not None:
        raise RemoteProtocolError(
            ProtocolReason.UNAUTHORIZED,
            "this producer speaks to kvferry peers through its secure door only: set secret_file (or KVFERRY_SECRET) "
            "of this deployment on the consumer too",
        )
