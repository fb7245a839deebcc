"""The worker half alone, with the runtimes of one rank behind it."""

import pytest

pytest.importorskip("vllm")

from kvferry.ids import RequestId, TransferId
from kvferry.protocol import MAX_NAME
from kvferry.vllm.metadata import Withdraw

from . import test_fence as fenced

pytestmark = pytest.mark.vllm

rank = fenced.rank


def test_a_request_whose_name_has_no_end_is_fetched_for_and_told_under_its_name(rank: fenced.Rank) -> None:
    """A client chooses it (x-request-id), and messages between peers have limits."""
    name = RequestId("x" * (4 * MAX_NAME))
    rank.cache[1] = 7.0
    rank.step(rank.publish("t", 1))
    rank.fence.done = 1
    rank.step(rank.pull("t", 5, request=name))
    rank.fence.done = 2
    fenced.wait_until(lambda: rank.received() == {name})
    assert (rank.cache[5] == 7.0).all()
    rank.step(rank.pull("nobody's", 6, request=name))
    rank.fence.done = 3
    rank.worker.obey([Withdraw(TransferId("nobody's"), "for the test")])
    ended: list[str] = []
    fenced.wait_until(lambda: ended.extend(rank.worker.take_ended().failed) or bool(ended))
    assert ended == [name]
