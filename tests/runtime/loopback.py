"""A producer and a consumer in one process and on one loop, joined by a queue instead of sockets.

The messages are the real ones, encoded and decoded; only the wire is missing. For tests of what the runtimes do with
machines, plans and engines; sockets and processes are tested elsewhere.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout import Binding, Layout, bind_layout, encode_placement
from kvferry.protocol import (
    FEATURES,
    ConsumerLimits,
    FetchEnded,
    Note,
    ProducerLimits,
    PullKey,
    Source,
    Span,
    Table,
    Ticket,
)
from kvferry.runtime import Fetch, Local, Publication, RuntimeOptions, Timing
from kvferry.runtime.consumer import ConsumerCore
from kvferry.runtime.journal import ConsumerJournal, ProducerJournal
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.page_reading import HostPages, PageReader
from kvferry.runtime.producer import ProducerCore
from kvferry.runtime.producers import RemoteEngine, RemoteRank
from kvferry.runtime.report import Report
from kvferry.runtime.tally import Tally
from kvferry.testing.faulty import FaultyTransport, Misdeeds
from kvferry.transport import MemoryHub, MemoryTransport, Transport

SOURCE = Source(EngineId("p"), "loopback")


@dataclass
class Memory:
    """Bytes with a layout."""

    layout: Layout
    bytes: np.ndarray

    @classmethod
    def of(cls, layout: Layout) -> "Memory":
        """Memory for a layout whose one region begins at address 0."""
        (region,) = layout.regions
        raw = np.zeros(region.nbytes, np.uint8)
        moved = tuple(msgspec.structs.replace(one, address=one.address + raw.ctypes.data) for one in layout.components)
        here = msgspec.structs.replace(region, address=raw.ctypes.data)
        return cls(msgspec.structs.replace(layout, regions=(here,), components=moved), raw)


class Loopback:
    """Outlet, links and finder at once."""

    def __init__(self, producers: list[ProducerCore], locals_: list[Local]) -> None:
        self.producers = producers
        self.locals = locals_
        self.consumer: ConsumerCore | None = None
        self.cut = False
        """Messages are lost, in both directions."""
        self.features = FEATURES
        """What the producer is said to be able to do."""
        self._keys: list[PullKey] = []

    async def find(self, source: Source) -> RemoteEngine:
        first = self.locals[0]
        ranks = tuple(
            RemoteRank(str(index), local.placement.fingerprint, "memory", self.producers[index].sender.address)
            for index, local in enumerate(self.locals)
        )
        return RemoteEngine(first.incarnation, first.model, ranks, self.features)

    async def placements(self, rank: RemoteRank, fingerprints: tuple[str, ...]) -> Mapping[str, bytes]:
        return {local.placement.fingerprint: encode_placement(local.placement) for local in self.locals}

    def send(self, connection: bytes, data: bytes) -> None:
        if not self.cut and self.consumer is not None:
            key = self._keys[int(connection)]
            asyncio.get_running_loop().call_soon(self.consumer.on_reply, key, data)

    def address_of(self, connection: bytes) -> str:
        return ""

    def pull(self, key: PullKey, address: str, data: bytes, *, number: int | None) -> None:
        self._keys.append(key)
        connection = str(len(self._keys) - 1).encode()
        self._deliver(address, connection, data)

    def note(self, address: str, data: bytes) -> None:
        self._deliver(address, b"none", data)

    def _deliver(self, address: str, connection: bytes, data: bytes) -> None:
        if not self.cut:
            asyncio.get_running_loop().call_soon(self.producers[int(address)].on_message, connection, data)

    def is_open(self, address: str) -> bool:
        return not self.cut

    async def is_quiet(self, rank: RemoteRank, note: Note, *, ask: int) -> bool:
        raise AssertionError("the memory transport's own fence is proof enough")

    def forget(self, key: PullKey) -> None:
        return


@dataclass
class Joined:
    """One producer engine of some ranks and one consumer rank, over a memory hub."""

    thread: LoopThread
    hub: MemoryHub
    producers: list[ProducerCore]
    consumer: ConsumerCore
    wire: Loopback
    source: list[Memory]
    target: Memory
    sent: Tally
    """Of all producer ranks."""
    received: Tally

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run on the loop, and wait."""

        async def run() -> None:
            function(*args)

        self.thread.run(run(), timeout=5)

    def close(self) -> None:
        self.thread.close()


def join(
    producers: list[Layout],
    consumer: Layout,
    *,
    timing: Timing | None = None,
    rows_per_poll: int | None = None,
    report: Report | None = None,
    models: tuple[str, str] = ("m", "m"),
    verify: Literal["off", "sample", "full"] = "off",
    misdeeds: Misdeeds | None = None,
    retries: int = 0,
    consumer_limits: ConsumerLimits | None = None,
    producer_limits: ProducerLimits | None = None,
    make_writer: Callable[[MemoryHub], Transport] | None = None,
    read_device: Callable[[Binding], PageReader] | None = HostPages,
    enter_thread: Callable[[], None] | None = None,
) -> Joined:
    """Build both sides. Layouts have one region, at address 0; one "on a device" is memory of the CPU all the same."""
    thread, hub = LoopThread("loopback"), MemoryHub()
    source, target = [Memory.of(one) for one in producers], Memory.of(consumer)
    bound = [bind_layout(one.layout) for one in source]
    placements = tuple(one.placement for one in bound)
    locals_ = [
        Local(Incarnation(EngineId("p"), "e1"), models[0], index, one.binding, placements, len(bound), 1)
        for index, one in enumerate(bound)
    ]
    here = bind_layout(target.layout)
    local = Local(Incarnation(EngineId("d"), "e2"), models[1], 0, here.binding, (here.placement,), 1, 1)
    if read_device is not None:
        locals_ = [replace(one, device_pages=read_device(one.binding)) for one in locals_]
        local = replace(local, device_pages=read_device(local.binding))
    timing = timing or Timing()
    sending = RuntimeOptions(
        host="loopback",
        timing=timing,
        make_transport=lambda: FaultyTransport(
            make_writer(hub) if make_writer else _memory(hub, rows_per_poll=rows_per_poll), misdeeds or Misdeeds()
        ),
        producer_limits=producer_limits or ProducerLimits(),
        enter_thread=enter_thread,
    )
    receiving = RuntimeOptions(
        host="loopback",
        timing=timing,
        make_transport=lambda: _memory(hub),
        verify=verify,
        retries=retries,
        consumer_limits=consumer_limits or ConsumerLimits(),
        enter_thread=enter_thread,
    )

    async def build() -> tuple[list[ProducerCore], ConsumerCore, Loopback]:
        cores = [ProducerCore(one, thread, sending, journal=ProducerJournal(one, report, sent)) for one in locals_]
        wire = Loopback(cores, locals_)
        core = ConsumerCore(local, thread, receiving, finder=wire, journal=ConsumerJournal(local, report, received))
        wire.consumer = core
        core.attach(wire)
        for one in cores:
            one.attach(wire)
        return cores, core, wire

    sent, received = Tally(), Tally()
    cores, core, wire = thread.run(build(), timeout=5)
    return Joined(thread, hub, cores, core, wire, source, target, sent, received)


def _memory(hub: MemoryHub, *, rows_per_poll: int | None = None) -> MemoryTransport:
    return hub.transport(rows_per_poll=rows_per_poll)


def publication(ticket: int, transfer: str, tokens: int, *tables: Table) -> Publication:
    return Publication(Ticket(ticket), RequestId(f"p-{transfer}"), TransferId(transfer), tokens, tables)


def fetch(ticket: int, transfer: str, span: Span, *tables: Table) -> Fetch:
    return Fetch(Ticket(ticket), RequestId(f"d-{transfer}"), TransferId(transfer), SOURCE, span, tables)


def next_end(joined: Joined) -> FetchEnded:
    return joined.consumer.ended.get(timeout=10)
