"""What an embedding engine offers on a producer: computed prompts, and how long those are of which it offers less."""

from dataclasses import dataclass

from kvferry.ids import RequestId, TransferId
from kvferry.protocol import PromptMark, Table, Ticket


@dataclass(frozen=True, slots=True)
class Publication:
    """A computed prompt, offered to its consumer."""

    ticket: Ticket
    """Reported once its blocks may be used again."""
    request: RequestId
    """What the local engine calls it."""
    transfer: TransferId
    tokens: int
    """Positions ``[0, tokens)`` are computed."""
    tables: tuple[Table, ...]
    prompt: tuple[PromptMark, ...] = ()
    """What they are computed from, at each length at which a consumer may stop."""
    prompt_tokens: int | None = None
    """Length of the whole prompt, where its last token was left to the consumer; ``None``: it is ``tokens``."""


class Prompts:
    """Lengths of the prompts of published transfers, each with the publication that counts."""

    def __init__(self) -> None:
        self._known: dict[TransferId, tuple[Ticket, int]] = {}

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._known

    def note(self, publication: Publication) -> None:
        """The first under an id counts; another one may come and go meanwhile."""
        length = publication.prompt_tokens or publication.tokens
        self._known.setdefault(publication.transfer, (publication.ticket, length))

    def length(self, transfer: TransferId) -> int:
        """Of a transfer whose blocks are held."""
        return self._known[transfer][1]

    def forget(self, transfer: TransferId, ticket: Ticket) -> None:
        """The blocks of this publication are quiet."""
        if transfer in self._known and self._known[transfer][0] == ticket:
            del self._known[transfer]
