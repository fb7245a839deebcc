"""Which tokens of a request move, and which of its blocks hold them.

vLLM's block tables are positional: entry i of a group covers ``entry_tokens`` consecutive positions, with the null
block where the engine keeps nothing (before a window, between states). Cutting a table to a token range is therefore
arithmetic on positions; nothing is paired by counting from an end.

Models whose cache is more than full attention move one token less than the prompt (the *N-1 rule*): the decode
engine always computes the last prompt token itself, and a state that has already taken it in, or a window that has
already slid past what it needs, would be wrong. The prefill engine stops one token early for the same reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.protocol import Span, Table

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

NULL_BLOCK = 0
"""The id of vLLM's null block, in every group."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How one cache group maps positions to entries of its block table."""

    entry_tokens: int
    is_state: bool
    """Holds whole states: only the entry of the last position matters."""
    is_ring: bool
    """One block for the whole request, whatever its length."""

    def cut(self, blocks: Sequence[int], span: Span) -> Table:
        """The entries that hold the positions of ``span``, or the state after its last one."""
        if self.is_ring:
            return Table(None, _known(blocks[:1]))
        last = -(-span.stop // self.entry_tokens)
        first = last - 1 if self.is_state else span.start // self.entry_tokens
        first = min(max(first, 0), last)
        return Table(first * self.entry_tokens, _known(blocks[first:last]))


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The groups of an engine's cache that take part in transfers, in vLLM's order."""

    group_ids: tuple[int, ...]
    groups: tuple[GroupShape, ...]
    leaves_last_token: bool
    """The N-1 rule holds: the last prompt token is computed by the decode engine, never moved."""

    def cut(self, blocks: Sequence[Sequence[int]], span: Span) -> tuple[Table, ...]:
        """One table per transferred group out of the tables of all groups (or of the transferred ones)."""
        if len(blocks) != len(self.group_ids):
            blocks = [blocks[group] for group in self.group_ids]
        return tuple(group.cut(table, span) for group, table in zip(self.groups, blocks, strict=True))

    def movable_tokens(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt are moved when nothing is cached on the consumer's side."""
        return prompt_tokens - 1 if self.leaves_last_token else prompt_tokens


def read_cache_shape(kv_cache_config: "KVCacheConfig", *, context_parallel: int) -> CacheShape:
    """The shape of the groups that vLLM lets connectors transfer."""
    specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
    return CacheShape(
        group_ids=tuple(kv_cache_config.transfer_group_ids),
        groups=tuple(_group_shape(spec, context_parallel) for spec in specs),
        leaves_last_token=any(not _is_plain(spec) for spec in specs),
    )


def _group_shape(spec: KVCacheSpec, context_parallel: int) -> GroupShape:
    is_state = isinstance(spec, MambaSpec)
    return GroupShape(
        entry_tokens=spec.block_size * (1 if is_state else context_parallel),
        is_state=is_state,
        is_ring=isinstance(spec, CircularBufferSpec),
    )


def _is_plain(spec: Any) -> bool:
    """Whether every position of the group stays in the cache for good, so that nothing depends on the last one."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(_is_plain(member) for member in spec.kv_cache_specs.values())
    return isinstance(spec, FullAttentionSpec)


def _known(blocks: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(None if block == NULL_BLOCK else block for block in blocks)
