"""Asking a bootstrap service, ours or upstream's: register a rank, find an engine.

Proxies of the environment are not used: these are addresses inside a cluster. Answers are bounded and checked; what
does not answer is *lost* (worth asking again), what answers wrongly is *malformed* (not worth it). With a secret,
orders are signed; with an authority named, services are asked over TLS only.
"""

import asyncio
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec

from kvferry.control.directory import EngineCard, EngineEntry, Registration
from kvferry.control.secret import Secret
from kvferry.control.signing import Signer
from kvferry.control.sockets import check_endpoint
from kvferry.control.tls import client_context
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId

MAX_ANSWER: Final = 16 << 20
RETRY_PAUSE: Final = 0.2


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """One engine as a bootstrap service lists it."""

    engine_id: EngineId
    dp_rank: int
    addresses: tuple[str, ...]
    """Of its ranks, in rank order: pipeline rank times tensor size plus tensor rank."""

    tp_size: int
    pp_size: int
    card: EngineCard | None
    """``None``: upstream's, or a service that drops what it does not know; only a hello tells which."""


class BootstrapClient:
    """Speaks to any number of services. Made, used and closed on one event loop."""

    def __init__(self, *, timeout: float = 5.0, secret: Secret | None = None, ca: str | None = None) -> None:
        """``ca``: file of the authorities that services are believed by; with it, nothing is asked over plain HTTP."""
        self._signer = Signer(secret) if secret is not None else None
        self._tls_only = ca is not None
        self._http = httpx.AsyncClient(timeout=timeout, trust_env=False, verify=client_context(ca))
        self._calls: set[asyncio.Task[tuple[int, bytes]]] = set()
        self._closing = False

    async def register(self, url: str, one: Registration, *, patience: float = 30.0) -> None:
        """Register a rank, trying again while the service is not up yet; raises :class:`RemoteProtocolError`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        while True:
            try:
                status, body = await self._call("POST", f"{url}/register", msgspec.json.encode(one))
            except RemoteProtocolError as error:
                if error.reason is not ProtocolReason.PEER_LOST or loop.time() > until:
                    raise
                await asyncio.sleep(RETRY_PAUSE)
                continue
            if status != httpx.codes.OK:
                said = body[:400].decode(errors="replace")
                forbidden = status == httpx.codes.FORBIDDEN
                raise RemoteProtocolError(
                    ProtocolReason.UNAUTHORIZED if forbidden else ProtocolReason.INCOMPATIBLE_PEER,
                    f"{url} refuses the registration: {status} {said}",
                )
            return

    async def query(self, url: str) -> tuple[FoundEngine, ...]:
        """The engines that a service lists; raises :class:`RemoteProtocolError`."""
        status, body = await self._call("GET", f"{url}/query", None)
        if status != httpx.codes.OK:
            raise RemoteProtocolError(ProtocolReason.MALFORMED, f"{url}/query answers {status}")
        return read_listing(body, url)

    async def find(self, url: str, engine: EngineId) -> FoundEngine:
        """One engine; ``PEER_LOST`` when the service does not answer, or does not list it (yet)."""
        for found in await self.query(url):
            if found.engine_id == engine:
                return found
        raise RemoteProtocolError(ProtocolReason.PEER_LOST, f"engine {engine} is not registered at {url}")

    async def close(self) -> None:
        """Give up what is being asked, then drop the connections; safe to call twice."""
        self._closing = True
        asked = tuple(self._calls)
        for call in asked:
            call.cancel()
        await asyncio.gather(*asked, return_exceptions=True)  # a connection in use would outlive its pool
        await self._http.aclose()

    async def _call(self, method: str, url: str, body: bytes | None) -> tuple[int, bytes]:
        if self._closing:
            raise RemoteProtocolError(ProtocolReason.PEER_LOST, f"{url} is not asked: this side is closing")
        call = asyncio.create_task(self._exchange(method, url, body))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        except asyncio.CancelledError:
            if not self._closing:
                raise
            raise RemoteProtocolError(
                ProtocolReason.PEER_LOST, f"no answer from {url} before this side closed"
            ) from None

    async def _exchange(self, method: str, url: str, body: bytes | None) -> tuple[int, bytes]:
        headers = self._headers(method, url, body)
        answer = bytearray()
        try:
            async with self._http.stream(method, url, content=body, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > MAX_ANSWER:
                        raise RemoteProtocolError(ProtocolReason.LIMIT_EXCEEDED, f"{url} answers without end")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            untrusted = "CERTIFICATE_VERIFY_FAILED" in str(error)
            why = "its certificate is not believed (see bootstrap_ca)" if untrusted else type(error).__name__
            raise RemoteProtocolError(ProtocolReason.PEER_LOST, f"no answer from {url}: {why}") from error
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise RemoteProtocolError(ProtocolReason.PEER_LOST, f"{url} is too busy")
        return response.status_code, bytes(answer)

    def _headers(self, method: str, url: str, body: bytes | None) -> dict[str, str]:
        try:
            parts = urlsplit(url)
            _ = parts.port  # reading it is what checks it: a wrong one is a bare error deep inside a connection
        except ValueError as error:
            raise RemoteProtocolError(ProtocolReason.MALFORMED, f"not an address: {url[:200]!r}") from error
        if self._tls_only and parts.scheme != "https":
            raise RemoteProtocolError(
                ProtocolReason.UNAUTHORIZED,
                f"{url[:200]} is not https, and bootstrap_ca is set: services are asked over TLS only; give https "
                "addresses to the router",
            )
        if body is None:
            return {}
        signed = self._signer.headers(method, parts.path, body) if self._signer is not None else {}
        return {"content-type": "application/json", **signed}


def read_listing(body: bytes, url: str) -> tuple[FoundEngine, ...]:
    """The engines in an answer of ``GET /query``; raises :class:`RemoteProtocolError`."""
    try:
        entries = msgspec.json.decode(body, type=dict[int, EngineEntry])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise RemoteProtocolError(ProtocolReason.MALFORMED, f"{url}/query answers something else") from error
    return tuple(_found(dp_rank, entry) for dp_rank, entry in sorted(entries.items()))


def _found(dp_rank: int, entry: EngineEntry) -> FoundEngine:
    tp_size = len(entry.worker_addr)
    stages = {len(stage) for stage in entry.worker_addr.values()}
    card = entry.kvferry
    try:
        (pp_size,) = stages
        addresses = tuple(
            check_endpoint(entry.worker_addr[tp_rank][pp_rank])
            for pp_rank in range(pp_size)
            for tp_rank in range(tp_size)
        )
        if not addresses:
            raise ValueError("no ranks")
    except (ValueError, KeyError) as error:
        raise RemoteProtocolError(
            ProtocolReason.MALFORMED, f"the ranks of engine {entry.engine_id} are not a grid"
        ) from error
    if card is not None and (card.tp_size, card.pp_size, len(card.ranks)) != (tp_size, pp_size, tp_size * pp_size):
        raise RemoteProtocolError(ProtocolReason.MALFORMED, f"engine {entry.engine_id} contradicts its own size")
    for rank in card.ranks if card is not None else ():
        if rank.secure:
            check_endpoint(rank.secure)
    return FoundEngine(EngineId(entry.engine_id), dp_rank, addresses, tp_size, pp_size, card)
