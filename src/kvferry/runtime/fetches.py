"""What an embedding engine asks of a consumer: positions, the blocks that they go to, and who else may have them."""

from dataclasses import dataclass

from kvferry.ids import RequestId, TransferId
from kvferry.protocol import Source, Span, Table, Ticket


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another producer that has computed the same prompt, and what it calls the transfer."""

    transfer: TransferId
    source: Source


@dataclass(frozen=True, slots=True)
class Fetch:
    """Positions that this rank wants, and the blocks that they go to."""

    ticket: Ticket
    """Reported once its blocks may be used again."""
    request: RequestId
    transfer: TransferId
    source: Source
    span: Span
    tables: tuple[Table, ...]
    prompt: str | None = None
    """Digest of the prompt's tokens up to the end of ``span``."""
    alternatives: tuple[Alternative, ...] = ()
    """Who may be asked next, in this order, when the source fails; each is told when it is not needed."""
