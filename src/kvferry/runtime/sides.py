"""What one worker is to its peers: an engine in one life of it, its rank, the placements of all its ranks.

``Local`` is this worker; ``Remote`` is the other engine as far as it is known. Both give the ``Side`` that messages
carry, and the placements from which both ends compile the same plan.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.ids import Incarnation
from kvferry.layout import Binding, Placement, Region, regions_of
from kvferry.protocol import Side
from kvferry.runtime.page_reading import HostPages, PageReader
from kvferry.runtime.upstream_caches import OwnCaches


def new_epoch() -> str:
    """The name of a new life of an engine; all its ranks share one."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Local:
    """This worker."""

    incarnation: Incarnation
    model: str
    """What must be equal at both ends for a cache to mean the same: model, revision, dtype, quantisation."""

    index: int
    """Rank of this worker in its engine: pipeline rank times tensor size plus tensor rank."""

    binding: Binding
    placements: tuple[Placement, ...]
    """Of all ranks of the engine, in rank order."""

    tp_size: int
    pp_size: int
    caches: OwnCaches | None = None
    """The same memory in the terms of vLLM's own connector; ``None``: unknown, so that no such peer is served."""
    device_pages: PageReader | None = None
    """Reads pages on a device; ``None``: nobody here can."""

    @property
    def placement(self) -> Placement:
        """Of this rank."""
        return self.placements[self.index]

    @property
    def pages(self) -> PageReader | None:
        """Reads the pages of this rank; ``None`` where they lie on a device and nobody can."""
        return HostPages(self.binding) if self.placement.on_host else self.device_pages

    @property
    def regions(self) -> tuple[Region, ...]:
        """The memory of this rank that transports may touch."""
        return regions_of(self.placement, self.binding)

    @property
    def tp_rank(self) -> int:
        """Tensor rank of this worker."""
        return self.index % self.tp_size

    def side(self) -> Side:
        """As messages carry it."""
        return side_of(self.incarnation, self.index, self.placements, model=self.model)


def side_of(incarnation: Incarnation, index: int, placements: Sequence[Placement], *, model: str) -> Side:
    """The wire form of one rank of an engine."""
    return Side(
        engine_id=incarnation.engine_id,
        epoch=incarnation.epoch,
        index=index,
        fingerprints=tuple(placement.fingerprint for placement in placements),
        model=model,
    )
