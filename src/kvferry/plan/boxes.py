"""Boxes of coordinates: the algebra behind every kind of parallelism.

A box is one half-open interval for each global axis of a component, in order of axis name. Tensor parallel shards,
replicas, pipeline stages and MLA differ in nothing but their boxes, so there is no case for any of them here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from kvferry.layout import Component


@dataclass(frozen=True, slots=True)
class Interval:
    """Coordinates ``[start, stop)``."""

    start: int
    stop: int

    def meet(self, other: "Interval") -> "Interval":
        """The common part; empty when ``stop <= start``."""
        return Interval(max(self.start, other.start), min(self.stop, other.stop))

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)


Box = tuple[Interval, ...]
"""An empty tuple is the box of a component without global axes: one point."""


def box_of(component: Component) -> Box:
    """What ``component`` holds of the whole model."""
    return tuple(Interval(axis.start, axis.stop) for axis in component.global_axes)


def volume(box: Box) -> int:
    """Points in the box."""
    return prod(interval.size for interval in box)


def intersect(one: Box, other: Box) -> Box | None:
    """The common box, None when there is none."""
    met = tuple(a.meet(b) for a, b in zip(one, other, strict=True))
    return met if volume(met) else None


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """``box`` without ``hole``, cut into disjoint boxes, axis by axis.

    >>> [list(b) for b in subtract((Interval(0, 4),), (Interval(1, 2),))]
    [[Interval(start=0, stop=1)], [Interval(start=2, stop=4)]]
    """
    met = intersect(box, hole)
    if met is None:
        yield box
        return
    for axis, (whole, cut) in enumerate(zip(box, met, strict=True)):
        for side in (Interval(whole.start, cut.start), Interval(cut.stop, whole.stop)):
            if side.size:
                yield (*met[:axis], side, *box[axis + 1 :])


def remainder(boxes: Sequence[Box], hole: Box) -> list[Box]:
    """All of ``boxes`` (disjoint) without ``hole``."""
    return [part for box in boxes for part in subtract(box, hole)]
