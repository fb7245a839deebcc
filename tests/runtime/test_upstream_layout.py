"""The layout supposed for an upstream consumer: planned, carried out, compared byte by byte with plain loops."""

from dataclasses import replace

import numpy as np
import pytest

from kvferry.errors import FerryError
from kvferry.layout import Axis, Component, Content, Group, regions_of
from kvferry.plan import BlockTable, TransferRequest, verify_descriptors
from kvferry.protocol import Span
from kvferry.protocol.producer_events import PulledRequest
from kvferry.protocol.pulls import requests_of
from kvferry.protocol.upstream import paired_ranks
from kvferry.runtime.options import UpstreamPeers
from kvferry.runtime.plans import Plans
from kvferry.runtime.upstream_caches import CacheRegion, Declared
from kvferry.runtime.upstream_serving import UpstreamCounter
from kvferry.testing.layouts import page, side_by_side, state
from kvferry.testing.upstream_peer import caches_of, pull_of, receiver_of

from .upstream_memory import ROW, Memory, check, local_of, move, rows_of, side

CASES = {
    "alike": ((1, 16, 16, False), (1, 16, 16, False)),
    "kernel blocks": ((1, 32, 16, False), (1, 32, 16, False)),
    "their blocks are larger": ((1, 32, 16, False), (1, 96, 16, False)),
    "their blocks are smaller": ((1, 96, 16, False), (1, 32, 16, False)),
    "their layers are packed": ((1, 16, 16, False), (1, 16, 16, True)),
    "our layers are packed": ((1, 16, 16, True), (1, 16, 16, False)),
    "they have two ranks": ((1, 16, 16, False), (2, 16, 16, False)),
    "we have two ranks": ((2, 16, 16, False), (1, 16, 16, False)),
    "two and four, blocks too": ((2, 32, 16, False), (4, 96, 16, True)),
    "four and two": ((4, 32, 16, True), (2, 32, 16, False)),
    "two and two": ((2, 16, 16, False), (2, 16, 16, False)),
}


@pytest.mark.parametrize(("ours", "theirs"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("tokens", "cached"), [(90, 0), (96, 0), (97, 32), (1, 0)])
def test_every_wanted_token_arrives_and_nothing_else(
    ours: tuple[int, int, int, bool], theirs: tuple[int, int, int, bool], tokens: int, cached: int
) -> None:
    p_size, p_block, p_kernel, p_packed = ours
    d_size, d_block, d_kernel, d_packed = theirs
    cached = cached // d_block * d_block
    sources = [side(r, p_size, block=p_block, kernel=p_kernel, filled=True, packed=p_packed) for r in range(p_size)]
    targets = [side(r, d_size, block=d_block, kernel=d_kernel, packed=d_packed) for r in range(d_size)]
    p_table = [5, 2, 9, 14, 1, 7, 3][: -(-tokens // p_block)]
    d_table = [8, 3, 11, 6, 15, 2, 4][: -(-tokens // d_block)]
    declared = Declared(block_size=d_block, kernel_block_size=d_kernel)
    for consumer, target in enumerate(targets):
        copied = 0
        for producer in paired_ranks(consumer, d_size, others=p_size):
            local = local_of(sources, producer, block=p_block, declared=declared)
            counter = UpstreamCounter(local, Plans(local.placements), UpstreamPeers.parse("allow"))
            caches = caches_of(target.layout, block_size=d_block)
            shown = receiver_of(caches, "127.0.0.1:1", tp_rank=consumer, tp_size=d_size)
            pull = pull_of(shown, {"d": ("t", [d_table[cached // d_block :]])})
            admitted = counter.admit(pull, transport="mooncake")
            assert admitted.lists is not None
            (wanted,) = requests_of(pull)
            placed: PulledRequest = admitted.lists(wanted, Span(0, tokens), tokens)
            assert placed.span == Span(cached, tokens)
            request = TransferRequest(
                cached,
                tokens,
                (BlockTable.of(p_table, first_token=0),),
                tuple(BlockTable.of(one.blocks, first_token=one.first_token) for one in placed.tables),
            )
            pair = admitted.plan.pair(admitted.producer, admitted.consumer)
            admitted.plan.check(request)
            if pair is None:
                continue
            rows = pair.bind(request, src=local.binding, dst=admitted.binding, verify="paranoid")
            verify_descriptors(rows, src=regions_of(local.placement, local.binding), dst=target.layout.regions)
            copied += move(sources[producer], target, rows_of(rows))
        assert copied
        check(sources, target, p_table, d_table, (p_block, d_block), range(cached, tokens))


def test_a_padded_state_moves_what_is_live() -> None:
    states = [state("l0", part=(0, 4, 4), nbytes=256, num_blocks=8, block_stride=65_536)]
    source, target = (Memory.of(states, [Group("state", 1 << 20)], filled=filled) for filled in (True, False))
    local = replace(
        local_of([source], 0, block=16),
        caches=replace(caches_of(source.layout, block_size=16), regions=as_padded(source)),
    )
    counter = UpstreamCounter(local, Plans(local.placements), UpstreamPeers.parse("allow"))
    shown = receiver_of(replace(caches_of(target.layout, block_size=16), regions=as_padded(target)), "127.0.0.1:1")
    pull = pull_of(shown, {"d": ("t", [[0, 6]])})
    admitted = counter.admit(pull, transport="mooncake")
    assert admitted.lists is not None
    placed = admitted.lists(requests_of(pull)[0], Span(0, 50), 51)
    request = TransferRequest(0, 50, (BlockTable.of([2]),), tuple(BlockTable.of(one.blocks) for one in placed.tables))
    rows = admitted.plan.bind(request, 0, 0, src=local.binding, dst=admitted.binding)
    assert (rows.count, rows.total_bytes) == (1, 1024)
    move(source, target, rows_of(rows))
    assert np.array_equal(target.bytes[6 * 65_536 :][:1024], source.bytes[2 * 65_536 :][:1024])
    assert np.count_nonzero(target.bytes) == 1024


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("channels_first", [False, True])
def test_states_are_cut_part_by_part(here: int, there: int, channels_first: bool) -> None:
    """Against vLLM's shapes: (taps, q | k | v channels), then heads of the recurrence, all of them cut by rank."""
    whole = whole_state()
    sources = [state_memory(whole, rank, here, channels_first, filled=True) for rank in range(here)]
    targets = [state_memory(whole, rank, there, channels_first, filled=False) for rank in range(there)]
    for consumer, target in enumerate(targets):
        for producer in paired_ranks(consumer, there, others=here):
            local = local_of(sources, producer, block=16)
            assert local.caches is not None
            local = replace(local, caches=replace(local.caches, even_states=True, regions=as_padded(sources[producer])))
            counter = UpstreamCounter(local, Plans(local.placements), UpstreamPeers.parse("allow"))
            caches = replace(caches_of(target.layout, block_size=16), regions=as_padded(target))
            shown = receiver_of(caches, "127.0.0.1:1", tp_rank=consumer, tp_size=there)
            admitted = counter.admit(pull_of(shown, {"d": ("t", [[6]])}), transport="mooncake")
            request = TransferRequest(0, 50, (BlockTable.of([2]),), (BlockTable.of([6]),))
            rows = admitted.plan.bind(
                request, admitted.producer, admitted.consumer, src=local.binding, dst=admitted.binding
            )
            move(sources[producer], target, rows_of(rows))
    for rank, target in enumerate(targets):
        want = state_memory(whole, rank, there, channels_first, filled=True)
        live = sum(one.live_bytes for one in target.layout.components)
        assert np.array_equal(target.bytes[6 * STATE_PAGE :][:live], want.bytes[2 * STATE_PAGE :][:live])
        assert not np.delete(target.bytes, np.s_[6 * STATE_PAGE : 6 * STATE_PAGE + live]).any()


STATE_PAGE, TAPS, ITEM = 4096, 3, 2
SECTIONS = {"conv.q": 8, "conv.k": 8, "conv.v": 16}
RECURRENT = (4, 40)
"""Heads, and bytes of one."""


def whole_state() -> dict[str, np.ndarray]:
    """By part, [taps, channels] or [heads, bytes of one], unsharded."""
    source = np.random.default_rng(11)
    made = {name: source.integers(1, 2**16, (TAPS, count)).astype(np.uint16) for name, count in SECTIONS.items()}
    return made | {"ssm": source.integers(1, 256, RECURRENT).astype(np.uint8)}


def state_memory(whole: dict[str, np.ndarray], rank: int, size: int, channels_first: bool, *, filled: bool) -> Memory:
    """One rank's pages as vLLM's state tensors lie in them; block 2 is filled."""
    shards = {name: np.array_split(whole[name], size, axis=1)[rank] for name in SECTIONS}
    conv = np.concatenate(list(shards.values()), axis=1)
    ssm = np.array_split(whole["ssm"], size, axis=0)[rank]
    channels, components, first = conv.shape[1], [], 0
    channel_stride, tap_stride = (TAPS * ITEM, ITEM) if channels_first else (ITEM, channels * ITEM)
    for name, shard in shards.items():
        held = shard.shape[1]
        axes = (
            Axis("channel", rank * held, held, SECTIONS[name], channel_stride),
            Axis("tap", 0, TAPS, TAPS, tap_stride),
        )
        components.append(state_part(name, first * channel_stride, axes, Content(ITEM, "uint16")))
        first += held
    box = (Axis("head", rank * len(ssm), len(ssm), RECURRENT[0], RECURRENT[1]),)
    components.append(state_part("ssm", conv.nbytes, box, Content(RECURRENT[1], "uint8")))
    memory = Memory.of(components, [Group("state", 1 << 20)], filled=False)
    if filled:
        live = (conv.T if channels_first else conv).tobytes() + ssm.tobytes()
        memory.bytes[2 * STATE_PAGE :][: len(live)] = np.frombuffer(live, np.uint8)
    return memory


def state_part(name: str, offset: int, axes: tuple[Axis, ...], content: Content) -> Component:
    return Component(
        layer="l0",
        layer_index=0,
        component=name,
        group=0,
        address=offset,
        num_blocks=8,
        block_stride=STATE_PAGE,
        axes=axes,
        content=content,
    )


def as_padded(memory: Memory) -> tuple[CacheRegion, ...]:
    """As upstream shows it: the whole page is said to move."""
    (one,) = caches_of(memory.layout, block_size=16).regions  # one layer
    return (replace(one, kv_block_len=one.block_len),)


def test_stages_get_their_layers_and_one_without_any_is_answered() -> None:
    source = side(0, 1, block=16, kernel=16, filled=True)
    whole = caches_of(source.layout, block_size=16)
    local = local_of([source], 0, block=16)
    counter = UpstreamCounter(local, Plans(local.placements), UpstreamPeers.parse("allow"))
    for layers, idle, moves in ((whole.regions[:2], False, 2), (whole.regions[2:], False, 1)):
        shown = replace(receiver_of(replace(whole, regions=layers), "127.0.0.1:1"), pp_size=2)
        admitted = counter.admit(pull_of(shown, {"d": ("t", [[1]])}), transport="mooncake")
        assert (admitted.idle, admitted.expected) == (idle, 2)
        assert len(admitted.plan.consumers[0].components) == moves
    others = tuple(replace(one, layer=f"other{one.layer}") for one in whole.regions)
    shown = replace(receiver_of(replace(whole, regions=others), "127.0.0.1:1"), pp_size=2)
    assert counter.admit(pull_of(shown, {"d": ("t", [[1]])}), transport="mooncake").idle


def test_tokens_outside_of_heads_are_refused_for_another_tensor_parallel_size() -> None:
    rows = [page("l0", heads=(0, 4, 4), tokens=16, nbytes=ROW, order="token-major")]
    source = Memory.of(rows, [Group("attention", 16)], filled=True)
    target = Memory.of([page("l0", heads=(0, 2, 4), tokens=16, nbytes=ROW)], [Group("attention", 16)], filled=False)
    local = local_of([source], 0, block=16)
    counter = UpstreamCounter(local, Plans(local.placements), UpstreamPeers.parse("allow"))
    shown = receiver_of(caches_of(target.layout, block_size=16), "127.0.0.1:1", tp_rank=0, tp_size=2)
    with pytest.raises(FerryError, match="outermost"):
        counter.admit(pull_of(shown, {"d": ("t", [[1]])}), transport="mooncake")


def test_heads_that_ranks_have_copies_of_are_refused() -> None:
    source = side(0, 1, block=16, kernel=16, filled=True)
    local = local_of([source], 0, block=16)
    counter = UpstreamCounter(local, Plans(local.placements), UpstreamPeers.parse("allow"))
    shown = receiver_of(caches_of(source.layout, block_size=16), "127.0.0.1:1", tp_rank=0, tp_size=8)
    with pytest.raises(FerryError, match="copies"):
        counter.admit(pull_of(shown, {"d": ("t", [[1]])}), transport="mooncake")


def test_a_page_of_the_wrong_length_for_its_tensor_parallel_size_is_refused() -> None:
    source = side(0, 1, block=16, kernel=16, filled=True)
    local = local_of([source], 0, block=16)
    counter = UpstreamCounter(local, Plans(local.placements), UpstreamPeers.parse("allow"))
    shown = replace(receiver_of(caches_of(source.layout, block_size=16), "127.0.0.1:1"), tp_size=2)
    with pytest.raises(FerryError, match="a kernel block of 512 bytes there, of 256"):
        counter.admit(pull_of(shown, {"d": ("t", [[1]])}), transport="mooncake")


@pytest.mark.parametrize("cached", [0, 2])
@pytest.mark.parametrize(("tokens", "refused"), [(62, False), (63, True), (64, False)])
def test_a_prompt_of_whose_window_the_consumer_gives_back_a_block_is_refused(
    tokens: int, cached: int, *, refused: bool
) -> None:
    """Of 63 tokens that it counts as computed it keeps a window from position 32 on, wherever that came from."""
    parts = [page("l0", tokens=16, nbytes=ROW), page("l1", tokens=16, nbytes=ROW, group=1)]
    groups = [Group("attention", 16), Group("attention", 16, sliding_window=31)]
    source, target = (Memory.of(side_by_side(parts, base=0), groups, filled=filled) for filled in (True, False))
    local = local_of([source], 0, block=16)
    counter = UpstreamCounter(local, Plans(local.placements), UpstreamPeers.parse("allow"))
    shown = receiver_of(caches_of(target.layout, block_size=16), "127.0.0.1:1")
    kept = (tokens - 31) // 16
    lists = [[1, 2, 3, 4][cached:], [4, 5, 6, 7][max(cached, kept) :]]
    pull = pull_of(shown, {"d": ("t", lists)})
    admitted = counter.admit(pull, transport="mooncake")
    assert admitted.lists is not None
    (wanted,) = requests_of(pull)
    if refused:
        with pytest.raises(FerryError, match="looks at position 31, and .* at the decode side"):
            admitted.lists(wanted, Span(0, tokens - 1), tokens)
    else:
        assert admitted.lists(wanted, Span(0, tokens - 1), tokens).span == Span(cached * 16, tokens - 1)
