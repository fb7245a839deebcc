"""Cases of the planner's oracle carried out in memory of this process: each rank's bytes, and the plan's copies made.

What comes of it is looked at by digests, read in any way that a test gives.
"""

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.layout import BoundLayout, Layout, bind_layout, parse_layout
from kvferry.plan import BlockTable, Plan, TransferRequest, compile_plan, parse_request
from kvferry.protocol import VerifyAsk
from kvferry.runtime.page_reading import HostPages, PageReader
from kvferry.runtime.report import Side
from kvferry.runtime.verify import digests_of
from kvferry.runtime.verify_hashing import Digests
from kvferry.runtime.verify_pages import Job
from kvferry.testing.strategies import Case


@dataclass(frozen=True)
class Rank:
    """One worker's layout, over memory of this process that holds what the seed gives."""

    bound: BoundLayout
    bytes: NDArray[np.uint8]
    low: int
    """Address of the first byte in the layout as it was drawn."""

    @classmethod
    def of(cls, value: object, seed: int) -> "Rank":
        """From a layout's file form."""
        layout: Layout = parse_layout(json.dumps(value).encode())
        low = min(region.address for region in layout.regions)
        size = max(region.address + region.nbytes for region in layout.regions) - low
        content = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        shift = content.ctypes.data - low
        regions = tuple(msgspec.structs.replace(one, address=one.address + shift) for one in layout.regions)
        components = tuple(msgspec.structs.replace(one, address=one.address + shift) for one in layout.components)
        moved = msgspec.structs.replace(layout, regions=regions, components=components)
        return cls(bind_layout(moved), content, low)

    def on_host(self) -> PageReader:
        """Reads it as memory of the CPU."""
        return HostPages(self.bound.binding)


@dataclass(frozen=True)
class World:
    """A case that can be planned, carried out."""

    plan: Plan
    request: TransferRequest
    producers: list[Rank]
    consumers: list[Rank]

    @classmethod
    def of(cls, case: Case) -> "World":
        """Memory for all ranks, and all copies made; raises ``PlanError`` where there is no plan."""
        producers = [Rank.of(one, index) for index, one in enumerate(case.producers)]
        consumers = [Rank.of(one, 1000 + index) for index, one in enumerate(case.consumers)]
        plan = compile_plan([one.bound.placement for one in producers], [one.bound.placement for one in consumers])
        world = cls(plan, parse_request(json.dumps(case.request).encode()), producers, consumers)
        for producer, consumer in plan.pairs():
            world.move(producer, consumer)
        return world

    def move(self, producer: int, consumer: int) -> None:
        """Make the copies of one pair of ranks."""
        src, dst = self.producers[producer].bound.binding, self.consumers[consumer].bound.binding
        rows = self.plan.bind(self.request, producer, consumer, src=src, dst=dst)
        for source, target, nbytes in zip(rows.src.tolist(), rows.dst.tolist(), rows.nbytes.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)

    def wrong_pairs(self, ask: VerifyAsk) -> list[tuple[int, int]]:
        """Pairs of ranks whose digests differ."""
        return [pair for pair in self.plan.pairs() if self.digests(pair, ask, "producer") != self.digests(pair, ask)]

    def digests(
        self,
        pair: tuple[int, int],
        ask: VerifyAsk,
        side: Side = "consumer",
        *,
        read: Callable[[Rank], PageReader] = Rank.on_host,
    ) -> Digests:
        """What one end of a pair of ranks makes of its own memory."""
        tables = self.request.producer
        if side == "consumer":  # it is not told them
            tables = tuple(BlockTable.empty() for _ in tables)
        request = TransferRequest(self.request.start, self.request.stop, tables, self.request.consumer)
        rank = self.producers[pair[0]] if side == "producer" else self.consumers[pair[1]]
        return digests_of(Job(self.plan, pair, request, ask), side=side, reader=read(rank))
