"""Which engine ids live behind a prefill address: asked of its bootstrap service, believed for a few seconds.

A restarted engine has a new id, and decode cannot pull under the old one. So what is known is dropped when it is a few
seconds old (no engine starts faster) and whenever a request to that engine, or a decode after it, failed.
"""

import asyncio
from dataclasses import dataclass, field

import msgspec

from kvferry.ids import EngineId
from kvferry.router.config import Prefill
from kvferry.router.engines import Engines
from kvferry.router.faults import FaultReason, RefusedError, UpstreamError
from kvferry.router.pool import Clock


class _Ferry(msgspec.Struct, frozen=True):
    features: tuple[str, ...] = ()


class _Entry(msgspec.Struct, frozen=True):
    """What the router reads of one entry of ``GET /query``; unknown fields are others' business."""

    engine_id: str
    kvferry: _Ferry | None = None


@dataclass(frozen=True, slots=True)
class Registered:
    """One engine behind a prefill address."""

    engine_id: EngineId
    rank: int | None
    """Its data-parallel rank; None when it is the only one."""
    releasable: bool
    """Whether its bootstrap service takes ``POST /kvferry/release``."""


@dataclass(slots=True)
class _Page:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    engines: tuple[Registered, ...] = ()
    read_at: float = float("-inf")
    turn: int = 0
    faults: int = 0
    """Queries that failed, ever."""
    fault: UpstreamError | None = None
    """Of the last one."""


class Directory:
    """Engine ids of all prefill addresses."""

    def __init__(self, engines: Engines, *, ttl: float, clock: Clock) -> None:
        self._engines = engines
        self._ttl = ttl
        self._clock = clock
        self._pages: dict[Prefill, _Page] = {}

    async def choose(self, prefill: Prefill) -> Registered:
        """The engine to use next at that address: its data-parallel ranks take turns."""
        page = self._pages.setdefault(prefill, _Page())
        faults = page.faults
        async with page.lock:
            if self._clock() - page.read_at >= self._ttl:
                if page.faults != faults:
                    # While this one waited the service was asked, in vain: the next would only wait as long again.
                    raise _again(page.fault)
                await self._read(page, prefill)
        page.turn += 1
        return page.engines[page.turn % len(page.engines)]

    def forget(self, prefill: Prefill) -> None:
        """Ask again before the next use."""
        if (page := self._pages.get(prefill)) is not None:
            page.read_at = float("-inf")

    async def _read(self, page: _Page, prefill: Prefill) -> None:
        try:
            page.engines = await self._query(prefill)
        except UpstreamError as fault:
            page.faults, page.fault = page.faults + 1, fault
            raise
        page.read_at = self._clock()

    async def _query(self, prefill: Prefill) -> tuple[Registered, ...]:
        try:
            answer = await self._engines.get(f"{prefill.bootstrap}/query")
            entries = msgspec.json.decode(answer.body, type=dict[int, _Entry])
        except (msgspec.DecodeError, RecursionError) as error:
            raise UpstreamError(FaultReason.MALFORMED, "bootstrap answer", reached=False) from error
        except RefusedError as refusal:
            # Something answers there that is no bootstrap service: the engine's fault, not the client's.
            message = f"bootstrap status {refusal.answer.status}"
            raise UpstreamError(FaultReason.MALFORMED, message, reached=False) from refusal
        except UpstreamError as fault:
            raise UpstreamError(fault.reason, f"bootstrap: {fault.message}", reached=False) from fault
        if not entries:
            raise UpstreamError(FaultReason.NOT_REGISTERED, "no engine has registered yet", reached=False)
        return tuple(
            Registered(
                engine_id=EngineId(entry.engine_id),
                rank=rank if len(entries) > 1 else None,
                releasable=entry.kvferry is not None and "release" in entry.kvferry.features,
            )
            for rank, entry in sorted(entries.items())
        )


def _again(fault: UpstreamError | None) -> UpstreamError:
    assert fault is not None, "a fault was counted with it"  # noqa: S101
    return UpstreamError(fault.reason, fault.message, reached=False)
