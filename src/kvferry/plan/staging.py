"""The staged form of a plan: gather many small runs into one, move that, scatter it on the other side.

Head splits of token-major pages, and kernel blocks of unequal size with keys by column, leave runs of a few hundred
bytes; an engine that takes some microseconds for each descriptor is then bound by their number. The staged form pays
two copies in memory instead. A cost model of measured constants picks the cheaper form for each transfer:

    direct:  alpha * descriptors + beta * bytes
    staged:  alpha * long runs   + beta * bytes + 2 * (gamma * bytes + delta * descriptors + step)

A staged transfer runs in this order: gather on the producer, one write of the long runs, scatter on the consumer after
that write has completed. Each of the three is an ordinary :class:`Descriptors`, so each is checked like any other.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvferry.errors import PlanError, PlanReason
from kvferry.plan.descriptors import Descriptors

Form = Literal["direct", "staged"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds; measured on one machine for one transport (``make bench-costs``)."""

    alpha: float
    """For each descriptor that the transport carries."""
    beta: float
    """For each byte that the transport carries."""
    gamma: float
    """For each byte copied in memory on one side."""
    delta: float
    """For each run copied in memory on one side."""
    chunk: int
    """Longest descriptor that the transport takes well, in bytes."""
    step: float = 0.0
    """For starting a gather or a scatter, whatever it holds."""

    def __post_init__(self) -> None:
        constants = {name: getattr(self, name) for name in ("alpha", "beta", "gamma", "delta", "step")}
        wrong = {name: value for name, value in constants.items() if not value >= 0}
        if wrong or self.chunk < 1:
            raise PlanError(
                PlanReason.INVALID_REQUEST,
                f"cost model: constants must not be negative and chunk at least 1, got {wrong}, chunk {self.chunk}",
            )

    def direct(self, descriptors: Descriptors) -> float:
        """Seconds that moving ``descriptors`` as they are takes."""
        return self.alpha * descriptors.count + self.beta * descriptors.total_bytes

    def staged(self, descriptors: Descriptors) -> float:
        """Seconds that gathering, moving and scattering them takes."""
        nbytes = descriptors.total_bytes
        wire = self.alpha * -(-nbytes // self.chunk) + self.beta * nbytes
        return wire + 2 * (self.gamma * nbytes + self.delta * descriptors.count + self.step)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which form is cheaper, and by how much."""

    form: Form
    direct_seconds: float
    staged_seconds: float

    def __str__(self) -> str:
        return f"{self.form} (direct {self.direct_seconds * 1e3:.3f} ms, staged {self.staged_seconds * 1e3:.3f} ms)"


@dataclass(frozen=True, slots=True)
class Staged:
    """The three steps of the staged form."""

    gather: Descriptors
    """On the producer: from the pages to its staging buffer."""
    wire: Descriptors
    """Between the staging buffers."""
    scatter: Descriptors
    """On the consumer: from its staging buffer to the pages."""


def choose(descriptors: Descriptors, costs: CostModel) -> Choice:
    """The cheaper form of one transfer."""
    direct, staged = costs.direct(descriptors), costs.staged(descriptors)
    return Choice("staged" if staged < direct else "direct", direct, staged)


@dataclass(frozen=True, slots=True)
class StagingBuffers:
    """One registered buffer on each side, of equal length."""

    src: int
    dst: int
    nbytes: int


def stage(descriptors: Descriptors, buffers: StagingBuffers, *, chunk: int) -> Staged:
    """Split ``descriptors`` into gather, wire and scatter. Refused when they do not fit the buffers."""
    total = descriptors.total_bytes
    if total > buffers.nbytes:
        raise PlanError(
            PlanReason.LIMIT_EXCEEDED,
            f"{total} bytes to stage, over the {buffers.nbytes} of the staging buffers: move fewer tokens",
        )
    place = np.cumsum(descriptors.nbytes) - descriptors.nbytes
    cuts = np.arange(0, total, chunk, dtype=np.int64)
    return Staged(
        Descriptors.proven(descriptors.src.copy(), place + buffers.src, descriptors.nbytes.copy()),
        Descriptors.proven(cuts + buffers.src, cuts + buffers.dst, np.minimum(chunk, total - cuts)),
        Descriptors.proven(place + buffers.dst, descriptors.dst.copy(), descriptors.nbytes.copy()),
    )
