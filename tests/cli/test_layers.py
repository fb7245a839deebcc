"""Naming of equal layers, and numbers of bytes for people."""

import doctest

import pytest

from kvferry.cli import layers, output, svg
from kvferry.cli.layers import alike, name_layers
from kvferry.testing.layouts import page


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([0, 1, 2], "layers 0..2"),
        ([5], "layer 5"),
        ([0, 1, 2, 4, 5, 6], "layers 0..2, 4..6"),
        ([0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16], "layers 0..2, 4..6, ..., 16 (13 in all)"),
        (range(1, 48, 2), "layers 1, 3, ..., 47 (every 2nd)"),
        (range(10, 88, 11), "layers 10, 21, ..., 87 (every 11th)"),
        (range(0, 105, 21), "layers 0, 21, ..., 84 (every 21st)"),
    ],
)
def test_indices_for_people(indices: list[int], words: str) -> None:
    assert name_layers(indices) == words


def test_layers_are_alike_but_for_place_and_name() -> None:
    same = [page("a.0", tokens=4, nbytes=8), page("b.1", tokens=4, nbytes=8, address=512)]
    wider = page("b.2", tokens=4, nbytes=8, block_stride=64)
    assert [len(one.members) for one in alike([*same, wider])] == [2, 1]


@pytest.mark.parametrize("module", [layers, output, svg])
def test_examples_in_the_docstrings(module: object) -> None:
    found = doctest.testmod(module)  # type: ignore[arg-type]
    assert (found.failed, found.attempted > 0) == (0, True)
