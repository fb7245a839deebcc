"""Pulls to upstream producers, answered by vLLM's own code: what it would copy is carried out and compared."""

from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import RemoteProtocolError
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout import Group, bind_layout
from kvferry.protocol import Span, Table
from kvferry.protocol.upstream import paired_ranks
from kvferry.runtime.options import UpstreamPeers
from kvferry.runtime.producers import Grid, RemoteEngine, RemoteRank
from kvferry.runtime.pulling import Pulled
from kvferry.runtime.upstream_caches import Declared
from kvferry.runtime.upstream_pulling import UpstreamPuller
from kvferry.testing.layouts import page, side_by_side

from .upstream_memory import HEADS, ROW, Memory, check, local_of, move, side

UPSTREAM = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"

CASES = {
    "alike": ((1, 16, 16, False), (1, 16, 16, False)),
    "kernel blocks": ((1, 32, 16, False), (1, 32, 16, False)),
    "our blocks are larger": ((1, 32, 16, False), (1, 96, 16, False)),
    "our layers are packed": ((1, 16, 16, False), (1, 16, 16, True)),
    "we have two ranks": ((1, 16, 16, False), (2, 16, 16, False)),
    "they have two ranks": ((2, 16, 16, False), (1, 16, 16, False)),
    "two and four, blocks too": ((2, 32, 16, False), (4, 96, 16, True)),
    "four and two": ((4, 32, 16, False), (2, 32, 16, False)),
}


class Receiver:
    """What a pull needs of a receive engine."""

    def address(self) -> str:
        return "127.0.0.1:1"


def engine_of(tp_size: int) -> RemoteEngine:
    ranks = tuple(RemoteRank(f"tcp://127.0.0.1:{15_000 + rank}", "", "mooncake", "") for rank in range(tp_size))
    return RemoteEngine(Incarnation(EngineId("p"), "e"), "", ranks, grid=Grid(tp_size, 1))


def pull_for(local: Any, table: list[int], block: int, span: Span, producers: int) -> Any:
    puller = UpstreamPuller(local, UpstreamPeers.parse("allow"))
    targets = puller.targets(engine_of(producers), span)
    assert tuple(targets) == paired_ranks(local.tp_rank, local.tp_size, others=producers)
    first = span.start // block
    pulled = Pulled(RequestId("d"), TransferId("t"), span, (Table(first * block, tuple(table[first:])),))
    return puller.pull(pulled, receiver=Receiver())  # type: ignore[arg-type]


@pytest.mark.vllm
@pytest.mark.parametrize(("theirs", "ours"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("tokens", "cached"), [(90, 0), (96, 0), (97, 96), (1, 0)])
def test_upstream_writes_every_wanted_token_to_its_place(
    theirs: tuple[int, int, int, bool], ours: tuple[int, int, int, bool], tokens: int, cached: int
) -> None:
    pytest.importorskip(UPSTREAM, reason="vLLM is not installed")
    from kvferry.testing.upstream_plan import UpstreamModel, UpstreamRank, upstream_answer

    p_size, p_block, p_kernel, p_packed = theirs
    d_size, d_block, d_kernel, d_packed = ours
    cached = cached // d_block * d_block
    sources = [side(r, p_size, block=p_block, kernel=p_kernel, filled=True, packed=p_packed) for r in range(p_size)]
    targets = [side(r, d_size, block=d_block, kernel=d_kernel, packed=d_packed) for r in range(d_size)]
    p_table = [5, 2, 9, 14, 1, 7, 3][: -(-tokens // p_block)]
    d_table = [8, 3, 11, 6, 15, 2, 4][: -(-tokens // d_block)]
    declared = Declared(block_size=p_block, kernel_block_size=p_kernel)
    model = UpstreamModel(kv_heads=HEADS)
    for consumer, target in enumerate(targets):
        local = local_of(targets, consumer, block=d_block, declared=declared)
        pull = pull_for(local, d_table, d_block, Span(cached, tokens), p_size)
        for producer in paired_ranks(consumer, d_size, others=p_size):
            rank = UpstreamRank(bind_layout(sources[producer].layout), producer, p_size)
            src, dst, nbytes = upstream_answer(rank, pull, [p_table], model)
            assert move(sources[producer], target, zip(src, dst, nbytes, strict=True))
        check(sources, target, p_table, d_table, (p_block, d_block), range(cached, tokens))


@pytest.mark.vllm
def test_pages_of_whole_tokens_are_cut_for_smaller_kernel_blocks() -> None:
    pytest.importorskip(UPSTREAM, reason="vLLM is not installed")
    from kvferry.testing.upstream_plan import UpstreamModel, UpstreamRank, upstream_answer

    def latent(tokens: int, *, filled: bool) -> Memory:
        rows = page("l0", heads=(0, 1, 1), tokens=tokens, nbytes=ROW, num_blocks=8)
        return Memory.of([rows], [Group("attention", tokens)], filled=filled)

    source, target = latent(16, filled=True), latent(64, filled=False)
    local = local_of([target], 0, block=64, declared=Declared(block_size=16))
    pull = pull_for(local, [6, 3], 64, Span(0, 90), 1)
    assert pull.block_lens == (16 * ROW,)
    rank = UpstreamRank(bind_layout(source.layout))
    copies = upstream_answer(rank, pull, [[5, 2, 7, 1, 4, 6]], UpstreamModel(kv_heads=1, mla=True))
    assert move(source, target, zip(*copies, strict=True))
    for position in range(90):
        want = source.token(0, 0, position, table=[5, 2, 7, 1, 4, 6], block_tokens=16)
        assert target.token(0, 0, position, table=[6, 3], block_tokens=64) == want


def one_layer(**options: Any) -> Memory:
    return Memory.of([page("l0", nbytes=ROW, **options)], [Group("attention", 64)], filled=False)


@pytest.mark.parametrize(
    ("memory", "declared", "producers", "said"),
    [
        (one_layer(tokens=64, heads=(0, 4, 4)), Declared(block_size=128), 1, "do not divide ours of 64"),
        (one_layer(tokens=64, heads=(0, 4, 4)), Declared(block_size=16), 1, "cannot be cut"),
        (one_layer(tokens=64, heads=(0, 1, 1)), Declared(block_size=16, kernel_block_size=32), 1, "do not divide them"),
        (one_layer(tokens=64, heads=(0, 4, 4), order="token-major"), Declared(), 2, "outermost"),
        (one_layer(tokens=64, heads=(0, 2, 2)), Declared(), 4, "copies"),
    ],
)
def test_what_upstream_would_write_wrongly_is_refused(
    memory: Memory, declared: Declared, producers: int, said: str
) -> None:
    local = local_of([memory], 0, block=64, declared=declared)
    with pytest.raises(RemoteProtocolError, match=said):
        UpstreamPuller(local, UpstreamPeers.parse("allow")).targets(engine_of(producers), Span(0, 64))


@pytest.mark.parametrize(
    ("span", "block", "refused"),
    [
        (Span(0, 62), 16, True),  # of 63 tokens it has computed, it keeps a window from position 32 on
        (Span(0, 61), 16, False),
        (Span(0, 63), 16, False),
        (Span(32, 62), 16, False),  # what is missing there was found here
        (Span(0, 62), 64, False),
        (Span(0, 0), 16, False),  # a release
    ],
)
def test_a_prompt_of_whose_window_it_has_given_back_a_block_is_refused(span: Span, block: int, refused: bool) -> None:
    parts = [page("l0", tokens=64, nbytes=ROW), page("l1", tokens=64, nbytes=ROW, group=1)]
    groups = [Group("attention", 64), Group("attention", 64, sliding_window=31)]
    local = local_of([Memory.of(side_by_side(parts, base=0), groups, filled=False)], 0, block=64)
    assert local.caches is not None
    local = replace(local, caches=replace(local.caches, declared=Declared(block_size=block), kernel_block_size=block))
    puller = UpstreamPuller(local, UpstreamPeers.parse("allow"))
    if refused:
        with pytest.raises(RemoteProtocolError, match="looks at position 31, and .* at the prefill side"):
            puller.targets(engine_of(1), span)
    else:
        assert puller.targets(engine_of(1), span) == {0: True}
