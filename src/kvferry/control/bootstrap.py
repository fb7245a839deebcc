"""The bootstrap service: HTTP in vLLM's form, so that its routers, producers and consumers can use ours.

``POST /register`` and ``GET /query`` are upstream's. ``POST /kvferry/release`` is ours: a router says that nobody will
pull certain transfers, and every rank of that engine is told; a transfer id that cannot be guessed is what entitles it.
Bodies are bounded before they are read. Where a secret is set both orders must be signed with it; ``/query`` is open,
since routers that know no secret ask it, and what it tells is none.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Annotated, Final, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.control.directory import Directory, Registration
from kvferry.control.interfaces import listen_on
from kvferry.control.signing import HEADER, Verifier
from kvferry.control.tls import ServerTls
from kvferry.errors import ConfigError, ConfigReason, ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId, TransferId
from kvferry.protocol.messages import Name, Text

logger = logging.getLogger(__name__)

MAX_BODY: Final = 256 << 10
CLOSE_TIMEOUT: Final = 3.0
MAX_CLIENTS: Final = 1024
"""Connections at once; one more is told that the service is busy."""

OnRelease = Callable[[tuple[str, ...], tuple[TransferId, ...]], object]
"""Called with the addresses of an engine's ranks and the transfers that nobody will pull."""

_T = TypeVar("_T")


class Release(msgspec.Struct, frozen=True):
    """The body of ``POST /kvferry/release``."""

    engine_id: Name
    transfer_ids: Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)]
    reason: Text = ""


class BootstrapService:
    """Serves a directory on one address. Started and closed on one event loop."""

    def __init__(
        self,
        on_release: OnRelease,
        directory: Directory | None = None,
        *,
        verifier: Verifier | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """``verifier``: of signed orders; ``None`` takes orders from everybody who can connect."""
        self.directory = directory or Directory()
        self._verifier = verifier
        self._tls = tls
        self._on_release = on_release
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self.app = Starlette(
            routes=[
                Route("/register", self._register, methods=["POST"]),
                Route("/query", self._query, methods=["GET"]),
                Route("/kvferry/release", self._release, methods=["POST"]),
            ]
        )

    async def start(self, host: str, port: int) -> int:
        """Listen on exactly this host, for ``::`` in both families; port 0 takes a free one. Returns the port."""
        if self._tls is not None:
            self._tls.check()
        try:
            self._socket = listen_on(host, port)
        except OSError as error:
            raise ConfigError(
                ConfigReason.INVALID_VALUE,
                f"the bootstrap service cannot listen on {host} port {port}: {error.strerror}",
            ) from error
        config = uvicorn.Config(
            self.app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            limit_concurrency=MAX_CLIENTS,
            ssl_certfile=self._tls.certificate if self._tls else None,
            ssl_keyfile=self._tls.key if self._tls else None,
        )
        self._server = _Server(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)
        return int(self._socket.getsockname()[1])

    async def close(self) -> None:
        """Stop serving; leaves no task and no port. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None and self._server is not None:
            self._server.should_exit = True
            done, _ = await asyncio.wait({task}, timeout=CLOSE_TIMEOUT)
            if not done:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _register(self, request: Request) -> Response:
        try:
            self.directory.register(await self._order(request, Registration))
        except RemoteProtocolError as error:
            logger.warning("a registration is refused: %s", error)
            return _refused(error)
        return _json({"status": "ok"})

    async def _query(self, _: Request) -> Response:
        return _json(self.directory.listing())

    async def _release(self, request: Request) -> Response:
        try:
            body = await self._order(request, Release)
        except RemoteProtocolError as error:
            return _refused(error)
        addresses = self.directory.addresses(EngineId(body.engine_id))
        if not addresses:
            return _json({"detail": "no such engine is registered here"}, status=404)
        if body.transfer_ids:
            self._on_release(addresses, tuple(TransferId(one) for one in body.transfer_ids))
        return _json({"accepted": len(body.transfer_ids)}, status=202)

    async def _order(self, request: Request, kind: type[_T]) -> _T:
        """The body of a request that changes something; raises :class:`RemoteProtocolError`."""
        data = await _body(request)
        if self._verifier is not None:
            header = request.headers.get(HEADER)
            self._verifier.check(header, method=request.method, path=request.url.path, body=data)
        return decode_body(data, kind)


class _Server(uvicorn.Server):
    """A server inside somebody else's process: signals are not its business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(request: Request) -> bytes:
    """The bytes of a body; raises :class:`RemoteProtocolError` when there are too many."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise RemoteProtocolError(ProtocolReason.LIMIT_EXCEEDED, f"a body of more than {MAX_BODY} bytes")
    return bytes(data)


def decode_body(data: bytes, kind: type[_T]) -> _T:
    """The record of a body; raises :class:`RemoteProtocolError`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        said = str(error)[:200] if isinstance(error, msgspec.MsgspecError) else type(error).__name__
        raise RemoteProtocolError(ProtocolReason.MALFORMED, said) from error


def _refused(error: RemoteProtocolError) -> Response:
    status = 403 if error.reason is ProtocolReason.UNAUTHORIZED else 400
    return _json({"detail": f"{error.reason.value}: {error.message}"}, status=status)


def _json(value: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
