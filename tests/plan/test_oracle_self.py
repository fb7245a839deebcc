"""The oracle against cases worked by hand, against plans of the slow planner, and against plans with a fault put in."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.testing.case_features import EVERY
from kvferry.testing.fuzz_plan import Report, fuzz, kvferry_planner, shrink, violations_of
from kvferry.testing.naive import plan_naively
from kvferry.testing.oracle import Expectation, Refusal, check_plan, expect, judge
from kvferry.testing.strategies import Case, features, random_case
from kvferry.testing.worked import WORKED, Worked

Json = dict[str, Any]
SEEDS = range(300)
SMALL = [case for case in WORKED if not case.large]
BY_NAME = {case.name: case for case in WORKED}


def plan_of(case: Worked) -> Json:
    """The worked answer as the command would print it."""
    assert case.transfers is not None
    copies = [row for rows in case.transfers.values() for row in rows]
    return {
        "format": "kvferry.plan/1",
        "transfers": [{"producer": p, "consumer": c, "descriptors": rows} for (p, c), rows in case.transfers.items()],
        "stats": {"descriptors": len(copies), "bytes": sum(row[2] for row in copies)},
    }


def planned_cases() -> Iterator[tuple[Case, Expectation]]:
    for seed in SEEDS:
        case = random_case(random.Random(seed))
        expected = expect(case.producers, case.consumers, case.request)
        if isinstance(expected, Expectation):
            yield case, expected


@pytest.mark.parametrize("case", [c for c in SMALL if c.transfers is not None], ids=lambda c: c.name)
def test_accepts_the_worked_answer(case: Worked) -> None:
    assert check_plan(case.producers, case.consumers, case.request, plan_of(case), strict=True) == []


@pytest.mark.parametrize("case", [c for c in WORKED if c.transfers is not None], ids=lambda c: c.name)
def test_slow_planner_gives_the_worked_answer(case: Worked) -> None:
    plan = plan_naively(case.producers, case.consumers, case.request)
    got = {(t["producer"], t["consumer"]): sorted(t["descriptors"]) for t in plan["transfers"]}
    assert got == {pair: sorted(rows) for pair, rows in (case.transfers or {}).items()}


@pytest.mark.parametrize("case", [c for c in SMALL if c.reasons], ids=lambda c: c.name)
def test_gives_the_worked_reasons(case: Worked) -> None:
    expected = expect(case.producers, case.consumers, case.request)
    assert isinstance(expected, Refusal)
    assert expected.reasons == case.reasons


def test_every_worked_case_says_what_it_expects() -> None:
    assert [case.name for case in WORKED if (case.transfers is None) == (not case.reasons)] == []
    assert len(BY_NAME) == len(WORKED)


def test_accepts_plans_of_the_slow_planner() -> None:
    for case, expected in planned_cases():
        for rng in (None, random.Random(7)):
            plan = plan_naively(case.producers, case.consumers, case.request, rng=rng)
            assert judge(expected, plan, strict=True) == [], case.to_json()


def test_a_refusal_of_what_can_be_planned_is_wrong() -> None:
    case = BY_NAME["tp2 to tp1"]
    refusal = {"error": {"reason": "unsupported", "message": ""}}
    assert check_plan(case.producers, case.consumers, case.request, refusal)


def test_a_plan_for_what_must_be_refused_is_wrong() -> None:
    case = BY_NAME["one id in two groups"]
    plan = {"format": "kvferry.plan/1", "transfers": [], "stats": {"descriptors": 0, "bytes": 0}}
    assert check_plan(case.producers, case.consumers, case.request, plan)
    wrong_name = {"error": {"reason": "missing-layer", "message": ""}}
    assert check_plan(case.producers, case.consumers, case.request, wrong_name)


# ------------------------------------------------------------------------------------------------------ mutated plans


def counted(plan: Json) -> Json:
    """The plan with its numbers made right again, so that only the mutation itself is wrong."""
    rows = [row for transfer in plan["transfers"] for row in transfer["descriptors"]]
    plan["stats"] = {"descriptors": len(rows), "bytes": sum(row[2] for row in rows)}
    return plan


def drop(plan: Json, rng: random.Random) -> None:
    rows = rng.choice(plan["transfers"])["descriptors"]
    rows.pop(rng.randrange(len(rows)))
    plan["transfers"] = [t for t in plan["transfers"] if t["descriptors"]]


def pick(plan: Json, rng: random.Random) -> list[int]:
    row: list[int] = rng.choice(rng.choice(plan["transfers"])["descriptors"])
    return row


def shift_source(plan: Json, rng: random.Random) -> None:
    pick(plan, rng)[0] += 1


def shift_destination(plan: Json, rng: random.Random) -> None:
    pick(plan, rng)[1] += 1


def shorten(plan: Json, rng: random.Random) -> None:
    long = [row for transfer in plan["transfers"] for row in transfer["descriptors"] if row[2] > 1]
    if long:
        rng.choice(long)[2] -= 1
    else:
        drop(plan, rng)


def double(plan: Json, rng: random.Random) -> None:
    rows = rng.choice(plan["transfers"])["descriptors"]
    rows.append(list(rng.choice(rows)))


def empty_transfer(plan: Json, rng: random.Random) -> None:
    plan["transfers"].append({**rng.choice(plan["transfers"]), "descriptors": []})


def two_transfers(plan: Json, rng: random.Random) -> None:
    transfer = rng.choice([t for t in plan["transfers"] if len(t["descriptors"]) > 1] or plan["transfers"])
    if len(transfer["descriptors"]) == 1:
        empty_transfer(plan, rng)
    else:
        plan["transfers"].append({**transfer, "descriptors": [transfer["descriptors"].pop()]})


MUTATIONS = [drop, shift_source, shift_destination, shorten, double, empty_transfer, two_transfers]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_rejects_mutated_plans(mutate: Callable[[Json, random.Random], None]) -> None:
    tried = 0
    for case, expected in planned_cases():
        plan = plan_naively(case.producers, case.consumers, case.request)
        if not plan["transfers"]:
            continue
        before = copy.deepcopy(plan)
        mutate(plan, random.Random(3))
        assert plan["transfers"] != before["transfers"]
        assert judge(expected, counted(plan)), (mutate.__name__, case.to_json(), plan)
        tried += 1
    assert tried > 100


def test_rejects_descriptors_that_are_not_joined() -> None:
    tried = 0
    for case, expected in planned_cases():
        plan = plan_naively(case.producers, case.consumers, case.request)
        long = [(t, row) for t in plan["transfers"] for row in t["descriptors"] if row[2] > 1]
        if long:
            transfer, row = random.Random(case.to_json()).choice(long)
            transfer["descriptors"].append([row[0] + 1, row[1] + 1, row[2] - 1])
            row[2] = 1
            assert any("not joined" in said for said in judge(expected, counted(plan))), case.to_json()
            tried += 1
    assert tried > 100


def test_rejects_the_other_replica() -> None:
    tried = 0
    for case, expected in planned_cases():
        plan = plan_naively(case.producers, case.consumers, case.request)
        for transfer in plan["transfers"]:
            other = _twin(case, expected, transfer["producer"])
            if other is None or any(t["producer"] == other for t in plan["transfers"]):
                continue
            sources = {byte: address for address, byte in expected.sources[other].items()}
            mine = expected.sources[transfer["producer"]]
            rows = [
                [sources[mine[src + i]], dst + i, 1]
                for src, dst, nbytes in transfer["descriptors"]
                for i in range(nbytes)
            ]
            changed = {**plan, "transfers": [t for t in plan["transfers"] if t is not transfer]}
            changed["transfers"].append({**transfer, "producer": other, "descriptors": rows})
            said = judge(expected, counted(changed))
            assert any("wrong replica" in violation for violation in said), case.to_json()
            tried += 1
            break
    assert tried > 5


def _twin(case: Case, expected: Expectation, producer: int) -> int | None:
    """Another producer with exactly the same bytes of the model in its listed blocks."""
    held = set(expected.sources[producer].values())
    boxes = [sorted((c["layer"], c["component"]) for c in file["components"]) for file in case.producers]
    for other, source in enumerate(expected.sources):
        if other != producer and boxes[other] == boxes[producer] and set(source.values()) == held:
            return other
    return None


def test_rejects_moved_padding() -> None:
    case = BY_NAME["live pages apart"]
    plan = {**plan_of(case), "transfers": [{"producer": 0, "consumer": 0, "descriptors": [[2560, 2560, 2024]]}]}
    said = check_plan(case.producers, case.consumers, case.request, counted(plan))
    assert any("must not be written" in violation for violation in said)


def test_rejects_a_descriptor_across_a_seam() -> None:
    case = BY_NAME["U01 regions that touch"]
    plan = {**plan_of(case), "transfers": [{"producer": 0, "consumer": 0, "descriptors": [[0, 1000, 250]]}]}
    said = check_plan(case.producers, case.consumers, case.request, counted(plan))
    assert said == ["0 -> 0 Copy(src=0, dst=1000, nbytes=250): source outside one region"]


def test_rejects_wrong_numbers() -> None:
    case = BY_NAME["tp2 to tp1"]
    plan = {**plan_of(case), "stats": {"descriptors": 1, "bytes": 2048}}
    assert [v[:9] for v in check_plan(case.producers, case.consumers, case.request, plan)] == ["stats are"]


# ------------------------------------------------------------------------------------------------- cases and fuzz runs


def test_a_seed_names_a_case() -> None:
    first, again = random_case(random.Random(11)), random_case(random.Random(11))
    assert first.to_json() == again.to_json()


def test_every_feature_occurs() -> None:
    report = Report()
    for seed in range(1500):
        report.features.update(features(random_case(random.Random(seed))))
        report.count += 1
    assert report.rare() == []
    assert set(report.features) <= set(EVERY)
    assert 12 <= 100 * report.features["refused"] / report.count <= 28


def test_a_table_that_begins_inside_an_entry_has_no_positions() -> None:
    """Seed 8744: rows of several tokens and context parallel ranks, at positions that no rank holds."""
    case = random_case(random.Random(8744))
    assert case.request["consumer"][1]["first_token"] == 1
    expected = expect(case.producers, case.consumers, case.request)
    assert isinstance(expected, Refusal)
    assert "invalid-request" in expected.reasons


def test_a_state_may_leave_out_what_only_rows_have() -> None:
    """Seed 77682: the contract names no row of a state, so a file without these fields is planned, or refused."""
    case = random_case(random.Random(77682))
    assert case.fault == "missing_field"
    [part] = [p for f in case.consumers for p in f["components"] if "tokens_per_row" not in p]
    assert violations_of(kvferry_planner, case) == []
    expected = expect(case.producers, case.consumers, case.request)
    refusal = {"error": {"reason": "invalid-layout", "message": ""}}
    assert isinstance(expected, Expectation)
    assert judge(expected, refusal) == []
    part["group"] = next(i for i, g in enumerate(case.consumers[0]["groups"]) if g["kind"] == "attention")
    assert isinstance(expect(case.producers, case.consumers, case.request), Refusal)


def test_cases_without_a_fault_can_be_planned() -> None:
    for seed in SEEDS:
        case = random_case(random.Random(seed))
        if case.fault is None:
            assert isinstance(expect(case.producers, case.consumers, case.request), Expectation), case.to_json()


def test_a_fuzz_run_finds_and_shrinks_a_broken_planner() -> None:
    def forgets_the_last_descriptor(producers: list[Json], consumers: list[Json], request: Json) -> Json:
        expected = expect(producers, consumers, request)
        if isinstance(expected, Refusal):
            return {"error": {"reason": min(expected.reasons), "message": ""}}
        plan = plan_naively(producers, consumers, request)
        if plan["stats"]["descriptors"] > 1:
            plan["transfers"][0]["descriptors"].pop()
            plan["transfers"] = [t for t in plan["transfers"] if t["descriptors"]]
        return counted(plan)

    report = fuzz(forgets_the_last_descriptor, range(50), most_failures=1)
    [failure] = report.failures
    small = shrink(forgets_the_last_descriptor, failure)
    assert violations_of(forgets_the_last_descriptor, small.case)
    assert len(small.case.to_json()) <= len(failure.case.to_json())
