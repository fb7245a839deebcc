"""A small OpenAI-like engine over real HTTP: a peer for router tests, without a model and without KV.

It answers with words that depend on the prompt, keeps everything that it was sent, and misbehaves when told:
answers with a status, stays silent, breaks off in the middle, or tells of an error in its first event as vLLM
does. ``BootstrapPeer`` is the service beside a prefill engine. Both run in a thread; ``python -m
kvferry.testing.openai_engine PORT`` runs an engine in a process of its own, to be killed.
"""

import asyncio
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: Body
    port: int | None = None
    """The client's, which tells its connections apart."""


@dataclass(slots=True)
class Mood:
    """How an engine behaves from now on; tests change it between requests."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    words: int = 3
    silent: bool = False
    """Never answer; wait until the client leaves."""
    silent_after: int | None = None
    """Stop after that many words of a stream, keeping the connection."""
    abort_after: int | None = None
    """End every answer after that many words, as vLLM does with all that it is working on when it is stopped."""
    break_after: int | None = None
    """Cut the connection after that many words of a stream."""
    only_for: str | None = None
    """Answer with ``status`` for this prompt only."""
    error_event: int | None = None
    """Begin a stream with an error of this code, behind a 200; in a chat after the role, as vLLM does."""
    params: Body | None = None
    """``kv_transfer_params`` of a whole answer."""


class HttpPeer:
    """An ASGI application on a port of its own, in a thread."""

    def __init__(self, app: Starlette, *, port: int = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, what="the peer listens")

    def begin_stop(self) -> None:
        """Ask for the end, so that several can end at a time."""
        self._server.should_exit = True

    def stop(self) -> None:
        """Close the port: the next connection is refused."""
        self.begin_stop()
        self._thread.join(timeout=10)
        self._socket.close()


class OpenAiEngine(HttpPeer):
    """Completions and chat, whole and streamed."""

    def __init__(self, *, port: int = 0) -> None:
        self.mood = Mood()
        self.received: list[Received] = []
        self.left: list[str] = []
        """Paths of requests whose client hung up."""
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self._generate, methods=["POST"]) for path in paths]
        routes.append(Route("/v1/models", self._models))
        routes.append(Route("/health", self._health))
        super().__init__(Starlette(routes=routes), port=port)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "toy", "object": "model"}]})

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        port = request.client.port if request.client else None
        self.received.append(Received(request.url.path, dict(request.headers), body, port))
        mood = self.mood
        if mood.silent:
            await self._until_left(request)
            return Response(status_code=503)
        if mood.status != 200 and mood.only_for in (None, body.get("prompt")):
            error = {"message": "as told", "type": "ToldError", "param": None, "code": mood.status}
            return JSONResponse({"error": error}, mood.status, headers=mood.headers)
        answer = _Answer(request, body, mood)
        if body.get("stream"):
            return StreamingResponse(
                self._events(request, answer), media_type="text/event-stream", headers=mood.headers
            )
        return JSONResponse(answer.whole(), headers=mood.headers)

    async def _events(self, request: Request, answer: "_Answer") -> AsyncIterator[bytes]:
        mood = answer.mood
        if mood.error_event is not None:
            error = {"message": "as told", "type": "ToldError", "param": None, "code": mood.error_event}
            if answer.chat:
                yield answer.events()[0]
            yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
            return
        for place, event in enumerate(answer.events()):
            if place == mood.break_after:
                raise ConnectionAbortedError("as told")
            if place == mood.silent_after:
                await self._until_left(request)
            yield event
            await asyncio.sleep(0)

    async def _until_left(self, request: Request) -> None:
        try:
            while (await request.receive())["type"] != "http.disconnect":
                pass
        finally:
            self.left.append(request.url.path)


class BootstrapPeer(HttpPeer):
    """``GET /query``, and ``POST /kvferry/release`` when it is a kvferry one."""

    def __init__(self, engine_id: str, *, kvferry: bool = False, ranks: int = 1, port: int = 0) -> None:
        self.engine_ids = [engine_id] if ranks == 1 else [f"{engine_id}-dp{rank}" for rank in range(ranks)]
        self.queries = 0
        self.pause = 0.0
        """Seconds before it answers a query."""
        self.released: list[Body] = []
        self.orders: list[tuple[dict[str, str], bytes]] = []
        """Headers and bodies of releases, as they came."""
        self._kvferry = kvferry
        routes = [Route("/query", self._query)]
        if kvferry:
            routes.append(Route("/kvferry/release", self._release, methods=["POST"]))
        super().__init__(Starlette(routes=routes), port=port)

    async def _query(self, request: Request) -> Response:
        self.queries += 1
        await asyncio.sleep(self.pause)
        entries: Body = {}
        for rank, engine_id in enumerate(self.engine_ids):
            entry: Body = {"engine_id": engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}
            if self._kvferry:
                entry["kvferry"] = {"version": 1, "features": ["release"]}
            entries[str(rank)] = entry
        return JSONResponse(entries)

    async def _release(self, request: Request) -> Response:
        body = await request.json()
        self.orders.append((dict(request.headers), await request.body()))
        self.released.append(body)
        return JSONResponse({"accepted": len(body["transfer_ids"])}, 202)


class _Answer:
    """What an engine says to one request."""

    def __init__(self, request: Request, body: Body, mood: Mood) -> None:
        self.mood = mood
        self._body = body
        self.chat = request.url.path.endswith("/chat/completions")
        self._prompt = str(body["messages"][-1]["content"] if self.chat else body.get("prompt"))
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or mood.words
        self._words = [f"{self._prompt}/{body.get('seed')}.{i} " for i in range(min(limit, mood.words))]
        self._end = "length"
        if mood.abort_after is not None and mood.abort_after < len(self._words):
            self._words, self._end = self._words[: mood.abort_after], "abort"
        prefix = "chatcmpl" if self.chat else "cmpl"
        self._id = f"{prefix}-{request.headers.get('x-request-id')}"

    @property
    def _usage(self) -> Body:
        prompt, completion = len(self._prompt), len(self._words)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    def whole(self) -> Body:
        text = "".join(self._words)
        content: Body = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": self._end}
        answer = {**self._frame([choice]), "usage": self._usage}
        return answer if self.mood.params is None else {**answer, "kv_transfer_params": self.mood.params}

    def events(self) -> list[bytes]:
        pieces: list[Body] = []
        if self.chat:
            pieces.append({"delta": {"role": "assistant", "content": ""}})
        pieces += [{"delta": {"content": word}} if self.chat else {"text": word} for word in self._words]
        if self._end == "length":
            pieces[-1] = {**pieces[-1], "finish_reason": "length"}
        elif self._words:  # vLLM says so only to those who have had some output
            pieces.append(
                {"delta": {}, "finish_reason": "abort"} if self.chat else {"text": "", "finish_reason": "abort"}
            )
        frames = [self._frame([{"index": 0, "finish_reason": None, **piece}]) for piece in pieces]
        if (self._body.get("stream_options") or {}).get("include_usage"):
            frames.append({**self._frame([]), "usage": self._usage})
        return [b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames] + [b"data: [DONE]\n\n"]

    def _frame(self, choices: list[Body]) -> Body:
        return {"id": self._id, "object": "answer", "created": 1, "model": "toy", "choices": choices}


def wait_until(condition: Callable[[], object], *, what: str, seconds: float = 20.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"gave up waiting until {what}")
        time.sleep(0.005)


def main() -> None:
    """Run one engine until killed: its port, then ``silent`` or the words of a stream after which it falls silent.

    It writes one line when it listens, and one for each request that has arrived.
    """
    engine = OpenAiEngine(port=int(sys.argv[1]))
    if sys.argv[2] == "silent":
        engine.mood.silent = True
    else:
        engine.mood.silent_after = int(sys.argv[2])
    sys.stdout.write("listening\n")
    for seen in itertools.count():
        sys.stdout.flush()
        while len(engine.received) <= seen:
            time.sleep(0.005)
        sys.stdout.write("received\n")


if __name__ == "__main__":
    main()
