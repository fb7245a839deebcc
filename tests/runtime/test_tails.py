"""What is sent around a prompt's positions to a consumer that expects whole blocks: their rest, each byte once."""

import pytest

from kvferry.layout import Group, bind_layout
from kvferry.plan import Descriptors, TransferRequest, compile_plan
from kvferry.plan.request import BlockTable
from kvferry.runtime.tails import joined, rests_of
from kvferry.testing.layouts import page, side_by_side, state, worker

ROW = 8
BASE = 1 << 20
STATE = 100


def moved(
    *,
    blocks: tuple[int, int] = (16, 16),
    second: Group | None = None,
    request: tuple[int, int] = (0, 21),
    first_tokens: tuple[int, int] = (0, 0),
) -> Descriptors:
    """Rows of a request, and of its rests: an attention layer, and one of a group ``second``.

    The tables of the second one begin at ``first_tokens`` of each side.
    """
    layouts, tables = [], []
    stop = request[1]
    for tokens, first, base in zip(blocks, first_tokens, (0, BASE), strict=True):
        parts = [page("l0", tokens=16, kernel_blocks=tokens // 16, nbytes=ROW)]
        groups = [Group("attention", tokens)]
        side = [BlockTable.of([3, 5, 1, 6][: -(-stop // tokens)], first_token=0)]
        if second is not None and second.kind == "state":
            parts.append(state("l1", nbytes=STATE, group=1))
            groups.append(second)
            side.append(BlockTable.of([7], first_token=0))
        elif second is not None:
            parts.append(page("l1", tokens=16, kernel_blocks=tokens // 16, nbytes=ROW, group=1))
            groups.append(Group("attention", tokens, sliding_window=second.sliding_window, chunk=second.chunk))
            side.append(BlockTable.of([2, 4, 0, 7][: -(-stop // tokens) - first // tokens], first_token=first))
        layouts.append(bind_layout(worker(side_by_side(parts, base=base), groups=groups)))
        tables.append(tuple(side))
    plan = compile_plan([layouts[0].placement], [layouts[1].placement])
    pair = plan.pair(0, 0)
    assert pair is not None
    asked = TransferRequest(*request, *tables)
    plan.check(asked)
    rows = pair.bind(asked, src=layouts[0].binding, dst=layouts[1].binding)
    for rest in rests_of(asked, plan):
        plan.check(rest)
        rows = joined(rows, pair.bind(rest, src=layouts[0].binding, dst=layouts[1].binding))
    return rows


def written(rows: Descriptors) -> int:
    """How many bytes are written; fails where one is twice."""
    spans = zip(rows.dst.tolist(), rows.nbytes.tolist(), strict=True)
    every = [byte for start, length in spans for byte in range(start, start + length)]
    assert len(every) == len(set(every))
    return len(every)


@pytest.mark.parametrize(
    ("blocks", "stop"),
    [((16, 16), 32), ((32, 32), 32), ((16, 32), 32), ((32, 16), 32), ((16, 64), 32)],
)
def test_beside_a_state_the_rest_of_the_last_block_goes_too(blocks: tuple[int, int], stop: int) -> None:
    assert written(moved(blocks=blocks, second=Group("state", 64))) == stop * ROW + STATE


def test_a_prompt_that_ends_with_its_block_has_no_rest() -> None:
    assert written(moved(request=(0, 32), second=Group("state", 64))) == 32 * ROW + STATE


@pytest.mark.parametrize("window", [1, 5, 16, 20, 31, 40])
def test_the_kept_blocks_of_a_window_go_whole(window: int) -> None:
    group = Group("attention", 16, sliding_window=window)
    kept = max(0, 37 - window) // 16 * 16
    assert written(moved(request=(0, 37), second=group, first_tokens=(kept, kept))) == (48 + 48 - kept) * ROW


@pytest.mark.parametrize("chunk", [16, 24, 32])
def test_so_do_those_of_chunks(chunk: int) -> None:
    kept = 37 // chunk * chunk // 16 * 16
    group = Group("attention", 16, chunk=chunk)
    assert written(moved(request=(0, 37), second=group, first_tokens=(kept, kept))) == (48 + 48 - kept) * ROW


def test_what_was_found_at_the_consumer_is_not_sent() -> None:
    group = Group("attention", 16, sliding_window=31)
    assert written(moved(request=(16, 37), second=group, first_tokens=(0, 16))) == 2 * 32 * ROW


def test_nothing_is_sent_that_the_producer_has_given_back() -> None:
    """It has the window from 32 on, and the consumer's block begins at 0."""
    group = Group("attention", 16, sliding_window=5)
    assert written(moved(blocks=(16, 64), request=(0, 37), second=group, first_tokens=(32, 0))) == (48 + 16) * ROW
