"""Whom to ask next, by a clock that stands still unless told."""

from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from kvferry.router.config import Cooldown, Decode
from kvferry.router.faults import Answer, FaultReason, RefusedError, UpstreamError
from kvferry.router.pool import Pool, Standing


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pool(clock):
    return Pool([Decode("http://a"), Decode("http://b"), Decode("http://c")], cooldown=Cooldown(2, 5), clock=clock)


def urls(pool, **options):
    return "".join(engine.url[-1] for engine in pool.ranked(**options))


def fail(pool, engine, reason=FaultReason.FAILED):
    with pytest.raises(UpstreamError), pool.using(engine):
        raise UpstreamError(reason, "", reached=True)


def test_equals_take_turns(pool):
    assert [urls(pool) for _ in range(4)] == ["abc", "bca", "cab", "abc"]


def test_the_least_loaded_comes_first_and_the_load_goes_with_the_request(pool):
    a, b, _ = pool.engines
    with pool.using(a), pool.using(a), pool.using(b):
        assert urls(pool) == "cba"
        assert pool.in_flight(a) == 2
    assert pool.in_flight(a) == 0


def test_a_failed_engine_comes_last_until_its_pause_is_over(pool, clock):
    a = pool.engines[0]
    fail(pool, a)
    assert [urls(pool)[-1] for _ in range(3)] == ["a", "a", "a"]
    assert pool.standing(a) is Standing.COOLING
    clock.now = 2.0
    assert pool.standing(a) is Standing.ON_TRIAL
    assert {urls(pool)[0] for _ in range(3)} == {"a", "b", "c"}


def test_only_one_request_at_a_time_tries_an_engine_after_its_pause(pool, clock):
    a = pool.engines[0]
    fail(pool, a)
    clock.now = 2.0
    with pool.using(a):
        assert [urls(pool)[-1] for _ in range(3)] == ["a", "a", "a"]
    assert pool.standing(a) is Standing.READY


def test_pauses_double_up_to_the_longest_and_an_answer_ends_the_row(pool, clock):
    a = pool.engines[0]
    for pause in (2, 4, 5, 5):
        fail(pool, a)
        clock.now += pause - 0.5
        assert pool.standing(a) is Standing.COOLING
        clock.now += 0.5
        assert pool.standing(a) is Standing.ON_TRIAL
    with pool.using(a):
        pass
    fail(pool, a)
    clock.now += 2
    assert pool.standing(a) is Standing.ON_TRIAL


def test_a_refusal_is_an_answer_and_a_busy_or_cancelled_engine_is_not_blamed(pool):
    a = pool.engines[0]
    with pytest.raises(RefusedError), pool.using(a):
        raise RefusedError(Answer(400, b""))
    fail(pool, a, FaultReason.BUSY)
    assert pool.standing(a) is Standing.READY
    fail(pool, a)
    with pytest.raises(KeyboardInterrupt), pool.using(a):
        raise KeyboardInterrupt
    assert pool.standing(a) is Standing.COOLING


def test_avoided_engines_come_after_their_equals_but_before_cooling_ones(pool):
    fail(pool, pool.engines[1])
    assert urls(pool, avoid={"http://a"}) == "cab"


def test_a_pool_is_usable_while_one_engine_is_not_cooling(pool):
    for engine in pool.engines[:2]:
        fail(pool, engine)
    assert pool.usable()
    fail(pool, pool.engines[2])
    assert not pool.usable()
    assert sorted(urls(pool)) == ["a", "b", "c"]


def _lost(*_):
    raise UpstreamError(FaultReason.LOST, "", reached=True)


def test_what_was_in_flight_together_fails_as_one(pool, clock):
    a = pool.engines[0]
    for pause in (2, 4):
        killed = ExitStack()
        for _ in range(20):
            killed.enter_context(pool.using(a))
        killed.push(_lost)
        with pytest.raises(UpstreamError):
            killed.close()
        assert pool.in_flight(a) == 0
        clock.now += pause - 0.5
        assert pool.standing(a) is Standing.COOLING
        clock.now += 0.5
        assert pool.standing(a) is Standing.ON_TRIAL
