"""What a pair of sides would move, from the layouts alone: sorted by kind of component, measured by binding.

The numbers are those of the planner itself: a class is bound to made-up tables whose blocks lie apart (so that nothing
joins across blocks that a scattered cache would not join), over as many tokens as it takes for the entries of both
sides to meet at a common edge. Windows and chunks are left out of the measure; they are told beside it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from kvferry.cli.layers import Alike, name_layers, shape_of
from kvferry.cli.output import counted
from kvferry.layout import Binding, Component
from kvferry.layout.records import LIMIT
from kvferry.plan import BlockTable, PairPlan, Plan, TransferRequest
from kvferry.plan.assign import Move
from kvferry.plan.bind import Side
from kvferry.plan.boxes import Box
from kvferry.plan.pair import ClassKey, ClassPlan, SideOfClass, class_key
from kvferry.plan.request import POSITION_LIMIT
from kvferry.plan.strands import Strand

RUNS_MEASURED = 1 << 20
"""Runs past which one entry of the larger side is measured instead of the common edge of both."""

UNITS_MEASURED = 1 << 22
"""Units that are measured at most, of however unequal sides: then less than one entry of the larger."""


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
class Bridged:
    """The same with ``allow_padding``: fewer descriptors, more bytes; equal where there is nothing to bridge."""

    runs: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What some classes move: attention by tokens, state by requests."""

    tokens: int
    """Tokens measured; 0 where there is no attention."""
    runs: int
    """Descriptors for those tokens, or for one request of a state."""
    nbytes: int
    smallest: int
    bridged: Bridged
    """What it would be if padding might move."""

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
    def name(self) -> str:
        """``layers 0..60 data, scale``."""
        layers = name_layers([c.layer_index for kind in self.kinds for c in kind.dst.members])
        return f"{layers} {', '.join(dict.fromkeys(kind.dst.first.component for kind in self.kinds))}"

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


def name_pairs(pairs: Sequence[PairCost]) -> str:
    """``producer 0 to consumer 1, ...``, the first three by name."""
    named = [f"producer {p.producer} to consumer {p.consumer}" for p in pairs]
    return ", ".join(named[:3]) + (f" and {counted(len(named) - 3, 'more pair')}" if len(named) > 3 else "")


def piece_tokens(side: SideOfClass, component: Component) -> int:
    """Positions of one piece of a block in which rows keep one distance."""
    token = component.token_axis
    assert token is not None, "only attention has pieces"  # noqa: S101
    straight = component.page_stride == token.count * token.stride
    return side.block_tokens if component.pages == 1 or straight else token.count * component.row_tokens


def costs_of(plan: Plan, src: Sequence[Binding], dst: Sequence[Binding]) -> tuple[PairCost, ...]:
    """Every pair of the plan that has something to move; ``src`` and ``dst`` are the workers' own bindings."""
    found = []
    for producer, consumer in plan.pairs():
        pair = plan.pair(producer, consumer)
        if pair is None:
            continue
        bench = _Bench(pair, _lowered(src[producer]), _lowered(dst[consumer]))
        kinds = kinds_of(pair, plan.assignment.moves[producer, consumer])
        classes = tuple(
            ClassCost(one, tuple(k for k in kinds if k.key == one.key), bench.cost_of((one,))) for one in pair.classes
        )
        attention = tuple(one for one in pair.classes if one.key.kind == "attention")
        state = tuple(one for one in pair.classes if one.key.kind == "state")
        sums = (bench.cost_of(some) if some else None for some in (attention, state))
        found.append(PairCost(producer, consumer, classes, *sums))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Likeness:
    """What moves of one kind have in common."""

    src: Component
    dst: Component
    box: Box
    key: ClassKey


def kinds_of(pair: PairPlan, moves: Sequence[Move]) -> tuple[Kind, ...]:
    """The moves of a pair, equal ones together; in order of first appearance."""
    members: dict[_Likeness, list[tuple[Component, Component, Strand]]] = {}
    strands = {plan.key: iter(plan.strands) for plan in pair.classes}
    for move in moves:
        one, other = pair.producer.components[move.src], pair.consumer.components[move.dst]
        key = class_key(one, other, (pair.producer.groups[one.group], pair.consumer.groups[other.group]))
        likeness = _Likeness(shape_of(one), shape_of(other), move.box, key)
        members.setdefault(likeness, []).append((one, other, next(strands[key])))
    return tuple(
        Kind(Alike(tuple(m[0] for m in listed)), Alike(tuple(m[1] for m in listed)), like.box, like.key, listed[0][2])
        for like, listed in members.items()
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """One pair, to be measured."""

    pair: PairPlan
    src: Binding
    dst: Binding

    def cost_of(self, classes: Sequence[ClassPlan]) -> Cost:
        """Bind ``classes``, all of one kind, to tables whose blocks lie apart."""
        unclipped = tuple(replace(c, key=replace(c.key, sliding_window=None, chunk=None)) for c in classes)
        tokens = 0 if classes[0].key.kind == "state" else _span(classes)
        tables = (
            _tables(side, tokens, groups={one.group for one in used})
            for side, used in (
                (Side(self.pair.producer, self.src), [c.key.src for c in classes]),
                (Side(self.pair.consumer, self.dst), [c.key.dst for c in classes]),
            )
        )
        request = TransferRequest(0, max(tokens, 1), *tables)
        pair = replace(self.pair, classes=unclipped)
        exact, bridged = (
            pair.bind(request, src=self.src, dst=self.dst, allow_padding=allowed) for allowed in (False, True)
        )
        smallest = int(exact.nbytes.min()) if exact.count else 0
        return Cost(tokens, exact.count, exact.total_bytes, smallest, Bridged(bridged.count, bridged.total_bytes))


def _span(classes: Sequence[ClassPlan]) -> int:
    """Tokens after which the entries of both sides meet, or so many that the difference does not matter."""
    entries = {side.entry_tokens for c in classes for side in (c.key.src, c.key.dst)}
    once, meeting = max(entries), lcm(*entries)
    runs = sum(c.full.count * meeting // c.key.unit_tokens for c in classes)
    few = min(once, UNITS_MEASURED * min(c.key.unit_tokens for c in classes))
    return min(meeting if runs <= RUNS_MEASURED else few, POSITION_LIMIT // 2)


def _lowered(binding: Binding) -> Binding:
    """The same distances between storages, from address 0 on, so that there is room for blocks behind the last."""
    low = min(binding.bases, default=0)
    return Binding(tuple(base - low for base in binding.bases))


def _tables(side: Side, tokens: int, *, groups: Collection[int]) -> tuple[BlockTable, ...]:
    """Tables for ``groups``, empty ones for the others; without tokens, one block for each state."""
    tables = []
    placement = side.placement
    room = LIMIT - max(side.binding.bases[p.storage] + p.component.stop for p in placement.placed)
    step = 2 * len(placement.groups)
    for number, group in enumerate(placement.groups):
        if number not in groups:
            tables.append(BlockTable.empty())
            continue
        entries = -(-tokens // group.entry_tokens) if group.kind == "attention" else int(not tokens)
        stride = max((c.block_stride for c in placement.components if c.group == number), default=1)
        # No two touch, and groups that overlay one storage have blocks of their own; wrapped where addresses would
        # leave int64.
        ids = (np.arange(entries, dtype=np.int64) * step + 2 * number) % max(1, room // stride)
        tables.append(BlockTable(ids, np.ones(entries, dtype=np.bool_), 0))
    return tuple(tables)
