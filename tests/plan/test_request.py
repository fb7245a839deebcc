"""Block tables and requests refuse what contradicts itself, naming the value."""

import numpy as np
import pytest

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Group
from kvferry.plan import POSITION_LIMIT, BlockTable, TransferRequest
from kvferry.plan.request import SideTables

IDS, HELD = np.array([3, 4], dtype=np.int64), np.array([True, False])


@pytest.mark.parametrize(
    ("blocks", "held", "said"),
    [
        (IDS.astype(np.int32), HELD, "not int64"),
        (IDS.reshape(1, 2), HELD, "not int64"),
        (IDS, HELD.astype(np.int64), "not int64"),
        (IDS, HELD[:1], "2 blocks but 1 marks"),
        (np.array([-1, 4]), HELD, "block id -1 is negative"),
    ],
)
def test_a_table_of_the_wrong_form(blocks: np.ndarray, held: np.ndarray, said: str) -> None:
    with pytest.raises(PlanError, match=said) as refused:
        BlockTable(blocks.copy(), held.copy(), 0)
    assert refused.value.reason is PlanReason.INVALID_REQUEST


@pytest.mark.parametrize("first_token", [-1, POSITION_LIMIT])
def test_a_table_that_begins_nowhere(first_token: int) -> None:
    with pytest.raises(PlanError, match=f"first_token {first_token} is not in"):
        BlockTable.of([1], first_token=first_token)


@pytest.mark.parametrize("block", [-1, 2**63])
def test_ids_that_no_block_has(block: int) -> None:
    with pytest.raises(PlanError, match="block ids must be in"):
        BlockTable.of([None, block])


def test_a_negative_number_where_no_block_is_held_says_nothing() -> None:
    table = BlockTable(np.array([-7, 4]), np.array([False, True]), 0)
    assert table.ids.tolist() == [4]
    assert not table.blocks.flags.writeable
    assert not table.held.flags.writeable


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (5, 4), (0, POSITION_LIMIT)])
def test_a_range_that_is_none(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match="0 <= start <= stop"):
        TransferRequest(start, stop, (), ())


ATTENTION = SideTables("consumer", (Group("attention", 4),), (8,), ())
STATE = SideTables("consumer", (Group("state", 4),), (8,), ())


def test_the_last_position_that_a_table_may_reach() -> None:
    ATTENTION.check((BlockTable.of([1, 2], first_token=POSITION_LIMIT - 12),))
    with pytest.raises(PlanError, match="2 entries reach past position"):
        ATTENTION.check((BlockTable.of([1, 2], first_token=POSITION_LIMIT - 8),))


def test_attention_needs_positions_and_one_state_none() -> None:
    STATE.check((BlockTable.of([7]),))
    with pytest.raises(PlanError, match="first_token is missing"):
        ATTENTION.check((BlockTable.of([7]),))
    with pytest.raises(PlanError, match="2 states without first_token"):
        STATE.check((BlockTable.of([7, 6]),))


def test_ids_are_below_the_number_of_blocks() -> None:
    ATTENTION.check((BlockTable.of([7], first_token=0),))
    with pytest.raises(PlanError, match="block id 8 is out of range: group 0 has 8 blocks"):
        ATTENTION.check((BlockTable.of([8], first_token=0),))
