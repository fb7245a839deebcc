"""Upstream's pairing of ranks and its block lists without positions, against plain loops that do what it does."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RemoteProtocolError
from kvferry.protocol import Span, Table
from kvferry.protocol.upstream import (
    GroupRule,
    check_kept,
    list_blocks,
    paired_ranks,
    paired_stages,
    place_lists,
    pulls_awaited,
    span_of,
)

SIZES = [1, 2, 4, 8]


@pytest.mark.parametrize("consumers", SIZES)
@pytest.mark.parametrize("producers", SIZES)
def test_pairing_is_the_same_seen_from_both_sides(producers: int, consumers: int) -> None:
    seen = {(p, c) for c in range(consumers) for p in paired_ranks(c, consumers, others=producers)}
    served = {(p, c) for p in range(producers) for c in paired_ranks(p, producers, others=consumers)}
    assert seen == served
    assert {p for p, _ in seen} == set(range(producers))
    assert {c for _, c in seen} == set(range(consumers))


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="divide"):
        paired_ranks(0, 3, others=2)


def test_stages_and_how_many_pulls_a_producer_rank_serves() -> None:
    assert paired_stages(1, 2, others=2) == (1,)
    assert paired_stages(0, 1, others=2) == (0, 1)
    assert pulls_awaited(2, consumer_stages=1, producer_stages=2) == 2
    assert pulls_awaited(2, consumer_stages=2, producer_stages=2) == 2
    assert pulls_awaited(2, consumer_stages=2, producer_stages=1) == 4


def upstream_pairs(sent: list[int], wanted: list[int]) -> list[tuple[int, int]]:
    """What its producer makes of two lists: the last blocks of both, in order."""
    assert len(sent) >= len(wanted)
    return list(zip(sent[len(sent) - len(wanted) :], wanted, strict=True))


prompts = st.integers(1, 300)
sizes = st.sampled_from([1, 4, 16, 64])


@given(tokens=prompts, size=sizes, data=st.data())
def test_a_list_gets_the_positions_that_upstream_pairs_it_with(tokens: int, size: int, data: st.DataObject) -> None:
    entries = -(-tokens // size)
    cached = data.draw(st.integers(0, entries))
    wanted = list(range(100, 100 + entries - cached))
    (table,) = place_lists([wanted], [GroupRule(size)], tokens)
    assert table.first_token is not None
    placed = {block: (table.first_token + index * size) // size for index, block in enumerate(table.blocks)}
    for sent, block in upstream_pairs(list(range(entries)), wanted):
        assert placed[block] == sent


@given(tokens=prompts, size=sizes, left_one=st.booleans(), data=st.data())
def test_a_table_gets_the_list_that_upstream_pairs_by_position(
    tokens: int, size: int, left_one: bool, data: st.DataObject
) -> None:
    stop = tokens - left_one
    held = -(-stop // size)
    first = data.draw(st.integers(0, held))
    table = Table(first * size, tuple(range(100 + first, 100 + held)))
    (wanted,) = list_blocks([table], [GroupRule(size)], tokens=tokens)
    if not table.blocks:
        assert wanted == ()
        return
    for sent, block in upstream_pairs(list(range(-(-tokens // size))), list(wanted)):
        assert block == 100 + sent if sent < held else block == 0


@given(tokens=st.integers(1, 300), window=st.integers(1, 200), pieces=st.sampled_from([1, 2, 4]))
def test_a_window_lists_no_more_than_upstream_keeps(tokens: int, window: int, pieces: int) -> None:
    size = 16
    entries = -(-tokens // (size * pieces)) * pieces
    skipped = max(0, tokens - window + 1) // size
    table = Table(0, (*[None] * skipped, *range(100 + skipped, 100 + entries)))
    (wanted,) = list_blocks([table], [GroupRule(size, window=window)], tokens=tokens)
    kept = [*range(-(-tokens // size))][-(-(-window // size) + 1) :]
    for sent, block in upstream_pairs(kept, list(wanted)):
        assert block == 100 + sent
    assert len(wanted) * size >= min(window - 1, tokens)  # what the next token attends to


def test_states_are_one_block_without_position() -> None:
    rule = GroupRule(576, is_state=True)
    assert place_lists([[0, 0, 7]], [rule], 50) == (Table(None, (7,)),)
    assert list_blocks([Table(0, (None, 7))], [rule], tokens=50) == ((7,),)
    with pytest.raises(RemoteProtocolError, match="one state"):
        place_lists([[6, 7]], [rule], 50)


@pytest.mark.parametrize("lists", [[[1, 2, 3]], [[1], [2]], []])
def test_what_cannot_be_the_end_of_the_prompt_is_refused(lists: list[list[int]]) -> None:
    with pytest.raises(RemoteProtocolError):
        place_lists(lists, [GroupRule(16)], 32)


def test_the_span_is_what_full_attention_lacks() -> None:
    full, window = GroupRule(16), GroupRule(16, window=20)
    tables = (Table(32, (5, 6)), Table(48, (7,)))
    assert span_of(tables, (full, window), Span(0, 63)) == Span(32, 63)
    assert span_of((Table(48, (7,)),), (window,), Span(0, 63)) == Span(48, 63)
    assert span_of((Table(None, (7,)),), (GroupRule(16, is_state=True),), Span(0, 63)) == Span(0, 63)
    with pytest.raises(RemoteProtocolError, match="different positions"):
        span_of(tables, (full, full), Span(0, 63))


def kept_blocks(tokens: int, size: int, *, window: int | None, chunk: int | None) -> list[int]:
    """The blocks that vLLM has left of a prompt it has computed: those in which the next token would look."""
    next_looks = [
        position
        for position in range(tokens + 1)
        if (window is None or position > tokens - window) and (chunk is None or position // chunk == tokens // chunk)
    ]
    first = next_looks[0] // size
    return [*range(first, max(first, -(-tokens // size)))]


def looked_at(tokens: int, *, window: int | None, chunk: int | None) -> list[int]:
    """What the last token of a prompt looks at, itself left out."""
    last = tokens - 1
    return [
        position
        for position in range(last)
        if (window is None or position > last - window) and (chunk is None or position // chunk == last // chunk)
    ]


CUTS = st.one_of(
    st.tuples(st.integers(2, 80), st.none()),
    st.tuples(st.none(), st.sampled_from([16, 24, 32, 48])),
)


@given(tokens=st.integers(2, 200), size=st.sampled_from([4, 16, 32]), cut=CUTS, data=st.data())
def test_a_prompt_is_refused_where_a_block_is_gone_that_its_last_token_looks_at(
    tokens: int, size: int, cut: tuple[int | None, int | None], data: st.DataObject
) -> None:
    """vLLM's connector counts all tokens of it as computed, on both sides; ours has left the last one."""
    window, chunk = cut
    cached = data.draw(st.integers(0, (tokens - 1) // size)) * size
    rules = (GroupRule(size), GroupRule(size, window=window - 1 if window else None, chunk=chunk))
    kept = kept_blocks(tokens, size, window=window, chunk=chunk)
    needed = [position for position in looked_at(tokens, window=window, chunk=chunk) if position >= cached]
    right = {position // size for position in needed} <= set(kept)
    assert right == passes(lambda: check_kept(rules, Span(cached, tokens - 1), tokens=tokens, side="prefill"))


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except RemoteProtocolError as error:
        return "looks at position" not in error.message
    return True
