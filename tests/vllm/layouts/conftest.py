"""Bytes of a part, computed one by one from the file form's formula."""

from collections.abc import Callable, Mapping
from itertools import product

import pytest

from kvferry.vllm.layouts import Part

Address = Callable[[Mapping[str, int], int], int]


def addresses(part: Part) -> dict[tuple[tuple[tuple[str, int], ...], int], int]:
    """``(coordinates by axis name, content byte) -> offset in the page`` for every byte of ``part``."""
    found = {}
    for place in product(*(range(axis.count) for axis in part.axes)):
        base = part.offset + sum(i * axis.stride for i, axis in zip(place, part.axes, strict=True))
        names = tuple(sorted((a.name, i + a.start) for i, a in zip(place, part.axes, strict=True)))
        for byte in range(part.content.nbytes):
            found[names, byte] = base + byte
    return found


@pytest.fixture
def assert_exact() -> Callable[[Part, Address], None]:
    """Every byte of a part is where the given formula says."""

    def check(part: Part, expected: Address) -> None:
        found = addresses(part)
        assert len(set(found.values())) == len(found)
        for (names, byte), address in found.items():
            assert address == expected(dict(names), byte), (part.name, names, byte)

    return check


@pytest.fixture
def covered() -> Callable[[tuple[Part, ...]], list[int]]:
    """All bytes of all parts, sorted: equal to a range where they tile it."""

    def collect(parts: tuple[Part, ...]) -> list[int]:
        return sorted(address for part in parts for address in addresses(part).values())

    return collect
