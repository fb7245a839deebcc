"""Who may connect to a listener: the two doors, as ZeroMQ has them.

The *secure* door speaks CURVE: both ends prove that they hold the shared secret, and what they say is encrypted. The
server's and the client's key pair are both derived from the secret; the door admits the one client key and no other.
Where more than one secret is known, a door is opened with the one in use, and its owner tells the name of its keys;
whoever knocks takes those from its :class:`Keyring`. The *listed* door is plain, as vLLM's own connector needs it, and
admits peers of listed networks alone. The *open* door admits everybody: no secret, no guard.

libzmq asks before a connection exists (ZAP, RFC 27), so a stranger's bytes never reach a decoder. The answers are given
here, by a task beside the listener, on a socket inside its context. No answer is a refusal: the door is told to insist.
"""

import asyncio
import hashlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import zmq
import zmq.asyncio
from zmq.utils import z85

from kvferry.control.networks import Networks
from kvferry.control.secret import Secret
from kvferry.errors import ConfigError, ConfigReason

logger = logging.getLogger(__name__)

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
MAX_ADDRESSES: Final = 4096
"""Doors of which it is remembered which keys they take; others are tried with those in use."""

LOGGED: Final = 8
"""Refused connections that are logged one by one."""

_ZAP_PARTS: Final = 6
"""Version, request, domain, address, identity, mechanism; then credentials."""


def require_curve(libzmq_has: bool | None = None) -> None:
    """Raise ``ConfigError`` where this libzmq was built without CURVE. ``libzmq_has``: what it says of itself."""
    if not (zmq.has("curve") if libzmq_has is None else libzmq_has):
        raise ConfigError(
            ConfigReason.MISSING_DEPENDENCY,
            f"a secret is set, and this libzmq ({zmq.zmq_version()}) was built without CURVE: install a pyzmq wheel of "
            "PyPI (pip install --force-reinstall pyzmq), which has it, or a libzmq built with libsodium",
        )


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """One end's CURVE keys, in the text form of libzmq."""

    public: bytes
    hidden: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, ...)"


@dataclass(frozen=True, slots=True, repr=False)
class CurveKeys:
    """All keys of one deployment."""

    server: KeyPair
    client: KeyPair

    @classmethod
    def of(cls, secret: Secret) -> "CurveKeys":
        """Derived from the secret, one pair for each role; raises where libzmq has no CURVE."""
        require_curve()
        return cls(_pair(secret.derive("curve server")), _pair(secret.derive("curve client")))

    @property
    def name(self) -> str:
        """Tells one deployment's keys from another's; not secret."""
        return hashlib.sha256(b"kvferry door " + self.server.public).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"CurveKeys({self.name})"


class Keyring:
    """The keys of one who knocks at doors: of the secret in use, and of the others that are known."""

    def __init__(self, secret: Secret) -> None:
        every = [CurveKeys.of(one) for one in secret.known]
        self.used = every[0]
        self._by_name = {one.name: one for one in every}
        self._doors: OrderedDict[str, CurveKeys] = OrderedDict()

    def learn(self, addresses: Iterable[str], name: str) -> bool:
        """These doors take the keys of this name; whether there are such keys here."""
        keys = self._by_name.get(name)
        if keys is None:
            return False
        for address in addresses:
            self._doors[address] = keys
            self._doors.move_to_end(address)
            if len(self._doors) > MAX_ADDRESSES:
                self._doors.popitem(last=False)
        return True

    def of(self, address: str) -> CurveKeys:
        """The keys to knock with; those in use, where it is not known what the door takes."""
        return self._doors.get(address, self.used)


class Guard(Protocol):
    """Decides about connections to one listener."""

    def arm(self, socket: zmq.asyncio.Socket) -> None:
        """Set the options that a socket needs before it is bound."""

    def refusal(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """Why this peer is not let in; ``None`` when it is."""


@dataclass(frozen=True, slots=True)
class SecureDoor:
    """CURVE, for holders of the secret."""

    keys: CurveKeys

    def arm(self, socket: zmq.asyncio.Socket) -> None:
        """Make it a CURVE server."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.server.hidden)
        _insist(socket, b"kvferry")

    def refusal(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """Only the client key that is derived from the secret."""
        if mechanism != b"CURVE" or len(credentials) != 1:
            return "it does not speak CURVE"
        if not hmac.compare_digest(credentials[0], z85.decode(self.keys.client.public)):
            return "its key is not derived from the shared secret"
        return None


@dataclass(frozen=True, slots=True)
class ListedDoor:
    """Plain, for peers in listed networks."""

    networks: Networks

    def arm(self, socket: zmq.asyncio.Socket) -> None:
        """Plain connections, each asked about."""
        _insist(socket, b"upstream")

    def refusal(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """Only by the address that the connection comes from."""
        if mechanism != b"NULL":
            return f"it speaks {mechanism[:16]!r} at the plain door"
        return None if self.networks.holds(address) else f"its address is not in upstream_peers ({self.networks})"


class Gatekeeper:
    """The task that answers libzmq for one guard. Opened before the listener's socket is bound, closed after it."""

    def __init__(self, context: zmq.asyncio.Context, guard: Guard) -> None:
        self._guard = guard
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)
        self._task = asyncio.get_running_loop().create_task(self._answer())
        self.refused = 0
        """Connections that were not let in."""

    async def close(self) -> None:
        """Leave no task."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()

    async def _answer(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            request = parts[1] if len(parts) > 1 else b""
            refusal = self._judge(parts)
            code, text = (b"200", b"OK") if refusal is None else (b"400", b"refused")
            await self._socket.send_multipart([_ZAP_VERSION, request, code, text, b"", b""])

    def _judge(self, parts: list[bytes]) -> str | None:
        if len(parts) < _ZAP_PARTS or parts[0] != _ZAP_VERSION:
            self.refused += 1
            return "libzmq asks in an unknown form"
        address, mechanism = parts[3].decode("ascii", "replace"), parts[5]
        refusal = self._guard.refusal(address, mechanism, parts[_ZAP_PARTS:])
        if refusal is not None:
            self.refused += 1
            # A crowd of strangers fills no log: after the first few, each time that their number has doubled.
            if self.refused <= LOGGED or self.refused.bit_count() == 1:
                logger.warning("a connection from %s is refused: %s (%d so far)", address, refusal, self.refused)
        return refusal


def be_client(socket: zmq.asyncio.Socket, keys: CurveKeys) -> None:
    """Make a socket speak CURVE to a secure door, and to nothing else."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client.hidden)


def _pair(raw: bytes) -> KeyPair:
    hidden = z85.encode(raw)
    return KeyPair(zmq.curve_public(hidden), hidden)


def _insist(socket: zmq.asyncio.Socket, domain: bytes) -> None:
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
