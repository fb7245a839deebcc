"""A plan is asked again and again, and remembers: it answers as one that has only just been compiled."""

import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from kvferry.errors import PlanError
from kvferry.layout import Binding, Group, Placement, bind_layout, parse_layout
from kvferry.layout import placement as placements
from kvferry.layout.placement import extents_of
from kvferry.plan import BlockTable, Plan, TransferRequest, bind, compile_plan, parse_request
from kvferry.testing.layouts import at, page, worker
from kvferry.testing.strategies import Case, random_case

Answer = list[tuple[int, int, int]] | str
FAR = 1 << 44


def sides_of(case: Case) -> tuple[list[Placement], list[Placement], list[list[Binding]]]:
    """Placements of both sides, and their bindings."""
    sides = [
        [bind_layout(parse_layout(msgspec.json.encode(file))) for file in side]
        for side in (case.producers, case.consumers)
    ]
    return (
        [one.placement for one in sides[0]],
        [one.placement for one in sides[1]],
        [[one.binding for one in side] for side in sides],
    )


def elsewhere(binding: Binding, rng: random.Random) -> Binding:
    """The same worker after a restart: its storages lie anew, in another order."""
    places = rng.sample(range(len(binding.bases)), len(binding.bases))
    return Binding(tuple(FAR * (1 + place) + 4096 * rng.randrange(1000) for place in places))


def requests_of(request: TransferRequest, rng: random.Random) -> Iterator[TransferRequest]:
    """It, and parts of it: they begin and end inside other units."""
    yield request
    for _ in range(4):
        stop = rng.randint(request.start, request.stop)
        yield replace(request, stop=stop)
        yield replace(request, start=rng.randint(request.start, stop), stop=stop)


def answers(plan: Plan, request: TransferRequest, bindings: list[list[Binding]]) -> list[Answer]:
    """What every pair moves, or why not."""
    found: list[Answer] = []
    for producer, consumer in plan.pairs():
        pair = plan.pair(producer, consumer)
        assert pair is not None
        try:
            plan.check(request)
            rows = pair.bind(request, src=bindings[0][producer], dst=bindings[1][consumer])
        except PlanError as error:
            found.append(f"{error.reason}: {error}")
        else:
            found.append(list(zip(rows.src.tolist(), rows.dst.tolist(), rows.nbytes.tolist(), strict=True)))
    return found


def compared(seed: int) -> int:
    """Ask one plan many things, twice, in any order, and a fresh one each; how many answers were compared."""
    rng = random.Random(seed)
    case = random_case(rng)
    try:
        producers, consumers, here = sides_of(case)
        request = parse_request(msgspec.json.encode(case.request))
        warm = compile_plan(producers, consumers)
    except PlanError:
        return 0
    there = [[elsewhere(one, rng) for one in side] for side in here]
    asked = [(one, where) for one in requests_of(request, rng) for where in (here, there)] * 2
    rng.shuffle(asked)
    for one, where in asked:
        fresh = compile_plan(*([replace(placement) for placement in side] for side in (producers, consumers)))
        assert answers(warm, one, where) == answers(fresh, one, where), (seed, one.start, one.stop)
    return len(asked)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kept", [1, 1024])
def test_every_part_of_a_page_kept_by_column(kept: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is carried of the last page hangs on where the request begins and ends in it, and on nothing else."""
    monkeypatch.setattr(bind, "CHOICES_KEPT", kept)
    columns = page("l0", heads=(0, 4, 4), tokens=8, nbytes=2)
    groups = [Group("attention", 8, sliding_window=window)]
    src, dst = (bind_layout(worker([at(columns, base)], groups=groups)) for base in (0, 10_000))
    bindings = [[src.binding], [dst.binding]]
    tables = [BlockTable.of(blocks, first_token=0) for blocks in ([5, 2, 7], [1, 6, 3])]
    asked = [
        TransferRequest(start, stop, (tables[0],), (tables[1],)) for start in range(24) for stop in range(start, 25)
    ] * 2
    random.Random(3).shuffle(asked)
    warm, carried = compile_plan([src.placement], [dst.placement]), set[bool]()
    for one in asked:
        fresh = compile_plan([replace(src.placement)], [replace(dst.placement)])
        found = answers(warm, one, bindings)
        assert found == answers(fresh, one, bindings), (one.start, one.stop)
        needed = min(one.stop - one.start, window or one.stop)
        carried.add(sum(nbytes for row in found for *_, nbytes in row) > 8 * needed)
    assert carried == {True, False}


@pytest.mark.parametrize("kept", [1, 1024])
def test_it_answers_as_one_that_is_new(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "CHOICES_KEPT", kept)
    monkeypatch.setattr(placements, "EXTENTS_KEPT", kept)
    assert sum(compared(seed) for seed in range(7_000_000 + kept, 7_000_030 + kept)) > 250


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers name bases: however many they name, a placement keeps so many."""
    monkeypatch.setattr(placements, "EXTENTS_KEPT", 3)
    case = next(c for c in (random_case(random.Random(seed)) for seed in range(100)) if c.fault is None)
    (placement, *_), _, _ = sides_of(case)
    for place in range(20):
        bases = tuple(FAR * (1 + storage) + 4096 * place for storage in range(len(placement.storages)))
        assert extents_of(placement, Binding(bases)).bases.tolist() == list(bases)
        assert len(placement._extents) <= 3


def test_a_binding_that_is_refused_is_refused_again() -> None:
    case = next(c for c in (random_case(random.Random(seed)) for seed in range(100)) if c.fault is None)
    (placement, *_), _, _ = sides_of(case)
    wrong = Binding((0,) * (len(placement.storages) + 1))
    for _ in range(2):
        with pytest.raises(PlanError, match="they are not of one worker"):
            extents_of(placement, wrong)
