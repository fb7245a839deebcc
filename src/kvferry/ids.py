"""Names of things that cross rooms and processes.

``NewType`` costs nothing at run time; it stops a transfer id from being passed where a request id is meant.
"""

from dataclasses import dataclass
from typing import NewType

EngineId = NewType("EngineId", str)
"""One vLLM engine (a set of ranks that share a scheduler); survives a restart only if the operator sets it."""

TransferId = NewType("TransferId", str)
"""One move of one prompt's cache; chosen by the router, the same on both sides, unguessable."""

RequestId = NewType("RequestId", str)
"""A request as one engine's scheduler names it: local, never sent to a peer as a key."""

Fingerprint = NewType("Fingerprint", str)
"""Hex digest of a placement: equal fingerprints mean equal placements."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of one engine: what a peer learnt from it is void once the epoch changes."""

    engine_id: EngineId
    epoch: str
    """Random hex, drawn when the process starts."""

    def __str__(self) -> str:
        return f"{self.engine_id}@{self.epoch[:8]}"
