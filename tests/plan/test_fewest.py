"""No fewer descriptors would do: as many as there are maximal runs in what is moved, counted byte by byte."""

import random

import pytest

from kvferry.testing.fuzz_plan import kvferry_planner
from kvferry.testing.strategies import Case, random_case

Pairs = set[tuple[int, int]]


def byte_pairs(descriptors: list[tuple[int, int, int]]) -> Pairs:
    return {(src + i, dst + i) for src, dst, nbytes in descriptors for i in range(nbytes)}


def starts_of(files: list[dict], place: int) -> set[int]:  # type: ignore[type-arg]
    """First bytes of one worker's registered regions: a run begins there anew."""
    return {region["address"] for region in files[place]["regions"]}


def maximal_runs(pairs: Pairs, src_starts: set[int], dst_starts: set[int]) -> int:
    """Pairs that continue no other pair of the set, within one region of each side."""
    return sum(1 for src, dst in pairs if (src - 1, dst - 1) not in pairs or src in src_starts or dst in dst_starts)


def compared(case: Case) -> int:
    """Check one case; returns its transfers, 0 where it is refused."""
    plan = kvferry_planner(case.producers, case.consumers, case.request)
    for transfer in plan.get("transfers", []):
        pairs = byte_pairs(transfer["descriptors"])
        assert len(pairs) == sum(nbytes for _, _, nbytes in transfer["descriptors"])
        starts = starts_of(case.producers, transfer["producer"]), starts_of(case.consumers, transfer["consumer"])
        assert len(transfer["descriptors"]) == maximal_runs(pairs, *starts), case.to_json()
    return len(plan.get("transfers", []))


@pytest.mark.parametrize("first", [0, 200, 400])
def test_descriptors_are_the_maximal_runs_of_the_bytes_that_move(first: int) -> None:
    transfers = [compared(random_case(random.Random(2_000_000 + seed))) for seed in range(first, first + 200)]
    assert sum(transfers) > 100
