"""What the two halves of the connector tell each other, once a step.

The scheduler half sends *orders* (what to publish, pull, withdraw); the worker half sends back which orders are
*quiet*: no byte of their blocks will be read or written any more. An order that touches blocks carries a ticket, a
number that the scheduler never uses twice, so an answer can never be taken for that of another request.

A block list always says the position of its first token; positions, not counts, decide what is paired with what.
"""

from collections import Counter
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import PromptMark, Source, Span, Table, Ticket
from kvferry.runtime import Alternative


@dataclass(frozen=True, slots=True)
class Siblings:
    """Both: who this engine is; given once, before any other order."""

    epoch: str
    """This life of the engine, one for all its ranks."""

    placements: tuple[bytes, ...]
    """Of all ranks, encoded, in rank order."""


@dataclass(frozen=True, slots=True)
class Expect:
    """Producer: the prompt of this transfer is computed here, or waits for its turn; a pull for it may wait."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Publish:
    """Producer: positions ``[0, tokens)`` are computed and lie in these blocks."""

    ticket: Ticket
    request: RequestId
    transfer: TransferId
    tokens: int
    tables: tuple[Table, ...]
    prompt: tuple[PromptMark, ...]
    """What the positions were computed from."""
    prompt_tokens: int | None = None
    """Length of the whole prompt, where its last token was left to the consumer."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Producer: this transfer will not be served (aborted, or its state is not that of the prompt's end)."""

    transfer: TransferId
    why: str


@dataclass(frozen=True, slots=True)
class Pull:
    """Consumer: fetch the positions of ``span`` into these blocks."""

    ticket: Ticket
    request: RequestId
    transfer: TransferId
    source: Source
    span: Span
    tables: tuple[Table, ...]
    prompt: str
    """Digest of the prompt up to the end of ``span``."""
    alternatives: tuple[Alternative, ...] = ()
    """Other producers of the same prompt."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Consumer: the request of this pull is gone; report it, and say when its blocks are quiet."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Release:
    """Consumer: nothing of this transfer is needed; tell the producer that it may free its blocks."""

    transfer: TransferId
    request: RequestId
    source: Source


Order = Siblings | Expect | Publish | Withdraw | Pull | Cancel | Release


class FerryMetadata(KVConnectorMetadata):
    """The orders of one step, in the order in which they were given."""

    def __init__(self, orders: tuple[Order, ...] = ()) -> None:
        self.orders = orders


class FerryWorkerMetadata(KVConnectorWorkerMetadata):
    """Which tickets went quiet since the last step, and on how many ranks; which producers turned out to be foreign."""

    def __init__(self, quiet: Counter[Ticket], upstream: frozenset[EngineId] = frozenset()) -> None:
        self.quiet = quiet
        self.upstream = upstream
        """Producers that run vLLM's own connector."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "FerryWorkerMetadata":
        if not isinstance(other, FerryWorkerMetadata):
            raise TypeError(f"cannot join {type(other).__name__} to FerryWorkerMetadata")
        return FerryWorkerMetadata(self.quiet + other.quiet, self.upstream | other.upstream)


@dataclass(frozen=True, slots=True)
class FerryHandshake(KVConnectorHandshakeMetadata):
    """What one rank tells the scheduler of its engine after registration."""

    placement: bytes
    """The rank's placement, encoded (:func:`kvferry.layout.encode_placement`)."""
