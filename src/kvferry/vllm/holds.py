"""The connector's own references on blocks, so that memory outlives the request that it belonged to.

vLLM gives a request's blocks back when the request ends, is preempted, or slides its window on; a transfer may still
read or write them then, and after a failed one it may do so for a while. So the connector adds one reference of its
own to each block that a transfer may touch, and drops it when every rank has said that the transfer is quiet. A
block with a reference is not handed out, whoever else let go of it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError, ConfigReason
from kvferry.protocol import Table, Ticket

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """How many blocks are kept from re-use."""

    held: int
    """All of them."""
    quarantined: int
    """Those whose fetch has failed, and which are not proven quiet."""


class BlockHolds:
    """Which blocks are held for which ticket, in the scheduler's block pool."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        """How many workers must say that a ticket is quiet."""
        self._pool: BlockPool | None = None
        self._held: dict[Ticket, list[KVCacheBlock]] = {}
        self._quiet: Counter[Ticket] = Counter()
        self._doubtful: set[Ticket] = set()
        """Held tickets whose fetch has failed."""
        self._count = HeldBlocks(0, 0)

    def bind(self, pool: "BlockPool") -> None:
        """Take the pool that the scheduler allocates from; called once, before the first request."""
        self._pool = pool

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, ticket: Ticket, tables: Iterable[Table]) -> None:
        """Add a reference to every block of ``tables`` until ``ticket`` is quiet on all ranks."""
        pool = self._bound()
        ids = {block for table in tables for block in table.blocks if block is not None}
        blocks = [pool.blocks[block] for block in sorted(ids)]
        pool.touch(blocks)
        self._held[ticket] = blocks
        self._add(held=len(blocks))

    def doubt(self, ticket: Ticket) -> None:
        """The fetch of this ticket has failed; its blocks stay held until it is quiet."""
        if ticket in self._held and ticket not in self._doubtful:
            self._doubtful.add(ticket)
            self._add(quarantined=len(self._held[ticket]))

    @property
    def count(self) -> HeldBlocks:
        """How many are held now. Asked in every step, so it is kept up rather than counted."""
        return self._count

    def settle(self, quiet: Mapping[Ticket, int]) -> None:
        """Count ranks that say "quiet"; drop the references of tickets for which all have."""
        self._quiet.update(quiet)
        for ticket in [ticket for ticket in quiet if self._quiet[ticket] >= self._ranks]:
            del self._quiet[ticket]
            if ticket in self._held:
                self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        blocks = self._held.pop(ticket)
        self._bound().free_blocks(reversed(blocks))
        self._add(held=-len(blocks), quarantined=-len(blocks) if ticket in self._doubtful else 0)
        self._doubtful.discard(ticket)

    def _add(self, *, held: int = 0, quarantined: int = 0) -> None:
        self._count = HeldBlocks(self._count.held + held, self._count.quarantined + quarantined)

    def _bound(self) -> "BlockPool":
        if self._pool is None:
            raise ConfigError(
                ConfigReason.UNSUPPORTED_MODEL,
                "vLLM never bound its block pool to the connector (bind_gpu_block_pool), so no block can be kept "
                "from re-use while a transfer may touch it; this version of vLLM, or the connector around this "
                "one, is not supported",
            )
        return self._pool
