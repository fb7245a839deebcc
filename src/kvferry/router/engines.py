"""Ask one engine once over HTTP. Foreign exceptions and statuses become ``UpstreamError`` or ``RefusedError`` here.

A status of 500 and above, and 429, is a fault: another engine may do better; so is a redirection. Any other status that
is not a success is the engine's verdict on the request, and the client's answer.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import msgspec

from kvferry.control import Signer, client_context
from kvferry.router import events
from kvferry.router.config import Patience
from kvferry.router.faults import Answer, FaultReason, Headers, RefusedError, UpstreamError
from kvferry.router.headers import raw, read

_KEEP_ALIVE = [
    # A host that vanished is noticed in about 6 s also while it owes us an answer.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]

_END_SECONDS = 0.5
"""To wait for the end of an answer whose last event has come."""


def new_client(*, ca: str | None = None) -> httpx.AsyncClient:
    """The one HTTP client of a router. It ignores proxy settings of the environment: engines are near.

    ``ca``: file of the authorities by which https addresses are believed; default: those of this machine.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=3.0)
    transport = httpx.AsyncHTTPTransport(verify=client_context(ca), limits=limits, socket_options=_KEEP_ALIVE)
    return httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)


class EngineStream:
    """A successful answer that is read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.headers: Headers = read(response.headers.raw)
        self.is_events = response.headers.get("content-type", "").startswith("text/event-stream")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Whole events as they come; ends after ``[DONE]``, and a stream that stops before it is a fault."""
        cutter = events.EventCutter()
        chunks = self._response.aiter_raw()
        with _faults(reached=True):
            async for data in chunks:
                for event in cutter.feed(data):
                    yield event
                    if events.is_done(event):
                        await _read_to_end(chunks)
                        return
        raise UpstreamError(FaultReason.LOST, "the stream ended without [DONE]", reached=True)

    async def read(self) -> bytes:
        """The whole body."""
        with _faults(reached=True):
            return await self._response.aread()

    async def aclose(self) -> None:
        """Hang up: an engine that is still generating stops."""
        await self._response.aclose()


async def _read_to_end(chunks: AsyncIterator[bytes]) -> None:
    """After the last event only the end of the answer comes. Once it was read the connection can be used again.

    An answer that does not end costs the connection, and a moment.
    """
    with suppress(TimeoutError, httpx.HTTPError, httpx.StreamError):
        async with asyncio.timeout(_END_SECONDS):
            async for _ in chunks:
                pass


class Engines:
    """Asks engines, with the patience that the operator set."""

    def __init__(self, client: httpx.AsyncClient, *, patience: Patience, signer: Signer | None = None) -> None:
        """``signer``: signs orders to bootstrap services, where the deployment has a secret."""
        self._client = client
        self._patience = patience
        self._signer = signer

    async def prefill(self, url: str, *, headers: Headers, body: Mapping[str, object]) -> Answer:
        """The whole answer of a prefill engine."""
        stream = await self._open(url, headers=headers, body=body, silence=self._patience.prefill)
        try:
            return Answer(200, await stream.read(), stream.headers)
        finally:
            await stream.aclose()

    async def decode(self, url: str, *, headers: Headers, body: Mapping[str, object]) -> EngineStream:
        """The begun answer of a decode engine; the caller closes it."""
        return await self._open(url, headers=headers, body=body, silence=self._patience.decode)

    async def get(self, url: str, *, headers: Headers = ()) -> Answer:
        """A small answer of an engine or of a bootstrap service."""
        with _faults(reached=False):
            async with asyncio.timeout(self._patience.control):
                response = await self._client.get(url, headers=raw(headers), timeout=None)
        return _checked(Answer(response.status_code, response.content, read(response.headers.raw)))

    async def post_control(self, url: str, *, body: Mapping[str, object]) -> Answer:
        """A small order to a bootstrap service."""
        data = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        if self._signer is not None:
            headers |= self._signer.headers("POST", urlsplit(url).path, data)
        with _faults(reached=True):
            async with asyncio.timeout(self._patience.control):
                response = await self._client.post(url, content=data, headers=headers, timeout=None)
        return _checked(Answer(response.status_code, response.content))

    async def _open(self, url: str, *, headers: Headers, body: Mapping[str, object], silence: float) -> EngineStream:
        timeout = httpx.Timeout(silence, connect=self._patience.connect)
        request = self._client.build_request(
            "POST", url, content=msgspec.json.encode(body), headers=raw(headers), timeout=timeout
        )
        with _faults(reached=True):
            response = await self._client.send(request, stream=True)
        stream = EngineStream(response)
        if 200 <= response.status_code < 300:
            return stream
        try:
            answer = Answer(response.status_code, await stream.read(), stream.headers)
        finally:
            await stream.aclose()
        raise verdict(answer)


def verdict(answer: Answer) -> UpstreamError | RefusedError:
    """What an answer that is no success means for the request."""
    if answer.status == 429:
        return UpstreamError(FaultReason.BUSY, "status 429", reached=True, answer=answer)
    if answer.status < 400:
        # A redirection leads past the router, to an address that is nothing to the client.
        return UpstreamError(FaultReason.MALFORMED, f"status {answer.status}", reached=True)
    if answer.status >= 500:
        return UpstreamError(FaultReason.FAILED, f"status {answer.status}", reached=True, answer=answer)
    return RefusedError(answer)


def _checked(answer: Answer) -> Answer:
    if not answer.ok:
        raise verdict(answer)
    return answer


@contextmanager
def _faults(*, reached: bool) -> Iterator[None]:
    """Map the client's exceptions. A connection that was never made has reached nobody."""
    try:
        yield
    except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
        raise UpstreamError(FaultReason.UNREACHABLE, type(error).__name__, reached=False) from error
    except (httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise UpstreamError(FaultReason.TIMED_OUT, type(error).__name__, reached=False) from error
    except (httpx.TimeoutException, TimeoutError) as error:
        raise UpstreamError(FaultReason.TIMED_OUT, type(error).__name__, reached=reached) from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise UpstreamError(FaultReason.LOST, type(error).__name__, reached=reached) from error
    except events.EventTooLongError as error:
        raise UpstreamError(FaultReason.MALFORMED, str(error), reached=reached) from error
