"""Which pages are cleared before a fetch: the outer new blocks of each group, and not a byte more."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from kvferry.protocol import Span, Table
from kvferry.vllm.tables import CacheShape, GroupShape
from kvferry.vllm.tails import Tails, tails_of

pytestmark = pytest.mark.vllm

BLOCKS, ENTRY = 8, 16
ATTENTION = GroupShape(ENTRY, is_state=False, is_ring=False)
STATE = GroupShape(4096, is_state=True, is_ring=False)


class Caches:
    """One tensor of kernel blocks for each layer; all bytes are ones."""

    def __init__(self, *, rows: int = 1, needed: bool = True) -> None:
        self.shape = CacheShape((0, 1), (ATTENTION, STATE), leaves_last_token=True)
        kernel = (BLOCKS * rows, 2, ENTRY // rows, 4)
        self.caches = {"attn.0": torch.ones(kernel), "attn.1": torch.ones(kernel), "state.2": torch.ones(BLOCKS, 64)}
        self.caches["shares.0"] = self.caches["attn.0"]
        groups = [["attn.0", "attn.1", "shares.0"], ["state.2"]]
        self.config: Any = SimpleNamespace(
            needs_kv_cache_zeroing=needed,
            num_blocks=BLOCKS,
            kv_cache_groups=[SimpleNamespace(layer_names=names) for names in groups],
        )

    @property
    def tails(self) -> Tails:
        return tails_of(self.caches, self.config, self.shape)

    def cleared(self, layer: str) -> set[int]:
        """Blocks without a one; every other block is all ones."""
        pages = self.caches[layer].reshape(BLOCKS, -1)
        zero = {block for block in range(BLOCKS) if not pages[block].any()}
        assert all(pages[block].all() for block in range(BLOCKS) if block not in zero)
        return zero


def tables(*blocks: int | None, first_token: int = 0) -> tuple[Table, Table]:
    return Table(first_token, blocks), Table(0, (7,))


@pytest.mark.parametrize("rows", [1, 4], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("span", "blocks", "first_token", "cleared"),
    [
        (Span(0, 40), (3, 1, 5), 0, {3, 5}),
        (Span(0, 7), (3,), 0, {3}),
        (Span(32, 40), (5,), 32, {5}),
        (Span(36, 40), (5,), 32, set()),  # positions 32 to 35 of this block are valid already
        (Span(36, 70), (5, 6, 2), 32, {2}),
        (Span(0, 70), (None, None, 4, 1, 2), 0, {4, 2}),  # a window: its first kept block is not written whole either
    ],
    ids=["several", "one", "after-a-hit", "inside-a-block", "from-inside", "window"],
)
def test_the_outer_new_blocks_are_cleared(
    rows: int, span: Span, blocks: tuple[int | None, ...], first_token: int, cleared: set[int]
) -> None:
    caches = Caches(rows=rows)
    assert caches.tails.clear(span, tables(*blocks, first_token=first_token)) == bool(cleared)
    assert caches.cleared("attn.0") == caches.cleared("attn.1") == cleared
    assert caches.cleared("state.2") == set()


def test_where_vllm_clears_nothing_nothing_is_cleared() -> None:
    caches = Caches(needed=False)
    assert not caches.tails.clear(Span(0, 40), tables(3, 1, 5))
    assert caches.cleared("attn.0") == set()


def test_a_table_without_positions_and_one_without_blocks_are_left_alone() -> None:
    caches = Caches()
    assert not caches.tails.clear(Span(0, 40), (Table(None, (3,)), Table(0, (7,))))
    assert not caches.tails.clear(Span(0, 40), (Table(0, (None, None)), Table(0, (7,))))
    assert caches.cleared("attn.0") == set()
