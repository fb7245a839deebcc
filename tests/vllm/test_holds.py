"""Blocks that the connector holds: in vLLM's own pool, and how many they are said to be."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from kvferry.protocol import Table, Ticket
from kvferry.vllm.holds import BlockHolds, HeldBlocks

RANKS = 2
BLOCKS = 32

TABLES = st.lists(st.integers(1, BLOCKS - 1) | st.none(), max_size=5).map(lambda blocks: Table(0, tuple(blocks)))
EVENTS = st.one_of(
    st.tuples(st.just("hold"), st.lists(TABLES, max_size=2)),
    st.tuples(st.just("doubt"), st.integers(0, 7)),
    st.tuples(st.just("quiet"), st.dictionaries(st.integers(0, 7), st.integers(1, RANKS), max_size=3)),
)


@given(st.lists(EVENTS, max_size=30))
def test_what_is_held_is_what_is_not_quiet_on_all_ranks(events: list[tuple[str, object]]) -> None:
    """Against a recount from scratch after every event; the pool agrees with it too."""
    pool = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=False, hash_block_size=16)
    holds = BlockHolds(RANKS)
    holds.bind(pool)
    held: dict[int, set[int]] = {}
    doubted: set[int] = set()
    quiet: Counter[int] = Counter()
    made = 0
    for kind, given_value in events:
        match kind, given_value:
            case "hold", list(tables):
                holds.hold(Ticket(made), tables)
                held[made] = {block for table in tables for block in table.blocks if block is not None}
                made += 1
            case "doubt", int(ticket):
                holds.doubt(Ticket(ticket))
                doubted |= {ticket} & held.keys()
            case "quiet", dict(ranks):
                said = {ticket: count for ticket, count in ranks.items() if ticket in held}
                holds.settle({Ticket(ticket): count for ticket, count in said.items()})
                quiet.update(said)
                for ticket in said:
                    if quiet[ticket] >= RANKS:
                        del held[ticket]
                        doubted.discard(ticket)
        assert holds.count == HeldBlocks(
            sum(len(blocks) for blocks in held.values()), sum(len(held[ticket]) for ticket in doubted)
        )
        references = Counter(block for blocks in held.values() for block in blocks)
        assert {
            block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null
        } == references
