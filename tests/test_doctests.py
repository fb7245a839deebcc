"""The examples in docstrings of the rooms that need no engine are true."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import kvferry.cli
import kvferry.layout
import kvferry.plan
import kvferry.protocol
import kvferry.testing.layouts

ROOMS = (kvferry.layout, kvferry.plan, kvferry.protocol, kvferry.cli)
MODULES = [
    "kvferry.testing.layouts",
    *(f"{room.__name__}.{found.name}" for room in ROOMS for found in pkgutil.iter_modules(room.__path__)
      if found.name != "__main__"),
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_there_are_examples_at_all() -> None:
    assert sum(doctest.testmod(import_module(name)).attempted for name in MODULES) > 15
