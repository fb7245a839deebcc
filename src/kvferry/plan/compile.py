"""Compile two sides into a plan, and bind it to a request.

``compile_plan`` looks at placements only: it can be cached by their fingerprints and says at once what can never work
(a layer, coordinates or content that no producer has). :meth:`Plan.check` looks at the tables of one request, once for
all pairs; :meth:`PairPlan.bind` turns one pair and one request into descriptors.

>>> from kvferry.layout import *
>>> from kvferry.plan import BlockTable
>>> def worker(base):
...     axes = (Axis("token", 0, 4, 4, 8),)
...     box = Component("l0", 0, "kv", 0, base, 8, 32, axes, Content(8, "x"), 1, 32, 1)
...     here = Layout("e", Parallel(0, 1, 0, 1, 0, 1), (Region(base, 256),), (Group("attention", 4),), (box,))
...     return bind_layout(here)
>>> p, d = worker(1000), worker(5000)
>>> plan = compile_plan([p.placement], [d.placement])
>>> request = TransferRequest(0, 6, (BlockTable.of([1, 2], first_token=0),), (BlockTable.of([5, 6], first_token=0),))
>>> moved = plan.bind(request, 0, 0, src=p.binding, dst=d.binding)
>>> moved.src.tolist(), moved.dst.tolist(), moved.nbytes.tolist()
([1032], [5160], [48])
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from kvferry.layout import Binding, InvalidLayoutError, Placement, check_binding, regions_of
from kvferry.plan.assign import Assignment, Hole, Pair, assign
from kvferry.plan.bind import Side, finish, joined_copies
from kvferry.plan.descriptors import Descriptors
from kvferry.plan.padding import Framed, Frames, bridge, frames_of
from kvferry.plan.pair import ClassPlan, classes_of, hole_key
from kvferry.plan.request import SideTables, TransferRequest
from kvferry.plan.units import attention_units, missing_rank, needed_of
from kvferry.plan.verify import verify_descriptors

MAX_DESCRIPTORS = 16_000_000

Verify = Literal["proven", "paranoid"]


@dataclass(frozen=True)
class PairPlan:
    """What one producer rank writes to one consumer rank."""

    producer: Placement
    consumer: Placement
    classes: tuple[ClassPlan, ...]

    @cached_property
    def frames(self) -> tuple[tuple[Frames, ...], tuple[Frames, ...]]:
        """What a block owns, at the producer and at the consumer."""
        return frames_of(self.producer), frames_of(self.consumer)

    @property
    def rows(self) -> int:
        """Runs in one unit, over all classes."""
        return sum(plan.full.count for plan in self.classes)

    def bind(
        self,
        request: TransferRequest,
        *,
        src: Binding,
        dst: Binding,
        max_descriptors: int = MAX_DESCRIPTORS,
        verify: Verify = "proven",
        allow_padding: bool = False,
    ) -> Descriptors:
        """The descriptors of one request, sorted by source address.

        The tables must have passed :meth:`Plan.check`. ``allow_padding`` may write padding of a block that the
        consumer lists, where that joins two live runs (:mod:`kvferry.plan.padding`). Raises :class:`PlanError`
        (``missing-positions``, ``limit-exceeded``).
        """
        check_binding(self.producer, src)
        check_binding(self.consumer, dst)
        here, there = Side(self.producer, src), Side(self.consumer, dst)
        copies = joined_copies(self.classes, request, here, there)
        if allow_padding:
            copies = bridge(
                copies, request.consumer, src=Framed(here, self.frames[0]), dst=Framed(there, self.frames[1])
            )
        descriptors = finish(copies, here, there, max_descriptors=max_descriptors)
        if verify == "paranoid":
            verify_descriptors(descriptors, src=regions_of(self.producer, src), dst=regions_of(self.consumer, dst))
        return descriptors


@dataclass(frozen=True)
class Plan:
    """All pairs of two sides; pairs are compiled when first asked for."""

    producers: tuple[Placement, ...]
    consumers: tuple[Placement, ...]
    assignment: Assignment
    producer_side: SideTables
    consumer_side: SideTables
    _pairs: dict[Pair, PairPlan] = field(default_factory=dict, repr=False, compare=False)

    def pairs(self) -> tuple[Pair, ...]:
        """(producer, consumer) of every pair that has something to move, in order."""
        return tuple(sorted(self.assignment.moves))

    def pair(self, producer: int, consumer: int) -> PairPlan | None:
        """The plan of one pair; None when they have nothing in common."""
        moves = self.assignment.moves.get((producer, consumer))
        if moves is None:
            return None
        known = self._pairs.get((producer, consumer))
        if known is None:
            src, dst = self.producers[producer], self.consumers[consumer]
            known = self._pairs[producer, consumer] = PairPlan(src, dst, classes_of(src, dst, moves))
        return known

    def check(self, request: TransferRequest) -> None:
        """Tables of both sides, and positions that no producer rank serves. Raises :class:`PlanError`."""
        self.producer_side.check(request.producer)
        self.consumer_side.check(request.consumer)
        for consumer, holes in self.assignment.holes.items():
            for hole in holes:
                self._check_hole(request, consumer, hole)

    def bind(
        self, request: TransferRequest, producer: int, consumer: int, *, src: Binding, dst: Binding
    ) -> Descriptors:
        """Check ``request`` and bind one pair; empty when the two have nothing in common."""
        self.check(request)
        pair = self.pair(producer, consumer)
        return Descriptors.empty() if pair is None else pair.bind(request, src=src, dst=dst)

    def _check_hole(self, request: TransferRequest, consumer: int, hole: Hole) -> None:
        key = hole_key(self.consumers[consumer], hole)
        needed = needed_of(key, request)
        units = attention_units(key, needed, request.consumer[key.dst.group])
        if units.size:
            raise missing_rank(hole.share, key.dst, max(int(units[0]) * key.unit_tokens, needed.start))


def compile_plan(producers: Sequence[Placement], consumers: Sequence[Placement]) -> Plan:
    """Plan two sides, given in rank order. Raises :class:`PlanError` when they cannot be planned."""
    sides = [_side("producer", producers), _side("consumer", consumers)]
    assignment = assign(producers, consumers)
    return Plan(tuple(producers), tuple(consumers), assignment, sides[0], sides[1])


def _side(name: str, placements: Sequence[Placement]) -> SideTables:
    if not placements:
        raise InvalidLayoutError(f"the {name} side has no layout")
    groups = tuple(group.without_rank() for group in placements[0].groups)
    for place, placement in enumerate(placements):
        if not placement.storages:
            raise InvalidLayoutError(f"{name} {place} has no regions: it is a placement, without memory to copy")
        theirs = tuple(group.without_rank() for group in placement.groups)
        if theirs != groups:
            raise InvalidLayoutError(
                f"groups of {name} {place} are {theirs}, those of {name} 0 are {groups}: "
                "all files of a side have equal groups"
            )
    blocks = [
        min((p.blocks_of_group[g] for p in placements if p.blocks_of_group[g]), default=0) for g in range(len(groups))
    ]
    overlays = sorted({overlay for p in placements for overlay in p.overlays})
    return SideTables(name, groups, tuple(blocks), tuple(overlays))
