"""A cell that is not what it says is noticed."""

import msgspec
import pytest

from kvferry.runtime.report import Line
from kvferry.testing.cell_checks import not_computed_as_said, not_found_as_said, not_moved_as_said
from kvferry.testing.cell_engines import prompts_of
from kvferry.testing.cells import Cell, cell_of
from kvferry.testing.engine_wire import Generation
from kvferry.testing.pair import Served
from kvferry.testing.transfer_report import Transfer

PROMPT = prompts_of("qwen3")[-2]
TOKENS = len(PROMPT.tokens)
IN_CHUNKS = [192, 192, 192, 192, TOKENS - 4 * 192]
FOUND = 768

CHUNKED = cell_of("qwen3 split larger tp2-1 mooncake kvferry chunked prefix-cache")
AT_ONCE = cell_of("qwen3 split smaller tp1-2 mooncake kvferry at-once no-cache")
STATE = cell_of("lfm2 whole larger tp1-2 cma kvferry chunked prefix-cache")


def served(prefill: list[int], decode: list[int], *, cached: int = 0, fetched: int = TOKENS - 1) -> Served:
    one = Generation(request_id="r", tokens=[], logprobs=[], finish_reason="length", cached_tokens=0)
    replace = msgspec.structs.replace
    return Served(
        "t",
        replace(one, prompt_steps=prefill, cached_tokens=cached),
        replace(one, prompt_steps=decode, cached_tokens=fetched),
        0.0,
    )


def moved(start: int = 0, *, transport: str = "mooncake:tcp", ranks: int = 1) -> Transfer:
    lines = [
        Line(
            "t",
            "r",
            side,
            "e",
            "f",
            0,
            rank,
            start,
            TOKENS,
            "done",
            TOKENS - start,
            1,
            1.0,
            transport,
            "d",
            850 - start,
        )
        for side in ("producer", "consumer")
        for rank in range(ranks)
    ]
    return Transfer("t", tuple(lines[:ranks]), tuple(lines[ranks:]))


@pytest.mark.parametrize(
    ("cell", "one", "said"),
    [
        (CHUNKED, served(IN_CHUNKS, [1]), None),
        (CHUNKED, served([TOKENS - FOUND], [1], cached=FOUND), None),
        (CHUNKED, served([TOKENS], [1]), "in steps of"),
        (CHUNKED, served(IN_CHUNKS[:-1], [1]), "instead of"),
        (CHUNKED, served(IN_CHUNKS, [1], cached=FOUND), "instead of"),
        (CHUNKED, served(IN_CHUNKS, [2]), "the decode engine computed"),
        (CHUNKED, served(IN_CHUNKS, [1], fetched=700), "the decode engine computed"),
        (AT_ONCE, served([TOKENS], [1]), None),
        (AT_ONCE, served(IN_CHUNKS, [1]), "in steps of"),
    ],
)
def test_steps(cell: Cell, one: Served, said: str | None) -> None:
    problems = list(not_computed_as_said(cell, PROMPT, one))
    assert [said in problem for problem in problems] == [True] if said else problems == []


@pytest.mark.parametrize(
    ("cell", "again", "transfer", "count"),
    [
        (CHUNKED, served([TOKENS - FOUND], [1], cached=FOUND), moved(FOUND), 0),
        (CHUNKED, served([TOKENS - FOUND], [1], cached=FOUND), moved(), 2),
        (CHUNKED, served(IN_CHUNKS, [1]), moved(FOUND), 2),
        (CHUNKED, served(IN_CHUNKS, [1], cached=FOUND), moved(FOUND), 1),
        (STATE, served([TOKENS - FOUND], [1], cached=FOUND), moved(), 0),
        (STATE, served([TOKENS - FOUND], [1], cached=FOUND), moved(FOUND), 2),
        (STATE, served(IN_CHUNKS, [1]), moved(), 2),
        (AT_ONCE, served([TOKENS], [1]), moved(), 0),
        (AT_ONCE, served([TOKENS - FOUND], [1], cached=FOUND), moved(FOUND), 3),
    ],
)
def test_prefix_caches(cell: Cell, again: Served, transfer: Transfer, count: int) -> None:
    problems = list(not_found_as_said(cell, (served(IN_CHUNKS, [1]), again), (moved(), transfer)))
    assert len(problems) == count, problems


def test_what_is_asked_first_is_not_found() -> None:
    found = served([TOKENS - FOUND], [1], cached=FOUND)
    assert "came first" in next(not_found_as_said(CHUNKED, (found, found), (moved(), moved(FOUND))))


def test_the_transport_and_the_ranks() -> None:
    assert list(not_moved_as_said(AT_ONCE, moved(ranks=2))) == []
    assert list(not_moved_as_said(AT_ONCE, moved(ranks=1))) == ["fetched by ranks {0}"]
    assert list(not_moved_as_said(AT_ONCE, moved(ranks=2, transport="cma"))) == ["moved by {'cma'}"]
