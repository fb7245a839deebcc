"""The planner held to the oracle, byte by byte, over random layouts and requests, and to the cases worked by hand."""

import pytest
from hypothesis import HealthCheck, given, settings

from kvferry.testing.fuzz_plan import fuzz, kvferry_planner, morphed_case, violations_of
from kvferry.testing.oracle import check_plan
from kvferry.testing.strategies import Case, cases
from kvferry.testing.worked import WORKED, Worked

SEEDS = range(1_000_000, 1_001_500)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_right_bytes_in_bounds_each_once_all_of_them(case: Case) -> None:
    assert violations_of(kvferry_planner, case) == []


def test_seeded_cases_and_how_often_each_feature_occurred(capsys: pytest.CaptureFixture[str]) -> None:
    report = fuzz(kvferry_planner, SEEDS)
    with capsys.disabled():
        print(f"\nfeatures in {report.count} cases:\n{report.table()}")
    assert [(f.seed, f.violations[:3]) for f in report.failures] == []
    assert report.rare() == []


def test_seeded_cases_made_into_what_is_not_drawn_else() -> None:
    report = fuzz(kvferry_planner, range(2_000_000, 2_000_500), draw=morphed_case)
    assert [(f.seed, f.violations[:3]) for f in report.failures] == []
    assert report.features["bytes to move"] > 250


@pytest.mark.parametrize("case", WORKED, ids=lambda c: c.name)
def test_worked_cases(case: Worked) -> None:
    plan = kvferry_planner(case.producers, case.consumers, case.request)
    if case.transfers is None:
        assert plan["error"]["reason"] in case.reasons
        return
    got = {(t["producer"], t["consumer"]): sorted(map(list, t["descriptors"])) for t in plan["transfers"]}
    assert got == {pair: sorted(rows) for pair, rows in case.transfers.items()}
    if not case.large:
        assert check_plan(case.producers, case.consumers, case.request, plan) == []
