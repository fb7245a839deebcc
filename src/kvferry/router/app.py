"""The ASGI application: OpenAI's completions and chat in, engine requests out.

A client that hangs up is noticed while waiting and while streaming alike: the work is cancelled, which closes
the requests to the engines, which abort. Every answer, errors included, has the form that OpenAI clients
read.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry.control import Signer
from kvferry.router.batch import (
    CLIENT_LEFT,
    Batch,
    Serve,
    send_stream,
    send_whole,
)
from kvferry.router.client import Client
from kvferry.router.config import RouterConfig
from kvferry.router.engines import Engines, new_client
from kvferry.router.faults import (
    Answer,
    Headers,
    RefusedError,
    UpstreamError,
    bad_request,
    error_body,
    gave_up,
    too_long,
)
from kvferry.router.headers import REQUEST_ID, to_client, to_engine
from kvferry.router.metrics import CONTENT_TYPE, Metrics
from kvferry.router.pieces import Piece, cut
from kvferry.router.pool import Clock, E, Pool
from kvferry.router.prefill import Call
from kvferry.router.relay import Relay
from kvferry.router.roll_call import call_roll

logger = logging.getLogger(__name__)


def build_app(config: RouterConfig, *, clock: Clock = time.monotonic) -> Starlette:
    """The application for one set of engines."""
    front = _Front(config, clock=clock)
    return Starlette(
        routes=[
            Route("/v1/completions", front.generate, methods=["POST"]),
            Route("/v1/chat/completions", front.generate, methods=["POST"]),
            Route("/v1/models", front.models, methods=["GET"]),
            Route("/health", front.health, methods=["GET"]),
            Route("/metrics", front.exposition, methods=["GET"]),
        ],
        lifespan=front.lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _http_error},
    )


class _Front:
    """The routes and what they share."""

    def __init__(self, config: RouterConfig, *, clock: Clock) -> None:
        self._config = config
        self._client = new_client(ca=config.bootstrap_ca)
        signer = Signer(config.secret) if config.secret is not None else None
        self._engines = Engines(self._client, patience=config.patience, signer=signer)
        self._metrics = Metrics()
        self._relay = Relay(config, engines=self._engines, metrics=self._metrics, clock=clock)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Owns the HTTP client; sees who is there."""
        async with self._client:
            roll_call = asyncio.create_task(call_roll(self._config, self._engines))
            yield
            roll_call.cancel()
            await asyncio.gather(roll_call, return_exceptions=True)
            await self._relay.drain()

    async def generate(self, request: Request) -> Response:
        """``/v1/completions`` and ``/v1/chat/completions``."""
        # Not of request.url: that is put together of what the client says, its Host header and its query too.
        path: str = request.scope["path"]
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        try:
            body = _object(await _read(request, self._config.max_body))
            stream = _streamed(body)
            pieces = cut(body, limit=self._config.max_batch)
        except ClientDisconnect:
            self._metrics.requests.labels(path, CLIENT_LEFT).inc()
            return Response(status_code=CLIENT_LEFT)
        except RefusedError as refusal:
            self._metrics.requests.labels(path, refusal.answer.status).inc()
            return _response(refusal.answer, request_id)
        prefix = "chatcmpl" if path.endswith("/chat/completions") else "cmpl"
        batch = Batch(
            pieces,
            Call(path, _engine_headers(request, request_id, alone=len(pieces) == 1)),
            request_id=request_id,
            answer_id=f"{prefix}-{request_id}",
        )
        serve = send_stream if stream else send_whole
        return _Served(self._relay, batch, serve=serve, metrics=self._metrics)

    async def models(self, request: Request) -> Response:
        """What some decode engine says that it serves."""
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        headers = to_engine(request.headers.items(), request_id=request_id)
        pool = self._relay.decoder.pool
        last: UpstreamError | None = None
        for decode in pool.ranked():
            try:
                with pool.using(decode):
                    answer = await self._engines.get(f"{decode.url}/v1/models", headers=headers)
            except UpstreamError as fault:
                last = fault
            except RefusedError as refusal:
                return _response(refusal.answer, request_id)
            else:
                return _response(answer, request_id)
        return _response(gave_up("decode", last).answer, request_id)

    async def health(self, request: Request) -> Response:
        """200 while some prefill and some decode engine are not known to be down."""
        prefills, decodes = self._relay.prefiller.pool, self._relay.decoder.pool
        usable = prefills.usable() and decodes.usable()
        report = {"prefill": _standings(prefills), "decode": _standings(decodes)}
        return JSONResponse({"status": "ok" if usable else "degraded", **report}, status_code=200 if usable else 503)

    async def exposition(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})


class _Served(Response):
    """A response that is computed while it is sent, so that a client who leaves stops the work."""

    def __init__(self, relay: Relay, batch: Batch, *, serve: Serve, metrics: Metrics) -> None:
        super().__init__()
        self._relay = relay
        self._batch = batch
        self._serve = serve
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        status = 500
        try:
            with self._metrics.open_requests.track_inprogress():
                client = Client(receive, send)
                served = await client.unless_it_leaves(self._serve(self._relay, self._batch, client.send))
            status = CLIENT_LEFT if served is None else served
        finally:
            path = self._batch.call.path
            self._metrics.requests.labels(path, status).inc()
            logger.info(
                "request_id=%s path=%s pieces=%d status=%d ms=%.1f",
                self._batch.request_id,
                path,
                len(self._batch.pieces),
                status,
                (time.perf_counter() - began) * 1e3,
            )


def _engine_headers(request: Request, request_id: str, *, alone: bool) -> Callable[[Piece], Headers]:
    client_headers = tuple(request.headers.items())

    def headers(piece: Piece) -> Headers:
        return to_engine(client_headers, request_id=request_id if alone else f"{request_id}-{piece.choice}")

    return headers


async def _read(request: Request, limit: int) -> bytes:
    read = bytearray()
    async for data in request.stream():
        read += data
        if len(read) > limit:
            raise too_long(limit)
    return bytes(read)


def _object(body: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise bad_request("the body is not JSON") from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise bad_request("the body is not a JSON object")
    return value


def _streamed(body: Mapping[str, object]) -> bool:
    """Whether the answer is to be a stream.

    An engine may read a word, and "false" as false: it would then send another kind of answer than is waited for here,
    which looks like a fault of the engine.
    """
    stream = body.get("stream")
    if isinstance(stream, str):
        raise bad_request(f"stream must be true or false, got {stream[:16]!r}", param="stream")
    return bool(stream)


def _response(answer: Answer, request_id: str) -> Response:
    response = Response(answer.body, status_code=answer.status)
    for name, value in to_client(answer.headers, request_id=request_id):
        response.headers.append(name, value)
    return response


def _standings(pool: Pool[E]) -> list[dict[str, object]]:
    return [
        {"url": engine.url, "standing": pool.standing(engine).name.lower(), "in_flight": pool.in_flight(engine)}
        for engine in pool.engines
    ]


def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    kind = "NotFoundError" if status == 404 else "BadRequestError" if status < 500 else "InternalServerError"
    return Response(error_body(detail, status=status, kind=kind), status_code=status, media_type="application/json")
