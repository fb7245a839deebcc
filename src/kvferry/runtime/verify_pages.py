"""Which pages of a pull a digest is made of, and their rows in the memory of either end.

The *page* of a digest is one entry of the consumer's block table in one *cell* of the plan: a (layer, component) and
the box of coordinates that this producer rank owes this consumer rank. Both ends can work out the same pages in the
same order from what they have anyway (the plan, the token range, the consumer's tables), whatever their own block
sizes, kernel blocks, orders inside a page and shares of heads are. Each end walks its *own* layout and block table to
the rows of a page, so of the planner only the answer to "who owes what" is used, not its addresses.

Of a *sample* only some pages are looked at, chosen by a seed that travels in the pull: each page has a score, a mix of
the seed, the cell and the page's place, and those with the lowest scores are taken; at least one for each cell.
A message holds at most :data:`MAX_DIGESTS`; a larger transfer has digests of several pages at once.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvferry.layout import Component, Placed
from kvferry.plan import Plan, TransferRequest
from kvferry.plan.assign import Move
from kvferry.protocol import VerifyAsk
from kvferry.runtime.digest import rows_of_pair
from kvferry.runtime.page_reading import Int64s, Rows, split_mix
from kvferry.runtime.report import Side

MAX_DIGESTS: Final = 65_536
"""Of one pull; 1 MiB in its reply."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One component of one pair: what a producer rank owes a consumer rank of it."""

    source: Placed
    target: Placed
    move: Move


@dataclass(frozen=True, slots=True)
class Job:
    """What one end needs to know to make the digests of one pull."""

    plan: Plan
    pair: tuple[int, int]
    """Producer rank and consumer rank."""
    request: TransferRequest
    """A consumer does not know the producer's tables; on its side they are not used and may be empty."""
    ask: VerifyAsk


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one cell that are looked at, as rows of one memory: page ``i`` has rows ``[cuts[i], cuts[i+1])``."""

    cell: Cell
    rows: Rows
    cuts: Int64s
    covered: int
    """Table entries of the consumer in them: more than pages where several are hashed at once."""

    @property
    def count(self) -> int:
        """How many digests they have."""
        return int(self.cuts.size) - 1


def pages_of(job: Job, side: Side) -> list[Pages]:
    """All pages that are looked at, cell by cell."""
    made: list[Pages] = []
    known: dict[tuple[object, ...], tuple[Rows, Int64s]] = {}
    cells = _cells(job)
    found = [(cell, *_rows(cell, job, side=side, known=known)) for cell in cells]
    together = _entries_together([entries for _, _, entries in found])
    for cell, rows, entries in found:
        if not entries.size:
            continue
        starts = np.flatnonzero(np.diff(entries // together, prepend=-1))
        chosen = _chosen(starts.size, cell, job.ask)
        made.append(_only(cell, rows, entries=entries, starts=starts, chosen=chosen))
    return made


def _cells(job: Job) -> list[Cell]:
    source, target = job.plan.producers[job.pair[0]], job.plan.consumers[job.pair[1]]
    moves = job.plan.assignment.moves.get(job.pair, ())
    cells = [Cell(source.placed[move.src], target.placed[move.dst], move) for move in moves]
    return sorted(cells, key=lambda cell: (cell.target.component.key, coordinates_of(cell)))


def coordinates_of(cell: Cell) -> tuple[tuple[int, int], ...]:
    """The box of a cell, plainly."""
    return tuple((interval.start, interval.stop) for interval in cell.move.box)


def _rows(
    cell: Cell, job: Job, *, side: Side, known: dict[tuple[object, ...], tuple[Rows, Int64s]]
) -> tuple[Rows, Int64s]:
    """The rows of a cell in the memory of ``side``, and the entry of the consumer's table that each belongs to.

    Layers of one kind have equal rows, so they are found once for each kind.
    """
    parts = (cell.source.component, cell.target.component)
    key = tuple(
        (part.group, part.pages, part.token_axis.count if part.token_axis else 0, part.row_tokens) for part in parts
    )
    if key not in known:
        sides = ((job.plan.producers[job.pair[0]], parts[0]), (job.plan.consumers[job.pair[1]], parts[1]))
        rows, _ = rows_of_pair(side, *sides, job.request)
        known[key] = rows, _entry_of(rows, parts[1], job)
    return known[key]


def _entry_of(rows: Rows, target: Component, job: Job) -> Int64s:
    group = job.plan.consumers[job.pair[1]].groups[target.group]
    if group.kind == "state":
        return np.zeros_like(rows.position)
    first = job.request.consumer[target.group].first_token or 0
    return (rows.position - first) // group.entry_tokens


def _entries_together(found: Sequence[Int64s]) -> int:
    """How many entries share a digest, so that not too many are sent; a power of two."""
    together = 1
    while sum(_distinct(entries // together) for entries in found) > MAX_DIGESTS:
        if together > MAX_DIGESTS * 1024:
            break  # more cells than digests: one for each cell is the least
        together *= 2
    return together


def _chosen(count: int, cell: Cell, ask: VerifyAsk) -> Int64s:
    """Which of a cell's pages are looked at, in order."""
    if ask.every == 1:
        return np.arange(count, dtype=np.int64)
    name = repr((cell.target.component.key, coordinates_of(cell))).encode()
    salt = int.from_bytes(hashlib.sha256(struct.pack("<Q", ask.seed) + name).digest()[:8], "little")
    scores = split_mix(count, state=salt)
    wanted = -(-count // ask.every)
    return np.sort(np.argsort(scores, kind="stable")[:wanted]).astype(np.int64)


def _only(cell: Cell, rows: Rows, *, entries: Int64s, starts: Int64s, chosen: Int64s) -> Pages:
    """The chosen pages: their rows, one page after the other."""
    stops = np.append(starts[1:], entries.size)
    sizes = (stops - starts)[chosen]
    cuts = np.concatenate([[0], np.cumsum(sizes)])
    if chosen.size == starts.size:
        picked = np.arange(entries.size)
    else:
        picked = np.repeat(starts[chosen] - cuts[:-1], sizes) + np.arange(cuts[-1])
    return Pages(cell, rows.at(picked), cuts, _distinct(entries[picked]))


def _distinct(ordered: Int64s) -> int:
    """How many different values there are in an array that never falls."""
    return int(np.count_nonzero(np.diff(ordered)) + 1) if ordered.size else 0
