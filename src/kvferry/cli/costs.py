"""What a pair of sides would move, from the layouts alone: sorted by kind of component, measured by binding.

The numbers are those of the planner itself: a class is bound to made-up tables whose blocks lie apart (so that nothing
joins across blocks that a scattered cache would not join), over as many tokens as it takes for the entries of both
sides to meet at a common edge. Windows and chunks are left out of the measure; they are told beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from kvferry.cli.layers import Alike, alike, shape_of
from kvferry.layout import Component, Placement
from kvferry.layout.records import LIMIT
from kvferry.plan import BlockTable, Descriptors, PairPlan, Plan, TransferRequest
from kvferry.plan.assign import Move
from kvferry.plan.boxes import Box
from kvferry.plan.pair import ClassKey, ClassPlan, class_key
from kvferry.plan.strands import Strand

SPAN_LIMIT = 1 << 18
"""Tokens that are measured at most."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Components that are planned alike: equal shapes on both sides, equal parts moved, one class."""

    src: Alike
    dst: Alike
    box: Box
    """What moves of every global axis, in order of axis name."""
    key: ClassKey
    strand: Strand
    """Of the first member."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What some classes move: attention by tokens, state by requests."""

    tokens: int
    """Tokens measured; 0 where there is no attention."""
    runs: int
    """Descriptors for those tokens, or for one request of a state."""
    nbytes: int
    smallest: int

    def runs_of(self, tokens: int) -> float:
        """Descriptors for so many tokens."""
        return self.runs * tokens / self.tokens if self.tokens else 0.0

    def bytes_of(self, tokens: int) -> float:
        """Bytes for so many tokens."""
        return self.nbytes * tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class ClassCost:
    """One class: what it holds and what it costs."""

    plan: ClassPlan
    kinds: tuple[Kind, ...]
    cost: Cost

    @property
    def runs_per_block(self) -> float:
        """Runs for one table entry of the consumer; for one request of a state."""
        key = self.plan.key
        return self.cost.runs if key.kind == "state" else self.cost.runs_of(key.dst.entry_tokens)

    @property
    def bytes_per_block(self) -> float:
        key = self.plan.key
        return self.cost.nbytes if key.kind == "state" else self.cost.bytes_of(key.dst.entry_tokens)


@dataclass(frozen=True, slots=True)
class PairCost:
    """One (producer, consumer)."""

    producer: int
    consumer: int
    classes: tuple[ClassCost, ...]
    attention: Cost | None
    state: Cost | None


def costs_of(plan: Plan) -> tuple[PairCost, ...]:
    """Every pair of the plan that has something to move."""
    found = []
    for producer, consumer in plan.pairs():
        pair = plan.pair(producer, consumer)
        if pair is not None:
            found.append(_pair_cost(pair, plan.assignment.moves[producer, consumer], producer, consumer))
    return tuple(found)


def _pair_cost(pair: PairPlan, moves: Sequence[Move], producer: int, consumer: int) -> PairCost:
    kinds = kinds_of(pair, moves)
    classes = tuple(
        ClassCost(plan, tuple(k for k in kinds if k.key == plan.key), _measure(pair, (plan,))) for plan in pair.classes
    )
    by_kind = {kind: tuple(p for p in pair.classes if p.key.kind == kind) for kind in ("attention", "state")}
    attention, state = (_measure(pair, plans) if plans else None for plans in by_kind.values())
    return PairCost(producer, consumer, classes, attention, state)


def kinds_of(pair: PairPlan, moves: Sequence[Move]) -> tuple[Kind, ...]:
    """The moves of a pair, equal ones together; in order of first appearance."""
    sets: dict[tuple[object, ...], list[tuple[Component, Component, ClassKey, Strand]]] = {}
    strands = {plan.key: iter(plan.strands) for plan in pair.classes}
    for move in moves:
        one, other = pair.producer.components[move.src], pair.consumer.components[move.dst]
        key = class_key(one, other, (pair.producer.groups[one.group], pair.consumer.groups[other.group]))
        entry = (one, other, key, next(strands[key]))
        sets.setdefault((shape_of(one), shape_of(other), move.box, key), []).append(entry)
    boxes = [signature[2] for signature in sets]
    kinds = []
    for listed, box in zip(sets.values(), boxes, strict=True):
        assert isinstance(box, tuple)  # noqa: S101  (the third part of the signature is the box)
        src, dst = (Alike(tuple(entry[side] for entry in listed)) for side in (0, 1))  # type: ignore[misc]
        kinds.append(Kind(src, dst, box, listed[0][2], listed[0][3]))
    return tuple(kinds)


def _measure(pair: PairPlan, classes: Sequence[ClassPlan]) -> Cost:
    keys = [plan.key for plan in classes]
    state = keys[0].kind == "state"
    span = 1 if state else _span(keys)
    unclipped = tuple(replace(p, key=replace(p.key, sliding_window=None, chunk=None)) for p in classes)
    request = TransferRequest(
        0, span, _tables(pair.producer, span, state=state), _tables(pair.consumer, span, state=state)
    )
    bound = PairPlan(pair.producer, pair.consumer, unclipped).bind(
        request, src=_anywhere(pair.producer), dst=_anywhere(pair.consumer)
    )
    return Cost(0 if state else span, bound.count, bound.total_bytes, _smallest(bound))
