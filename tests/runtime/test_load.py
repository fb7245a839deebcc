"""Many requests at once, many producers, and limits that are reached: answered, not lost."""

from kvferry.testing.load import crowd, many_to_one, one_to_many


def test_two_thousand_requests_at_once() -> None:
    found = crowd(2000)
    assert found.fates == {"done": 2000}
    assert (found.wrong, found.lost) == (0, 0)


def test_sixteen_producers_to_one_consumer() -> None:
    found = many_to_one(16, 4)
    assert found.fates == {"done": 64}
    assert (found.wrong, found.lost) == (0, 0)


def test_one_producer_to_sixteen_consumers() -> None:
    found = one_to_many(16, 4)
    assert found.fates == {"done": 64}
    assert (found.wrong, found.lost) == (0, 0)


def test_a_limit_that_is_reached_is_answered_by_an_error() -> None:
    """The producer takes ten pulls, or ten transfers that only peers have spoken of; the rest is told so at once."""
    found = crowd(60, limits={"pulls": 10.0}, publish_first=True)
    assert set(found.fates) <= {"done", "failed limit-exceeded"}
    assert (found.wrong, found.lost) == (0, 0)
    found = crowd(60, limits={"strangers": 10.0})
    assert found.fates["done"] >= 10
    assert set(found.fates) == {"done", "failed limit-exceeded"}
    assert (found.wrong, found.lost) == (0, 0)
