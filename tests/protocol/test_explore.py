"""Small worlds of the protocol, explored without gaps; larger ones by ``make model-check``."""

import pytest

from kvferry.protocol import Consumer, FenceDone, ProducerLost
from kvferry.testing.explore import Budget, PromiseBrokenError, SmallWorld, explore, small_world

SMALL = [
    "one request, one crash, one lie",
    "one request, one lost and one repeated message",
    "one request, one abort and one broken connection",
    "one producer, two requests, one crash",
]


@pytest.mark.parametrize("name", SMALL)
def test_every_promise_holds_in_every_state(name: str) -> None:
    found = explore(small_world(name), limit=200_000)
    assert found.whole
    assert found.states > 500
    assert found.ends > 10


def test_equal_states_are_met_on_many_ways() -> None:
    """Without that the exploration would be a tree, and the forms of states worth nothing."""
    found = explore(SmallWorld(producers=2, requests=1, budget=Budget(crashes=1)))
    assert found.whole
    assert found.steps > 2 * found.states


class HastyConsumer(Consumer):
    """Takes a lost producer for a quiet one: exactly the mistake that the fences are there for."""

    def handle(self, event, now):  # type: ignore[no-untyped-def]
        actions = super().handle(event, now)
        if isinstance(event, ProducerLost):
            actions += super().handle(FenceDone(event.producer), now)
        return actions


def test_a_consumer_that_skips_the_fence_is_found_out() -> None:
    world = SmallWorld(producers=1, requests=1, budget=Budget(cuts=1))
    world.consumers[0].machine = HastyConsumer(world.consumers[0].machine.limits)
    with pytest.raises(PromiseBrokenError, match=r"(?s)after:.*break_"):
        explore(world)
