"""Who serves whom: the cells of every consumer component, and the one producer that writes each.

For each (layer, component) of a consumer the boxes of all producers are intersected with the consumer's. Producers with
equal boxes and equal positions are replicas; of a set of ``n`` replicas the k-th consumer that needs a byte of the set
reads from replica ``k mod n``, counted in argument order and by the layouts alone, so the choice is the same for all
layers and all requests. Where boxes of producers overlap in part, the earlier one serves the common cells.

What no producer holds is refused: coordinates at once, positions (a missing context-parallel rank) when a request
needs them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Component, ContextParallel, Group, Placement
from kvferry.plan.boxes import Box, box_of, intersect, remainder
from kvferry.plan.shares import meets

SHARES_LIMIT = 4096
"""Context-parallel ranks of one side; each is a row of the cover that is proven."""

Pair = tuple[int, int]
"""(producer, consumer): places in the two lists of placements."""


@dataclass(frozen=True, slots=True)
class Move:
    """One cell: the part ``box`` of component ``dst`` comes from component ``src``, at all common positions."""

    src: int
    """Place of the component in the producer's placement."""
    dst: int
    """Place of the component in the consumer's placement."""
    box: Box


@dataclass(frozen=True, slots=True)
class Hole:
    """Positions of a consumer component that no producer serves: those of context-parallel rank ``share.rank``."""

    dst: int
    share: ContextParallel


@dataclass(frozen=True, slots=True)
class Assignment:
    """All moves of two sides, and what is left open."""

    moves: dict[Pair, tuple[Move, ...]]
    holes: dict[int, tuple[Hole, ...]]


def assign(producers: Sequence[Placement], consumers: Sequence[Placement]) -> Assignment:
    """Choose one producer for each cell of each consumer component. Raises :class:`PlanError`."""
    offers = _offers(producers)
    wants = [_wants(offers, consumer, worker) for worker, consumer in enumerate(consumers)]
    takers = _takers(wants)
    moves: dict[Pair, list[Move]] = {}
    holes: dict[int, tuple[Hole, ...]] = {}
    cells_of: dict[_Shape, _Cells] = {}
    for consumer, listed in enumerate(wants):
        open_here: list[Hole] = []
        for want in listed:
            cells = cells_of.get(want.shape)
            if cells is None:
                cells = cells_of[want.shape] = _cut(want, takers)
            for producer, box in cells.served:
                move = Move(want.offer.place_of[producer], want.place, box)
                moves.setdefault((producer, consumer), []).append(move)
            open_here += [Hole(want.place, share) for share in cells.unserved]
        holes[consumer] = tuple(open_here)
    return Assignment({pair: tuple(listed) for pair, listed in moves.items()}, holes)


@dataclass(frozen=True, slots=True, eq=False)
class _Traits:
    """What components of equal layers have in common; one object for all of them on one worker."""

    box: Box
    share: ContextParallel | None
    agreement: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Label:
    """A component as seen from the other side."""

    worker: int
    place: int
    component: Component
    group: Group
    traits: _Traits


@dataclass(frozen=True, slots=True)
class _Source:
    """One replica set: equal boxes, equal positions."""

    members: tuple[int, ...]
    box: Box
    share: ContextParallel | None


@dataclass(frozen=True, slots=True, eq=False)
class _Sources:
    """All replica sets of a component; one object for all components that are spread alike over the producers."""

    sets: tuple[_Source, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    """One (layer, component) at all producers that have it."""

    labels: tuple[_Label, ...]
    place_of: dict[int, int]
    """Producer -> place of the component in its placement."""
    sources: _Sources


@dataclass(frozen=True, slots=True)
class _Shape:
    """What decides the cells of a component; equal, because of the same objects, for layers that are sharded alike."""

    consumer: int
    traits: _Traits
    sources: _Sources


@dataclass(frozen=True, slots=True)
class _Want:
    """One component of a consumer that producers have."""

    place: int
    component: Component
    shape: _Shape
    offer: _Offer


@dataclass(frozen=True, slots=True)
class _Cells:
    served: tuple[tuple[int, Box], ...]
    unserved: tuple[ContextParallel, ...]


def _labels(placement: Placement, worker: int) -> Iterable[_Label]:
    known: dict[tuple[object, ...], _Traits] = {}
    for place, component in enumerate(placement.components):
        group = placement.groups[component.group]
        alike = (component.axes, component.content, component.row_tokens, component.group)
        traits = known.get(alike)
        if traits is None:
            axes = tuple((axis.name, axis.total) for axis in component.global_axes)
            agreement = (component.content, component.row_tokens, axes, group.agreement)
            traits = known[alike] = _Traits(box_of(component), group.share, agreement)
        yield _Label(worker, place, component, group, traits)


def _offers(producers: Sequence[Placement]) -> dict[tuple[str, str], _Offer]:
    found: dict[tuple[str, str], list[_Label]] = {}
    for worker, placement in enumerate(producers):
        for label in _labels(placement, worker):
            found.setdefault(label.component.key, []).append(label)
    known: dict[tuple[tuple[int, _Traits], ...], _Sources] = {}
    offers = {}
    for key, labels in found.items():
        alike = tuple((label.worker, label.traits) for label in labels)
        if alike not in known:
            known[alike] = _Sources(_replicas(labels))
        offers[key] = _Offer(tuple(labels), {label.worker: label.place for label in labels}, known[alike])
    return offers


def _replicas(found: Sequence[_Label]) -> tuple[_Source, ...]:
    sets: dict[tuple[Box, ContextParallel | None], list[int]] = {}
    for label in found:
        sets.setdefault((label.traits.box, label.traits.share), []).append(label.worker)
    return tuple(_Source(tuple(members), box, share) for (box, share), members in sets.items())


def _wants(offers: dict[tuple[str, str], _Offer], consumer: Placement, worker: int) -> list[_Want]:
    wants = []
    agreed: set[_Shape] = set()
    for label in _labels(consumer, worker):
        offer = offers.get(label.component.key)
        if offer is None:
            if label.component.optional:
                continue
            raise PlanError(
                PlanReason.MISSING_LAYER,
                f"consumer {worker}: no producer has {label.component.label}: serve the same model on both sides, "
                'give all producer ranks, or mark the component "optional"',
            )
        shape = _Shape(worker, label.traits, offer.sources)
        if shape not in agreed:
            _check_agreement(offer, label)
            agreed.add(shape)
        wants.append(_Want(label.place, label.component, shape, offer))
    return wants


def _check_agreement(offer: _Offer, label: _Label) -> None:
    for source in offer.labels:
        if source.traits.agreement != label.traits.agreement:
            _refuse(source, label)


def _refuse(source: _Label, label: _Label) -> None:
    mine, theirs = source.component, label.component
    facts = {
        "content": (mine.content, theirs.content),
        "tokens_per_row": (mine.row_tokens, theirs.row_tokens),
        "axes (name, total)": tuple([(a.name, a.total) for a in c.global_axes] for c in (mine, theirs)),
        "group (kind, sliding_window, chunk)": (source.group.agreement, label.group.agreement),
    }
    differing = "; ".join(f"{name}: producer {p}, consumer {c}" for name, (p, c) in facts.items() if p != c)
    raise PlanError(
        PlanReason.INCOMPATIBLE_CONTENT,
        f"{theirs.label} of producer {source.worker} and consumer {label.worker} differ in {differing}: "
        "both sides must run the same model with the same cache dtype and attention backend",
    )


def _needs(shape: _Shape, source: _Source) -> bool:
    return intersect(shape.traits.box, source.box) is not None and meets(shape.traits.share, source.share)


def _takers(wants: Sequence[Sequence[_Want]]) -> dict[tuple[int, ...], list[int]]:
    """For each replica set the consumers that need a byte of it, in argument order."""
    takers: dict[tuple[int, ...], list[int]] = {}
    for consumer, listed in enumerate(wants):
        for shape in {want.shape: None for want in listed}:
            for source in shape.sources.sets:
                if _needs(shape, source):
                    known = takers.setdefault(source.members, [])
                    if consumer not in known:
                        known.append(consumer)
    return takers


def _cut(want: _Want, takers: dict[tuple[int, ...], list[int]]) -> _Cells:
    shape = want.shape
    anywhere = [shape.traits.box]
    for source in shape.sources.sets:
        anywhere = remainder(anywhere, source.box)
    if anywhere:
        axes = [axis.name for axis in want.component.global_axes]
        gap = ", ".join(f"{n} [{i.start}, {i.stop})" for n, i in zip(axes, anywhere[0], strict=True))
        raise PlanError(
            PlanReason.MISSING_COORDINATES,
            f"consumer {shape.consumer}: no producer holds {want.component.label} at {gap}: give all producer ranks",
        )
    served: list[tuple[int, Box]] = []
    unserved: list[ContextParallel] = []
    for share in _shares(want):
        left = [shape.traits.box] if meets(shape.traits.share, share) else []
        for source in shape.sources.sets:
            if source.share != share or not _needs(shape, source):
                continue
            chosen = source.members[takers[source.members].index(shape.consumer) % len(source.members)]
            served += [(chosen, met) for part in left if (met := intersect(part, source.box)) is not None]
            left = remainder(left, source.box)
        if left:
            assert share is not None, "without any share, what is left here would be left anywhere"  # noqa: S101
            unserved.append(share)
    return _Cells(tuple(served), tuple(unserved))


def _shares(want: _Want) -> list[ContextParallel | None]:
    """Every share of the producers in the positions of one component."""
    ways = {(share.size, share.interleave) if (share := label.group.share) else None for label in want.offer.labels}
    if len(ways) > 1:
        raise PlanError(
            PlanReason.UNSUPPORTED,
            f"{want.component.label} lies in groups of the producers that deal positions out in {len(ways)} ways: put "
            "it into groups of one context_parallel size and interleave",
        )
    share = want.offer.labels[0].group.share
    if share is None:
        return [None]
    if share.size > SHARES_LIMIT:
        raise PlanError(
            PlanReason.UNSUPPORTED,
            f"context_parallel size {share.size} is over the limit of {SHARES_LIMIT}",
        )
    return [ContextParallel(rank, share.size, share.interleave) for rank in range(share.size)]
