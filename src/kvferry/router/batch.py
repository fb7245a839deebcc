"""Serve all pieces of one client request, and put their answers together as they come.

Each piece runs in a task that belongs to the request: when the client leaves, or one piece fails, the others
are cancelled. A streamed answer begins with the first output of any piece. Before that, a failure is an HTTP
error; after it, an event.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from starlette.types import Send

from kvferry.router import events
from kvferry.router.faults import Answer, Headers, RefusedError, UpstreamError, lost_midway
from kvferry.router.headers import raw, to_client
from kvferry.router.merge import StreamMerge, merge_bodies
from kvferry.router.pieces import Piece
from kvferry.router.prefill import Call
from kvferry.router.relay import Relay

CLIENT_LEFT = 499
"""The status that is counted, though nobody receives it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One client request."""

    pieces: tuple[Piece, ...]
    call: Call
    request_id: str
    answer_id: str
    """The id of a merged answer."""


async def send_whole(relay: Relay, batch: Batch, send: Send) -> int:
    """Answer a request that is not streamed; the status sent."""
    refusals: list[BaseException] = []
    tasks: list[asyncio.Task[Answer]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(relay.whole(piece, batch.call)) for piece in batch.pieces]
    except* RefusedError as refused:
        refusals += refused.exceptions
    for refusal in refusals:
        if isinstance(refusal, RefusedError):
            return await send_answer(refusal.answer, batch.request_id, send)
    answers = [task.result() for task in tasks]
    body = merge_bodies(batch.pieces, [answer.body for answer in answers], answer_id=batch.answer_id)
    return await send_answer(Answer(200, body, answers[0].headers), batch.request_id, send)


async def send_answer(answer: Answer, request_id: str, send: Send) -> int:
    """Send a whole answer."""
    headers = to_client(answer.headers, request_id=request_id)
    await _start(send, answer.status, (*headers, ("content-length", str(len(answer.body)))))
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
    return answer.status


async def send_stream(relay: Relay, batch: Batch, send: Send) -> int:
    """Answer a streamed request; the status to count."""
    queue: asyncio.Queue[_Item] = asyncio.Queue(maxsize=1)
    async with asyncio.TaskGroup() as group:
        pumps = [group.create_task(_pump(relay, piece, call=batch.call, queue=queue)) for piece in batch.pieces]
        try:
            return await _Writer(batch, send).write(queue)
        finally:
            for pump in pumps:
                pump.cancel()


@dataclass(frozen=True, slots=True)
class _Began:
    headers: Headers


@dataclass(frozen=True, slots=True)
class _Event:
    piece: Piece
    data: bytes


@dataclass(frozen=True, slots=True)
class _Broke:
    answer: Answer


@dataclass(frozen=True, slots=True)
class _Ended:
    pass


_Item: TypeAlias = _Began | _Event | _Broke | _Ended


async def _pump(relay: Relay, piece: Piece, *, call: Call, queue: asyncio.Queue[_Item]) -> None:
    """Put what a piece brings into the queue. The queue is short: a slow client slows the engine down."""
    try:
        async with relay.streamed(piece, call) as opening, aclosing(opening.rest):
            await queue.put(_Began(opening.headers))
            for event in opening.held:
                await queue.put(_Event(piece, event))
            async for event in opening.rest:
                await queue.put(_Event(piece, event))
    except RefusedError as refusal:
        await queue.put(_Broke(refusal.answer))
    except UpstreamError as fault:
        await queue.put(_Broke(lost_midway(fault)))
    else:
        await queue.put(_Ended())


class _Writer:
    """Writes one streamed answer."""

    def __init__(self, batch: Batch, send: Send) -> None:
        self._batch = batch
        self._send = send
        self._merge = StreamMerge(batch.pieces, answer_id=batch.answer_id)
        self._started = False

    async def write(self, queue: "asyncio.Queue[_Item]") -> int:
        """Until every piece has ended or one broke; the status to count."""
        running = len(self._batch.pieces)
        while running:
            match await queue.get():
                case _Began(headers):
                    await self._begin(headers)
                case _Event(piece, data):
                    await self._body(self._merge.event(piece, data))
                case _Ended():
                    running -= 1
                case _Broke(answer):
                    return await self._break(answer)
                case other:
                    assert_never(other)
        await self._body(self._merge.end(), last=True)
        return 200

    async def _begin(self, headers: Headers) -> None:
        if not self._started:
            self._started = True
            await _start(self._send, 200, to_client(headers, request_id=self._batch.request_id))

    async def _body(self, data: bytes | None, *, last: bool = False) -> None:
        if data or last:
            await self._send({"type": "http.response.body", "body": data or b"", "more_body": not last})

    async def _break(self, answer: Answer) -> int:
        if not self._started:
            return await send_answer(answer, self._batch.request_id, self._send)
        await self._body(b"data: " + answer.body + b"\n\n" + events.DONE, last=True)
        return answer.status


async def _start(send: Send, status: int, headers: Headers) -> None:
    lowered = [(name.lower(), value) for name, value in raw(headers)]
    await send({"type": "http.response.start", "status": status, "headers": lowered})


Serve: TypeAlias = Callable[[Relay, Batch, Send], Coroutine[object, object, int]]
"""``send_whole`` or ``send_stream``."""
