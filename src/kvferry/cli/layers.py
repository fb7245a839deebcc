"""Layers that are alike, said once: 61 equal layers are one line of a table and one frame of a picture.

Two layers are alike when all their components agree in everything but layer, name and address.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import msgspec

from kvferry.layout import TOKEN, Component

RANGES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Alike:
    """Components of several layers that differ in nothing but their layer and their address."""

    members: tuple[Component, ...]

    @property
    def first(self) -> Component:
        return self.members[0]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(sorted({c.layer_index for c in self.members}))

    @property
    def layers(self) -> str:
        """``layers 0..60``, ``layer 3``."""
        return name_layers(self.indices)


def shape_of(component: Component) -> Component:
    """The component without what tells equal layers apart."""
    return msgspec.structs.replace(component, layer="-", layer_index=0, address=0)


def alike(components: Iterable[Component]) -> tuple[Alike, ...]:
    """Sort ``components`` into sets of equal shape, in order of first appearance."""
    sets: dict[Component, list[Component]] = {}
    for component in components:
        sets.setdefault(shape_of(component), []).append(component)
    return tuple(Alike(tuple(members)) for members in sets.values())


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal stretches ``first..last``.

    >>> ranges([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    found = []
    for _, run in groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        found.append((members[0], members[-1]))
    return found


def name_layers(indices: Sequence[int]) -> str:
    """Indices for people.

    >>> name_layers([7]), name_layers(range(61))
    ('layer 7', 'layers 0..60')
    >>> name_layers([3, 7, 11, 15, 19])
    'layers 3, 7, ..., 19 (every 4th)'
    """
    stretches = ranges(indices)
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in stretches]
    word = "layer" if len(set(indices)) == 1 else "layers"
    if len(shown) <= RANGES_SHOWN:
        return f"{word} {', '.join(shown)}"
    steps = {b[0] - a[0] for a, b in pairwise(stretches)}
    single = all(a == b for a, b in stretches)
    every = f" (every {_ordinal(steps.pop())})" if single and len(steps) == 1 else f" ({len(set(indices))} in all)"
    return f"{word} {', '.join(shown[:2])}, ..., {shown[-1]}{every}"


def _ordinal(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10 if number % 100 // 10 != 1 else 0, 'th') }"


def pattern_of(component: Component) -> str:
    """The layer's name with its index left open.

    >>> from kvferry.testing.layouts import page
    >>> pattern_of(page("model.layers.3.attn", tokens=4, nbytes=8))
    'model.layers.*.attn'
    """
    words = [("*" if w == str(component.layer_index) else w) for w in component.layer.split(".")]
    return ".".join(words)


def part_of(name: str, start: int, stop: int, total: int) -> str:
    """Coordinates ``[start, stop)`` of an axis, the last one included as in layer numbers.

    >>> part_of("head", 0, 4, 4), part_of("head", 2, 4, 4), part_of("head", 3, 4, 4)
    ('head 0..3 (all)', 'head 2..3 of 4', 'head 3 of 4')
    """
    numbers = str(start) if stop - start == 1 else f"{start}..{stop - 1}"
    whole = (start, stop) == (0, total)
    return f"{name} {numbers} {'(all)' if whole else f'of {total}'}"


def axes_of(component: Component) -> str:
    """``head 2..3 of 4, 64 tokens``: in order of address, largest stride first."""
    words = []
    for axis in sorted(component.axes, key=lambda a: -a.stride):
        if axis.name == TOKEN:
            rows = f"{axis.count} rows of {component.row_tokens} tokens"
            words.append(f"{axis.count} tokens" if component.row_tokens == 1 else rows)
        else:
            words.append(part_of(axis.name, axis.start, axis.stop, axis.total))
    return ", ".join(words)
