"""How loudly the end of a transfer is told."""

import logging

import pytest

from kvferry.errors import ProtocolReason
from kvferry.protocol import Fate, Outcome
from kvferry.runtime.journal import level_of, said


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
