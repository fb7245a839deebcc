"""A producer's pulls that are not over: who sent them, what was admitted, and what is said about them.

The machine says when something is to be answered. What is said is made here: the reply in the form that the sender
reads, with the digests of what was written. The order of things that makes a digest meaningful is kept by the sender of
the bytes: it is taken after the last byte was written and before the machine hears of that.

An upstream consumer frees blocks on every word, and cannot be told to fence first. So of a request whose bytes may
still land it hears nothing, and no end of the pull: it gives up in its own time.
"""

import itertools
import logging
from dataclasses import dataclass, replace
from typing import Protocol

from msgspec import structs

from kvferry.protocol import Answer, Pull, Puller, PullId, Reply, ReplyExtension, Side, encode, make_reply, puller_of
from kvferry.runtime.admission import Admitted
from kvferry.runtime.sending import Sent

logger = logging.getLogger(__name__)

Connection = bytes
"""A consumer rank's connection, as the listener names it."""


class Outlet(Protocol):
    """Where replies go."""

    def send(self, connection: Connection, data: bytes) -> None:
        """Send one frame; to a connection that is gone, nowhere."""

    def address_of(self, connection: Connection) -> str:
        """The IP address that it comes from, while its message is being dealt with; else empty."""


@dataclass(frozen=True, slots=True)
class OpenPull:
    """One of them."""

    connection: Connection
    message: Pull
    admitted: Admitted


class OpenPulls:
    """All of one producer rank."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._outlet: Outlet | None = None
        self._ids = itertools.count(1)
        self._known: dict[PullId, OpenPull] = {}
        self._digests: dict[PullId, dict[str, bytes]] = {}
        """Of what was written for open pulls, by request, until its end is told."""
        self._withheld: set[PullId] = set()
        """Open pulls of upstream consumers that are not told the end of one of their requests."""

    def __len__(self) -> int:
        return len(self._known)

    def attach(self, outlet: Outlet) -> None:
        """The listener is up: replies go there."""
        self._outlet = outlet

    def address_of(self, connection: Connection) -> str:
        """The IP address that a message comes from, while it is being dealt with."""
        return self._outlet.address_of(connection) if self._outlet is not None else ""

    def send(self, connection: Connection, reply: Reply) -> None:
        """Say something to whoever is at the other end."""
        if self._outlet is not None:
            self._outlet.send(connection, encode(reply))

    def add(self, connection: Connection, message: Pull, admitted: Admitted) -> PullId:
        """One that was admitted, under a number of its own."""
        number = PullId(next(self._ids))
        self._known[number] = OpenPull(connection, message, admitted)
        return number

    def admitted(self, pull: PullId) -> Admitted:
        """What was admitted of it."""
        return self._known[pull].admitted

    def of_connection(self, connection: Connection) -> tuple[PullId, ...]:
        """Those that came over one connection."""
        return tuple(pull for pull, known in self._known.items() if known.connection == connection)

    def older(self, puller: Puller, below: int) -> tuple[PullId, ...]:
        """Those of one consumer rank that have a lower number."""
        return tuple(
            pull
            for pull, known in self._known.items()
            if known.admitted.pull < below and puller_of(known.message) == puller
        )

    def sent(self, sent: Sent) -> None:
        """A write is over, and its memory has not gone back yet."""
        if sent.digests is not None and sent.write.pull in self._known:
            self._digests.setdefault(sent.write.pull, {})[sent.write.request] = sent.digests.data

    def answer(self, action: Answer) -> None:
        """Say what the machine has to say about one; with its last word it is over."""
        known = self._known[action.pull]
        reply = make_reply(self._withholding(action, known), known.message, self._side)
        made = self._digests.get(action.pull, {})
        digests = {str(one): made.pop(one) for one in action.ok if one in made}
        if digests and isinstance(reply.kvferry, ReplyExtension):
            reply = structs.replace(reply, kvferry=structs.replace(reply.kvferry, digests=digests))
        self.send(known.connection, reply)
        if action.finish:
            self.forget(action.pull)

    def forget(self, pull: PullId) -> None:
        """It is over, or will never be answered."""
        del self._known[pull]
        self._digests.pop(pull, None)
        self._withheld.discard(pull)

    def _withholding(self, action: Answer, known: OpenPull) -> Answer:
        """What may be said of it."""
        if known.message.kvferry is None and any(one.landing for one in action.err):
            self._withheld.add(action.pull)
            logger.warning("a pull of %s is left unanswered: what had left for it may still land", known.admitted.peer)
        if action.pull not in self._withheld:
            return action
        return replace(action, err=tuple(one for one in action.err if not one.landing), finish=False)
