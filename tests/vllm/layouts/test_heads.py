"""Heads of a rank against the loader's rule, written out rank by rank."""

import pytest

from kvferry.errors import ConfigError
from kvferry.vllm.layouts import Heads, TensorRank, heads_of


@pytest.mark.parametrize(("total", "size"), [(8, 1), (8, 2), (8, 8), (2, 4), (1, 8), (4, 16), (12, 4)])
def test_ranks_hold_what_the_loader_gives_them(total: int, size: int) -> None:
    local = max(1, total // size)
    copies = max(1, size // total)
    found = [heads_of(local, total, tp=TensorRank(rank, size), layer="attn") for rank in range(size)]
    assert [range(h.first, h.first + h.count) for h in found] == [
        range(rank // copies * local, rank // copies * local + local) for rank in range(size)
    ]
    assert {h.total for h in found} == {total}
    assert {h.shards for h in found} == {min(total, size)}
    assert [h.shard for h in found] == [rank // copies for rank in range(size)]


def test_a_layer_with_more_heads_than_the_model_at_large_keeps_its_own() -> None:
    assert heads_of(4, 2, tp=TensorRank(1, 2), layer="attn") == Heads(4, 4, 8)
    assert heads_of(3, 8, tp=TensorRank(0, 1), layer="attn") == Heads(0, 3, 3)


@pytest.mark.parametrize(("total", "message"), [(None, "no total"), (8, "total of 8"), (3, "total of 3")])
def test_one_head_a_rank_needs_a_total_that_explains_it(total: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        heads_of(1, total, tp=TensorRank(0, 4), layer="attn")
