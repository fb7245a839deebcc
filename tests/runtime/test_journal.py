"""How loudly the end of a transfer is told."""

import logging

import pytest

from kvferry.errors import ProtocolReason
from kvferry.protocol import Fate, Outcome, ProducerLimits, Span, Table, Ticket
from kvferry.runtime.journal import level_of, said
from kvferry.testing.layouts import page, worker

from .loopback import fetch, join, publication
from .over_sockets import OverSockets
from .paired import wait_until


@pytest.mark.parametrize(
    ("fate", "level"),
    [
        (Fate.DONE, logging.INFO),
        (Fate.ABORTED, logging.INFO),
        (Fate.FAILED, logging.WARNING),
        (Fate.EXPIRED, logging.WARNING),
    ],
)
def test_only_what_nobody_wanted_is_a_warning(fate: Fate, level: int) -> None:
    reason = None if fate is Fate.DONE else ProtocolReason.PEER_LOST
    assert level_of(Outcome(fate, reason)) == level


def test_an_outcome_is_said_with_reason_and_detail() -> None:
    assert said(Outcome(Fate.DONE)) == "done"
    assert said(Outcome(Fate.FAILED, ProtocolReason.PEER_LOST, "gone")) == "failed (peer-lost: gone)"


def test_nothing_is_kept_of_a_transfer_whose_write_ends_after_it() -> None:
    layout = worker([page("l0", heads=(0, 2, 2), tokens=16, nbytes=8, num_blocks=16)])
    engine = OverSockets()
    limits = ProducerLimits(stop_timeout=0.05, fence_after=0.05)
    pair = join([layout], layout, make_writer=lambda _: engine, producer_limits=limits)
    producer = pair.producers[0]
    try:
        pair.call(producer.publish, publication(1, "t1", 40, Table(0, (3, 4, 9))))
        pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), Table(0, (3, 4, 9))))
        wait_until(lambda: engine._writes)
        pair.call(pair.consumer.cancel, Ticket(11))
        assert producer.quiet.get(timeout=5) == 1
        assert (producer._journal._totals, producer._journal._requests) == ({}, {})
    finally:
        pair.close()
