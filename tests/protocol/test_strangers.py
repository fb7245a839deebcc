"""Transfers that only peers have spoken of."""

import pytest

from kvferry.protocol import Puller
from kvferry.protocol.strangers import Strangers

D0, D1 = Puller("D", "0"), Puller("D", "1")


def test_they_are_bounded_for_each_and_for_all() -> None:
    strangers = Strangers(3, 2)
    assert [strangers.take(one) for one in (D0, D0, D0, D1, D1)] == [True, True, False, True, False]
    strangers.check([D0, D0, D1])
    strangers.give_back(D0)
    assert [strangers.take(D1), strangers.take(D0)] == [True, False]
    strangers.check([D1, D0, D1])
    with pytest.raises(AssertionError, match="strangers are counted"):
        strangers.check([D0, D1])
