"""Time in which a process stood still is no time in which it waited."""

from kvferry.transport.awake import LOOK_EVERY, MOST_BETWEEN_LOOKS, AwakeClock


class HandMoved:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_between_two_looks_only_so_much_counts() -> None:
    plain = HandMoved(100.0)
    awake = AwakeClock(plain)
    seen = [awake()]
    for step in (0.25, 0.0, 0.5, 30.0, 0.25):
        plain.now += step
        seen.append(awake())
    assert seen == [100.0, 100.25, 100.25, 100.75, 101.25, 101.5]


def test_who_looks_as_often_as_is_asked_sees_the_plain_time() -> None:
    plain = HandMoved(0.0)
    awake = AwakeClock(plain)
    for _ in range(400):
        plain.now += LOOK_EVERY
        assert awake() == plain.now
    assert LOOK_EVERY < MOST_BETWEEN_LOOKS


def test_time_in_which_nobody_waited_counts() -> None:
    plain = HandMoved(100.0)
    awake = AwakeClock(plain)
    plain.now += 3600.0
    assert awake.after_idling() == 3700.0
    plain.now += 3600.0
    assert awake() == 3700.0 + MOST_BETWEEN_LOOKS
