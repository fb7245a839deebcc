"""The transitions of both machines, as tables, and how to print them.

A pair that is not in a table changes nothing: it is an event that came late, twice, or for something that is over.
Nothing but these tables decides what state follows; the machines only decide which step an event is.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeVar


class LeaseState(StrEnum):
    """A transfer on the producer."""

    AWAITED = "awaited"
    """A peer asked for it before the scheduler spoke of it."""

    ANNOUNCED = "announced"
    PUBLISHED = "published"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class LeaseStep(StrEnum):
    ANNOUNCE = "announce"
    PUBLISH = "publish"
    COMPLETE = "complete"
    WITHDRAW = "withdraw"
    FAIL = "fail"
    TIME_OUT = "time-out"


class WriteState(StrEnum):
    """What one request of one pull is owed."""

    WAITING = "waiting"
    WRITING = "writing"
    STOPPING = "stopping"
    """Given up, and the engine asked to stop."""

    IN_DOUBT = "in-doubt"
    """Said to have failed, or silent: bytes may still move."""

    SERVED = "served"
    REFUSED = "refused"


class WriteStep(StrEnum):
    START = "start"
    COUNT = "count"
    COMPLETE = "complete"
    FAIL = "fail"
    DOUBT = "doubt"
    STOP = "stop"
    TIME_OUT = "time-out"
    QUIET = "quiet"
    REFUSE = "refuse"


class FetchState(StrEnum):
    """A transfer on the consumer."""

    RESOLVING = "resolving"
    PULLING = "pulling"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class FetchStep(StrEnum):
    RESOLVE = "resolve"
    COMPLETE = "complete"
    FAIL = "fail"
    ABORT = "abort"
    TIME_OUT = "time-out"


class PullState(StrEnum):
    """One pull of a consumer rank to a producer rank."""

    QUEUED = "queued"
    """Chosen, and waiting for a fence of that producer to end."""

    OPEN = "open"
    ENDING = "ending"
    """The fetch is over; the producer may still write until it says that it will not."""

    IN_DOUBT = "in-doubt"
    """Nobody will say so any more: only a fence proves it."""

    SERVED = "served"
    CLOSED = "closed"
    """Over and quiet, without having been served."""


class PullStep(StrEnum):
    SEND = "send"
    SERVE = "serve"
    REFUSE = "refuse"
    DOUBT = "doubt"
    END = "end"
    FENCE = "fence"
    DROP = "drop"


_L, _LS = LeaseState, LeaseStep
LEASE_TABLE: Final[Mapping[tuple[LeaseState, LeaseStep], LeaseState]] = {
    (_L.AWAITED, _LS.ANNOUNCE): _L.ANNOUNCED,
    (_L.AWAITED, _LS.PUBLISH): _L.PUBLISHED,
    (_L.AWAITED, _LS.WITHDRAW): _L.ABORTED,
    (_L.AWAITED, _LS.FAIL): _L.FAILED,
    (_L.AWAITED, _LS.TIME_OUT): _L.EXPIRED,
    (_L.ANNOUNCED, _LS.PUBLISH): _L.PUBLISHED,
    (_L.ANNOUNCED, _LS.WITHDRAW): _L.ABORTED,
    (_L.ANNOUNCED, _LS.FAIL): _L.FAILED,
    (_L.ANNOUNCED, _LS.TIME_OUT): _L.EXPIRED,
    (_L.PUBLISHED, _LS.COMPLETE): _L.DONE,
    (_L.PUBLISHED, _LS.WITHDRAW): _L.ABORTED,
    (_L.PUBLISHED, _LS.FAIL): _L.FAILED,
    (_L.PUBLISHED, _LS.TIME_OUT): _L.EXPIRED,
}

_W, _WS = WriteState, WriteStep
WRITE_TABLE: Final[Mapping[tuple[WriteState, WriteStep], WriteState]] = {
    (_W.WAITING, _WS.START): _W.WRITING,
    (_W.WAITING, _WS.COUNT): _W.SERVED,
    (_W.WAITING, _WS.REFUSE): _W.REFUSED,
    (_W.WRITING, _WS.COMPLETE): _W.SERVED,
    (_W.WRITING, _WS.FAIL): _W.REFUSED,
    (_W.WRITING, _WS.DOUBT): _W.IN_DOUBT,
    (_W.WRITING, _WS.STOP): _W.STOPPING,
    (_W.WRITING, _WS.TIME_OUT): _W.STOPPING,
    (_W.WRITING, _WS.QUIET): _W.REFUSED,
    (_W.STOPPING, _WS.COMPLETE): _W.REFUSED,
    (_W.STOPPING, _WS.FAIL): _W.REFUSED,
    (_W.STOPPING, _WS.DOUBT): _W.IN_DOUBT,
    (_W.STOPPING, _WS.TIME_OUT): _W.IN_DOUBT,
    (_W.STOPPING, _WS.QUIET): _W.REFUSED,
    (_W.IN_DOUBT, _WS.COMPLETE): _W.REFUSED,
    (_W.IN_DOUBT, _WS.FAIL): _W.REFUSED,
    (_W.IN_DOUBT, _WS.QUIET): _W.REFUSED,
}

_F, _FS = FetchState, FetchStep
FETCH_TABLE: Final[Mapping[tuple[FetchState, FetchStep], FetchState]] = {
    (_F.RESOLVING, _FS.RESOLVE): _F.PULLING,
    (_F.RESOLVING, _FS.FAIL): _F.FAILED,
    (_F.RESOLVING, _FS.ABORT): _F.ABORTED,
    (_F.RESOLVING, _FS.TIME_OUT): _F.EXPIRED,
    (_F.PULLING, _FS.COMPLETE): _F.DONE,
    (_F.PULLING, _FS.FAIL): _F.FAILED,
    (_F.PULLING, _FS.ABORT): _F.ABORTED,
    (_F.PULLING, _FS.TIME_OUT): _F.EXPIRED,
}

_P, _PS = PullState, PullStep
PULL_TABLE: Final[Mapping[tuple[PullState, PullStep], PullState]] = {
    (_P.QUEUED, _PS.SEND): _P.OPEN,
    (_P.QUEUED, _PS.DROP): _P.CLOSED,
    (_P.OPEN, _PS.SERVE): _P.SERVED,
    (_P.OPEN, _PS.REFUSE): _P.CLOSED,
    (_P.OPEN, _PS.DOUBT): _P.IN_DOUBT,
    (_P.OPEN, _PS.END): _P.ENDING,
    (_P.ENDING, _PS.SERVE): _P.CLOSED,
    (_P.ENDING, _PS.REFUSE): _P.CLOSED,
    (_P.ENDING, _PS.DOUBT): _P.IN_DOUBT,
    (_P.IN_DOUBT, _PS.SERVE): _P.CLOSED,
    (_P.IN_DOUBT, _PS.REFUSE): _P.CLOSED,
    (_P.IN_DOUBT, _PS.FENCE): _P.CLOSED,
}

LEASE_ENDED: Final = frozenset({_L.DONE, _L.FAILED, _L.ABORTED, _L.EXPIRED})
FETCH_ENDED: Final = frozenset({_F.DONE, _F.FAILED, _F.ABORTED, _F.EXPIRED})
WRITE_MOVING: Final = frozenset({_W.WRITING, _W.STOPPING, _W.IN_DOUBT})
"""Bytes of such a write may be moving: its source blocks are held."""

PULL_MOVING: Final = frozenset({_P.OPEN, _P.ENDING, _P.IN_DOUBT})
"""Something may be writing for such a pull: its destination blocks are held."""

S = TypeVar("S", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


def render_table(table: Mapping[tuple[S, T], S]) -> str:
    """A transition table as Markdown: a row for each state, a column for each step, the state that follows."""
    states = list(dict.fromkeys([state for state, _ in table] + list(table.values())))
    steps = list(dict.fromkeys(step for _, step in table))
    lines = [
        f"| state | {' | '.join(step.value for step in steps)} |",
        f"|---|{'---|' * len(steps)}",
    ]
    for state in states:
        cells = (table.get((state, step)) for step in steps)
        lines.append(f"| {state.value} | {' | '.join(cell.value if cell else '' for cell in cells)} |")
    return "\n".join(lines)


def render_diagram(table: Mapping[tuple[S, T], S]) -> str:
    """The same as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    lines += [f"    {_node(state)} --> {_node(after)}: {step.value}" for (state, step), after in table.items()]
    ends = dict.fromkeys(after for after in table.values() if not any(after == state for state, _ in table))
    lines += [f"    {_node(end)} --> [*]" for end in ends]
    return "\n".join(lines)


def _node(state: StrEnum) -> str:
    return state.value.replace("-", "_")


def render_tables() -> dict[str, str]:
    """Every table of this room by name, as Markdown; the documentation is made from it."""
    return {
        "producer: lease": render_table(LEASE_TABLE),
        "producer: write": render_table(WRITE_TABLE),
        "consumer: fetch": render_table(FETCH_TABLE),
        "consumer: pull": render_table(PULL_TABLE),
    }


def render_diagrams() -> dict[str, str]:
    """The same as Mermaid state diagrams."""
    return {
        "producer: lease": render_diagram(LEASE_TABLE),
        "producer: write": render_diagram(WRITE_TABLE),
        "consumer: fetch": render_diagram(FETCH_TABLE),
        "consumer: pull": render_diagram(PULL_TABLE),
    }
