"""Finding out what kind of producer answers at an address, where the bootstrap service could not tell."""

import secrets
from collections.abc import Hashable
from typing import TypeVar

from kvferry.control.links import Links
from kvferry.protocol import HelloAnswer, Receiver, decode_reply, encode, make_hello

K = TypeVar("K", bound=Hashable)


async def greet(links: Links[K], address: str, *, host: str, timeout: float) -> HelloAnswer | None:
    """Who a rank is; ``None``: it is no kvferry producer. Raises ``RemoteProtocolError`` when nobody answers."""
    hello = make_hello(Receiver(host, 0, tp_rank=0, tp_size=1), nonce=secrets.token_hex(16))
    reply = decode_reply(await links.ask(address, encode(hello), timeout=timeout))
    return reply.kvferry if isinstance(reply.kvferry, HelloAnswer) else None
