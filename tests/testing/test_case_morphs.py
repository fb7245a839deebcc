"""Each morph by itself: it changes cases, some can still be planned, and the planner and the oracle agree on all."""

import random

import pytest

from kvferry.testing.case_morphs import MORPHS, morph
from kvferry.testing.fuzz_plan import kvferry_planner, violations_of
from kvferry.testing.strategies import random_case


@pytest.mark.parametrize("name", sorted(MORPHS))
def test_a_morph_makes_another_case_that_can_be_planned(name: str) -> None:
    changed = planned = 0
    for seed in range(3_000_000, 3_000_040):
        rng = random.Random(seed)
        case = random_case(rng)
        before = case.to_json()
        if case.fault is not None:
            continue
        MORPHS[name](case, rng)
        assert violations_of(kvferry_planner, case) == [], seed
        if case.to_json() != before:
            changed += 1
            planned += "error" not in kvferry_planner(case.producers, case.consumers, case.request)
    assert changed >= 5
    assert planned >= 2


def test_the_same_seed_is_the_same_case() -> None:
    cases = []
    for _ in range(2):
        case = random_case(random.Random(5))
        cases.append((morph(case, random.Random(6)), case.to_json()))
    assert cases[0] == cases[1]
