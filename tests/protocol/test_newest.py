"""A memory that does not grow."""

from kvferry.protocol.newest import Newest


def test_the_first_goes_first() -> None:
    memory: Newest[str, int] = Newest(2)
    for value, key in enumerate("abac"):
        memory.note(key, value)
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == (None, 1, 3)
    assert [key in memory for key in "abc"] == [False, True, True]
