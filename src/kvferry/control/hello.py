"""Finding out what kind of producer answers at an address, where the bootstrap service could not tell."""

import secrets
from collections.abc import Hashable
from typing import TypeVar

from kvferry.control.links import Links
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.protocol import HelloAnswer, Receiver, Reply, ReplyExtension, decode_reply, encode, make_hello

K = TypeVar("K", bound=Hashable)


async def greet(links: Links[K], address: str, *, host: str, timeout: float, plain: bool = False) -> HelloAnswer | None:
    """Who a rank is; ``None``: it is no kvferry producer. ``plain``: without our keys, where there are any.

    Raises ``RemoteProtocolError`` when nobody answers, and when a kvferry producer will not speak to us.
    """
    hello = make_hello(Receiver(host, 0, tp_rank=0, tp_size=1), nonce=secrets.token_hex(16))
    reply = decode_reply(await links.ask(address, encode(hello), timeout=timeout, plain=plain))
    check_greeting(reply, address)
    return reply.kvferry if isinstance(reply.kvferry, HelloAnswer) else None


def check_greeting(reply: Reply, address: str) -> None:
    """Raise unless this can be the answer to a hello, of whatever kind of producer."""
    match reply.kvferry:
        case HelloAnswer(producer=side) if side.index >= len(side.fingerprints):
            raise RemoteProtocolError(
                ProtocolReason.MALFORMED, f"{address} says that it is rank {side.index} of {len(side.fingerprints)}"
            )
        case ReplyExtension(reason=reason):
            known = ProtocolReason.UNAUTHORIZED
            kind = known if reason == known.value else ProtocolReason.INCOMPATIBLE_PEER
            raise RemoteProtocolError(kind, f"{address}: {reply.err_msg or reason}")
        case _:
            return
