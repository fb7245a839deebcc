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
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import CircularBufferSpec

from kvferry.layout import Group, Parallel
from kvferry.protocol import Span, Table
from kvferry.vllm.layouts.groups import TransferGroup, transfer_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
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
    kinds: tuple[Group, ...] = ()
    """The groups themselves."""

    def cut(self, blocks: Sequence[Sequence[int]], span: Span) -> tuple[Table, ...]:
        """One table per transferred group out of the tables of all groups (or of the transferred ones)."""
        if len(blocks) != len(self.group_ids):
            blocks = [blocks[group] for group in self.group_ids]
        return tuple(group.cut(table, span) for group, table in zip(self.groups, blocks, strict=True))

    def movable_tokens(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt are moved when nothing is cached on the consumer's side."""
        return prompt_tokens - 1 if self.leaves_last_token else prompt_tokens


def read_cache_shape(kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig") -> CacheShape:
    """The shape of the groups that vLLM lets connectors transfer; refuses by name what cannot be carried."""
    config = vllm_config.parallel_config
    # Shapes are those of any rank: only a group's context parallel rank differs, and it is not looked at.
    anyone = Parallel(
        0,
        config.tensor_parallel_size,
        0,
        config.pipeline_parallel_size,
        0,
        config.prefill_context_parallel_size,
    )
    groups = transfer_groups(kv_cache_config, vllm_config, parallel=anyone)
    return CacheShape(
        group_ids=tuple(kv_cache_config.transfer_group_ids),
        groups=tuple(_shape(one) for one in groups),
        leaves_last_token=any(not _keeps_all(one.group) for one in groups),
        kinds=tuple(one.group for one in groups),
    )


def _shape(one: TransferGroup) -> GroupShape:
    return GroupShape(
        entry_tokens=one.group.entry_tokens,
        is_state=one.group.kind == "state",
        is_ring=any(isinstance(spec, CircularBufferSpec) for _, spec in one.layers),
    )


def _keeps_all(group: Group) -> bool:
    """Whether every position of the group stays in the cache, so that nothing depends on which one is the last."""
    return group.kind == "attention" and group.sliding_window is None and group.chunk is None


def _known(blocks: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(None if block == NULL_BLOCK else block for block in blocks)
