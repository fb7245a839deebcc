"""What is sent behind a prompt's last position to a consumer that expects whole blocks: the rest of the block, once."""

import pytest

from kvferry.layout import Group, bind_layout
from kvferry.plan import Descriptors, Plan, TransferRequest, compile_plan
from kvferry.plan.request import BlockTable
from kvferry.runtime.tails import joined, tail_of
from kvferry.testing.layouts import page, side_by_side, state, worker

ROW = 8
BASE = 1 << 20


def sides(*, blocks: tuple[int, int] = (16, 16), with_state: bool = True) -> tuple[Plan, Descriptors]:
    """A plan of one attention layer (and a state), and the rows of a request of 21 tokens with its tail."""
    layouts = []
    for tokens, base in zip(blocks, (0, BASE), strict=True):
        parts = [page("l0", tokens=16, kernel_blocks=tokens // 16, nbytes=ROW)]
        groups = [Group("attention", tokens)]
        if with_state:
            parts.append(state("l1", nbytes=100, group=1))
            groups.append(Group("state", 64))
        layouts.append(bind_layout(worker(side_by_side(parts, base=base), groups=groups)))
    plan = compile_plan([layouts[0].placement], [layouts[1].placement])
    tables = []
    for tokens in blocks:
        side = [BlockTable.of([3, 5][: -(-21 // tokens)], first_token=0)]
        if with_state:
            side.append(BlockTable.of([6], first_token=0))
        tables.append(tuple(side))
    request = TransferRequest(0, 21, *tables)
    pair = plan.pair(0, 0)
    assert pair is not None
    rows = pair.bind(request, src=layouts[0].binding, dst=layouts[1].binding)
    tail = tail_of(request, plan)
    if tail is None:
        return plan, rows
    plan.check(tail)
    return plan, joined(rows, pair.bind(tail, src=layouts[0].binding, dst=layouts[1].binding))


def written(rows: Descriptors) -> list[int]:
    """Every destination byte, as often as it is written."""
    spans = zip(rows.dst.tolist(), rows.nbytes.tolist(), strict=True)
    return sorted(byte for start, length in spans for byte in range(start, start + length))


@pytest.mark.parametrize(
    ("blocks", "stop"),
    [((16, 16), 32), ((32, 32), 32), ((16, 32), 32), ((32, 16), 32), ((16, 64), 32)],
)
def test_beside_a_state_the_rest_of_the_last_block_goes_too_and_every_byte_once(
    blocks: tuple[int, int], stop: int
) -> None:
    _, rows = sides(blocks=blocks)
    bytes_written = written(rows)
    assert len(bytes_written) == len(set(bytes_written)) == stop * ROW + 100


def test_without_a_state_only_positions_move() -> None:
    _, rows = sides(with_state=False)
    assert len(written(rows)) == 21 * ROW


def test_a_prompt_that_ends_with_its_block_has_no_tail() -> None:
    plan, _ = sides()
    tables = BlockTable.of([3, 5], first_token=0), BlockTable.of([6], first_token=0)
    assert tail_of(TransferRequest(0, 32, tables, tables), plan) is None
