"""The fast path of the binder skips work, never does other work: held to the plain pass on random cases."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import PlanError
from kvferry.layout import BoundLayout, bind_layout, parse_layout
from kvferry.plan import compile_plan, parse_request
from kvferry.plan.bind import Copies, Side, copies_of, join, together
from kvferry.testing.strategies import random_case


def ends(files: list[dict[str, object]]) -> list[BoundLayout]:
    return [bind_layout(parse_layout(msgspec.json.encode(file))) for file in files]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_skipping_the_last_join_changes_nothing(seed: int) -> None:
    case = random_case(random.Random(seed))
    try:
        producers, consumers = ends(case.producers), ends(case.consumers)
        plan = compile_plan([p.placement for p in producers], [c.placement for c in consumers])
        request = parse_request(msgspec.json.encode(case.request))
        plan.check(request)
        for i, j in plan.pairs():
            pair = plan.pair(i, j)
            assert pair is not None
            src, dst = (Side(end.placement, end.binding) for end in (producers[i], consumers[j]))
            for part in copies_of(pair.classes, request, src, dst):
                same_after_plain_pass(part)
    except PlanError:
        return


def same_after_plain_pass(part: Copies) -> None:
    if part.settled:
        plain = join(replace(part, settled=False))
        for name in ("src", "dst", "nbytes"):
            assert np.array_equal(getattr(plain, name), getattr(part, name))


def test_the_benchmarks_shape_takes_the_fast_path() -> None:
    """61 separate layers with scattered blocks: nothing is sorted or joined twice."""
    layers = [np.arange(0, 100, 10) * 2 + 1000 * i for i in range(3)]
    settled = Copies(np.concatenate(layers), np.concatenate(layers), np.full(30, 10), settled=True)
    assert join(settled) is settled
    assert together([settled]) is settled


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_join_sorts_and_joins_what_continues_on_both_sides(order: list[int]) -> None:
    src, dst, nbytes = (np.array(c, dtype=np.int64)[order] for c in ([0, 8, 16], [100, 108, 200], [8, 8, 8]))
    joined = join(Copies(src, dst, nbytes))
    assert (joined.src.tolist(), joined.dst.tolist(), joined.nbytes.tolist()) == ([0, 16], [100, 200], [16, 8])
