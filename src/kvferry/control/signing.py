"""Orders over HTTP that only a holder of the shared secret can give: ``POST /register`` and ``/kvferry/release``.

A request bears one header, ``x-kvferry-auth: 1 TIME NONCE MAC``: whole seconds of the sender's clock, 32 hex digits
drawn for this request alone, and HMAC-SHA256 over method, path, time, nonce and body. The receiver takes a time that is
near its own, and a nonce that it has not seen among those whose time would still be taken. So a recorded request is
worth nothing, except to a receiver that was started anew within the window: it has forgotten its nonces.
"""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry.control.secret import Secret
from kvferry.errors import ProtocolReason, RemoteProtocolError

HEADER: Final = "x-kvferry-auth"
WINDOW: Final = 60.0
"""Seconds by which the clocks of two machines may differ."""

MAX_NONCES: Final = 65_536
"""Orders within one window; only holders of the secret fill this memory."""

_FORM: Final = "1"
_LABEL: Final = "http orders"
_NONCE_DIGITS: Final = 32
_MAC_DIGITS: Final = 64
_HEX: Final = frozenset("0123456789abcdef")

WallClock = Callable[[], float]


class Signer:
    """Makes the header of an order."""

    def __init__(self, secret: Secret, *, clock: WallClock = time.time) -> None:
        self._key = secret.derive(_LABEL)
        self._clock = clock

    def headers(self, method: str, path: str, body: bytes) -> dict[str, str]:
        """For one request; to be made anew when it is sent again."""
        when, nonce = str(int(self._clock())), secrets.token_hex(_NONCE_DIGITS // 2)
        mac = _mac(self._key, _Order(method, path, body), when=when, nonce=nonce)
        return {HEADER: f"{_FORM} {when} {nonce} {mac}"}


class Verifier:
    """Checks the header of orders. One for each service: it remembers what it has taken."""

    def __init__(self, secret: Secret, *, clock: WallClock = time.time, max_nonces: int = MAX_NONCES) -> None:
        self._keys = [one.derive(_LABEL) for one in secret.known]
        self._clock = clock
        self._max_nonces = max_nonces
        self._taken: OrderedDict[str, float] = OrderedDict()
        self.refused = 0
        """Orders that were not taken."""

    def check(self, header: str | None, *, method: str, path: str, body: bytes) -> None:
        """Raise ``RemoteProtocolError`` (UNAUTHORIZED) unless the order is from a holder of the secret, and new."""
        try:
            self._check(header, _Order(method, path, body))
        except RemoteProtocolError:
            self.refused += 1
            raise

    def _check(self, header: str | None, order: "_Order") -> None:
        if header is None:
            raise _unauthorized(
                f"no {HEADER} header; this service takes orders of holders of its shared secret only: "
                "set secret_file (or KVFERRY_SECRET) on the sender too"
            )
        parts = header.split(" ")
        if len(parts) != 4 or parts[0] != _FORM or not _is_hex(parts[2], _NONCE_DIGITS) or len(parts[1]) > 12:
            raise _unauthorized(f"the {HEADER} header has another form than this version's")
        _, when, nonce, mac = parts
        if not _is_hex(mac, _MAC_DIGITS) or not self._is_signed(mac, order, when=when, nonce=nonce):
            raise _unauthorized("the message authentication code is wrong: the sender has another secret")
        now = self._clock()
        # The time is that of a holder of the secret: it is a whole number, for nobody else could have signed it.
        if not when.isdecimal() or abs(now - int(when)) > WINDOW:
            raise _unauthorized(
                f"it was made at {when}, the clock here says {int(now)}: more than {WINDOW:.0f} s apart; "
                "set the clocks right (NTP)"
            )
        self._take(nonce, now)

    def _is_signed(self, mac: str, order: "_Order", *, when: str, nonce: str) -> bool:
        """With the secret in use, or another that is known."""
        return any(hmac.compare_digest(mac, _mac(key, order, when=when, nonce=nonce)) for key in self._keys)

    def _take(self, nonce: str, now: float) -> None:
        while self._taken and next(iter(self._taken.values())) < now:
            self._taken.popitem(last=False)
        if nonce in self._taken:
            raise _unauthorized("it was sent before: a replay")
        if len(self._taken) >= self._max_nonces:
            raise RemoteProtocolError(
                ProtocolReason.LIMIT_EXCEEDED, f"{self._max_nonces} orders within {2 * WINDOW:.0f} s"
            )
        # A time is taken up to one window ahead of this clock, and then for one window more.
        self._taken[nonce] = now + 2 * WINDOW


@dataclass(frozen=True, slots=True)
class _Order:
    method: str
    path: str
    body: bytes


def _mac(key: bytes, order: _Order, *, when: str, nonce: str) -> str:
    head = f"{_FORM}\n{order.method}\n{order.path}\n{when}\n{nonce}\n".encode("utf-8", "surrogateescape")
    return hmac.new(key, head + order.body, hashlib.sha256).hexdigest()


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and _HEX.issuperset(text)


def _unauthorized(message: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.UNAUTHORIZED, message)
