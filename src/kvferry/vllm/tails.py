"""Clears what no transfer writes in the first and the last block of a fetch.

A transfer moves the positions that are needed and nothing else, so the block that holds the last one keeps, behind it,
whatever was there before; so does the first block of a window, before it. Attention masks those positions, but a
masked value still takes part in a sum, with weight zero: harmless for a number, not for a NaN. Where a model has layers
with a state, or caches of several precisions, a block's former bytes can be of another kind, and read as keys and
values they may well be NaN. vLLM clears the blocks it gives out for that reason, but not those that a connector is to
load, since its clearing would race with the load. So it is done here, before the fetch is sent out.

Only those two blocks of each group: all between them are written whole. And only when the block is new: one that
begins before the fetch holds positions that are valid already.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.protocol import Span, Table
from kvferry.vllm.tables import CacheShape

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of one layer; ``rows`` of its tensor belong to one block."""

    tensor: Any
    rows: int


@dataclass(frozen=True, slots=True)
class Tails:
    """The pages to clear, by group, in the order of a fetch's tables."""

    shape: CacheShape
    pages: tuple[tuple[_Pages, ...], ...]
    """Of each group; empty for a group that is never cleared."""

    def clear(self, span: Span, tables: Sequence[Table]) -> bool:
        """Clear the outer blocks of a fetch of ``span`` into ``tables``; says whether there was anything to do."""
        blocks = list(self._outer(span, tables))
        for group, block in blocks:
            for pages in self.pages[group]:
                pages.tensor[block * pages.rows : (block + 1) * pages.rows].zero_()
        return bool(blocks)

    def _outer(self, span: Span, tables: Sequence[Table]) -> Iterator[tuple[int, int]]:
        for group, (shape, table) in enumerate(zip(self.shape.groups, tables, strict=True)):
            if not self.pages[group] or table.first_token is None:
                continue
            kept = [(place, block) for place, block in enumerate(table.blocks) if block is not None]
            for place, block in kept[:1] + kept[1:][-1:]:
                if table.first_token + place * shape.entry_tokens >= span.start:
                    yield group, block


def tails_of(kv_caches: "dict[str, torch.Tensor]", kv_cache_config: "KVCacheConfig", shape: CacheShape) -> Tails:
    """The tails of a worker's caches. Where vLLM clears no blocks itself there is nothing to do."""
    needed = kv_cache_config.needs_kv_cache_zeroing
    groups = [kv_cache_config.kv_cache_groups[number] for number in shape.group_ids]
    pages = tuple(
        tuple(_pages(kv_caches, group.layer_names, kv_cache_config.num_blocks))
        if needed and not (one.is_state or one.is_ring)
        else ()
        for group, one in zip(groups, shape.groups, strict=True)
    )
    return Tails(shape, pages)


def _pages(kv_caches: "dict[str, torch.Tensor]", layers: Sequence[str], num_blocks: int) -> Iterator[_Pages]:
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for layer in layers:
        tensor = kv_caches[layer]
        key = tensor.data_ptr(), tuple(tensor.shape)
        if key not in seen:
            seen.add(key)
            yield _Pages(tensor, tensor.shape[0] // num_blocks)
