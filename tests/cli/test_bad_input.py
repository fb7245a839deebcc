"""Whatever is done to the files: a plan or a refusal with a reason, never anything else, and soon."""

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.cli.plan import plan_dicts
from kvferry.errors import PlanError
from kvferry.layout import parse_layout
from kvferry.plan import parse_request
from kvferry.testing.strategies import Case, random_case

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 64, 1 << 20, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**40),
    *(0.0, 1.5, 1e308, "", "x", "0", "token", "state", "attention", "cuda:0", [], {}, [None], [[]], {"a": 1}),
]
SECONDS = 2.0
"""For one case in a test run that shares its machine; a quiet one needs a hundredth of it."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def damage(case: Case, rng: random.Random) -> Case:
    copy = json.loads(json.dumps([case.producers, case.consumers, case.request]))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        container, key = rng.choice([p for p in places(copy) if p[0] is not copy])
        match rng.randrange(4):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, dict):
                container[f"{key}_"] = container[key]
            case 2 if isinstance(container, list):
                container.insert(key, container[key])
            case _:
                container[key] = rng.choice(VALUES)
    return Case(copy[0], copy[1], copy[2], "damaged")


def reason_of(work: Callable[..., object], *arguments: object) -> str | None:
    """Why it was refused; None when it was not."""
    try:
        work(*arguments)
    except PlanError as error:
        return error.reason.value
    return None


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_are_planned_or_refused(seed: int) -> None:
    refused = 0
    for number in range(60):
        rng = random.Random(seed * 1000 + number)
        case = damage(random_case(rng), rng)
        start = time.perf_counter()
        refused += reason_of(plan_dicts, case.producers, case.consumers, case.request) is not None
        assert time.perf_counter() - start < SECONDS, f"seed {seed * 1000 + number}"
    assert refused > 20


@pytest.mark.parametrize("seed", range(10))
def test_damaged_bytes_are_refused_by_the_parsers(seed: int) -> None:
    rng = random.Random(seed)
    case = random_case(rng)
    for parse, value in ((parse_layout, case.producers[0]), (parse_request, case.request)):
        data = json.dumps(value).encode()
        for _ in range(200):
            torn = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                torn[rng.randrange(len(torn))] = rng.randrange(256)
            reason = reason_of(parse, bytes(torn[: rng.randrange(len(torn) + 1)]))
            assert reason in (None, "invalid-layout", "invalid-request")
