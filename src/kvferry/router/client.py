"""The client's end of one request: sending to it, and noticing that it has hung up.

A server reports "disconnected" for a client who left, and also once an answer is complete. Only the former is leaving.
"""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Message, Receive, Send

T = TypeVar("T")


class Client:
    """One client while it is being answered."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._answered = False

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        # Noted before it is sent: the server may report the end while we still wait for the last byte to leave.
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._answered = True
        await self._send(message)

    async def unless_it_leaves(self, work: Coroutine[object, object, T]) -> T | None:
        """The result of the work; None when the client hung up first, and the work was cancelled."""
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._left())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return await task if self._answered else None
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
