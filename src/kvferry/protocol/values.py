"""The small values of this room: spans, block tables, who pulls, how a transfer ended.

A span is a range of token positions; a table is the blocks of one cache group *with the position of its first
token*. Nothing here is ever paired by count.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from kvferry.errors import LocalProtocolError, ProtocolReason
from kvferry.ids import RequestId

Ticket = NewType("Ticket", int)
"""What the local scheduler calls one set of held blocks; never used twice in its life, never sent to a peer."""

PullId = NewType("PullId", int)
"""A pull that this producer received, as its driver numbers them; the driver knows which connection it came by."""


@dataclass(frozen=True, slots=True)
class Span:
    """Token positions ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise LocalProtocolError(
                ProtocolReason.MALFORMED, f"a span needs 0 <= start <= stop, got [{self.start}, {self.stop})"
            )


@dataclass(frozen=True, slots=True)
class Table:
    """The blocks of one cache group in order of position; ``None`` where the engine keeps no block."""

    first_token: int | None
    """Position of the first token of the first entry. ``None``: one state per request, or not told (upstream)."""

    blocks: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class PromptMark:
    """The first ``tokens`` tokens of a prompt, by a digest that both ends compute alike.

    A transfer id says which cache is meant, and whoever chose it may have given one to several prompts. So the ends
    also compare what the cache is *of*.
    """

    tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Puller:
    """One consumer rank, as a producer tells them apart."""

    side: str
    """The engine that the rank belongs to, in this life of it: all ranks of one engine agree on it."""

    rank: str
    """The rank within the side."""


@dataclass(frozen=True, slots=True)
class WriteId:
    """One write of a producer: what one request of one pull is owed. At most one per pair ever starts."""

    pull: PullId
    request: RequestId
    """The request as the *consumer* names it; unique within the pull."""


class Fate(StrEnum):
    """The four ways in which a transfer ends on one side; each ends in exactly one."""

    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended, with the reason for anything but done."""

    fate: Fate
    reason: ProtocolReason | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.fate is Fate.DONE) != (self.reason is None):
            raise LocalProtocolError(ProtocolReason.MALFORMED, f"outcome {self.fate.value} with reason {self.reason}")


DONE = Outcome(Fate.DONE)
