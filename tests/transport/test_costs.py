"""The measured constants choose as the machine would."""

import numpy as np
import pytest

from kvferry.plan import Descriptors
from kvferry.plan.staging import choose
from kvferry.transport.costs import COSTS


def rows(count: int, nbytes: int) -> Descriptors:
    places = np.arange(count) * 2 * nbytes
    return Descriptors.of(places, places, np.full(count, nbytes))


@pytest.mark.parametrize(
    ("transport", "nbytes", "form"),
    [
        ("mooncake", 128, "staged"),
        ("mooncake", 4096, "staged"),
        ("mooncake", 1 << 20, "direct"),
        ("cma", 128, "direct"),
        ("cma", 1 << 20, "direct"),
        ("memory", 128, "direct"),
    ],
)
def test_which_form_runs_of_one_size_take(transport: str, nbytes: int, form: str) -> None:
    assert choose(rows(64, nbytes), COSTS[transport]).form == form


def test_a_handful_of_runs_is_not_worth_two_steps_more() -> None:
    assert choose(rows(4, 128), COSTS["mooncake"]).form == "direct"


def test_a_copy_between_processes_is_no_reason_to_copy_twice_more() -> None:
    """Where carrying a run costs no more than copying it, staging never pays."""
    for model in (COSTS["cma"], COSTS["memory"]):
        assert model.alpha <= 2 * model.delta
    assert COSTS["mooncake"].alpha > 20 * COSTS["mooncake"].delta
