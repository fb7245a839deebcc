"""End-to-end integrity: digests of the pages that move, made alike at both ends, and compared where they arrive.

The *page* of a digest is one entry of the consumer's block table in one cell of the plan: a (layer, component) and the
box of coordinates that this producer rank owes this consumer rank. Both ends can work out the same pages in the same
order from what they have anyway (the plan, the token range, the consumer's tables), whatever their own block sizes,
kernel blocks, orders inside a page and shares of heads are. Each end then walks its *own* layout and block table to the
rows of a page and hashes, with SHA-256 cut to 16 bytes:

    layer, component, content type, coordinates | first and last position, number of rows | bytes in canonical order

So a right copy of the wrong page is found too, and a wrong plan as well as a wrong copy: of the planner only the answer
to "who owes what" is used, not its addresses. Bytes between the parts that move (padding, other ranks' heads, positions
that were not asked for) are not looked at.

Of a *sample* only some pages are hashed, chosen by a seed that travels in the pull: each page has a score, a mix of the
seed, the cell and the page's place, and those with the lowest scores are taken; at least one for each cell.
A message holds at most :data:`MAX_DIGESTS`; a larger transfer has digests of several pages at once.

Both ends read CPU memory only (:func:`can_verify`).
"""

import asyncio
import functools
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Binding, Component, Placed, Placement
from kvferry.plan import Plan, TransferRequest
from kvferry.plan.assign import Move
from kvferry.protocol import FEATURES, VerifyAsk
from kvferry.runtime.digest import Rows, cells_of, rows_of_pair
from kvferry.runtime.report import Side
from kvferry.runtime.sides import Local

FEATURE: Final = "verify"
"""Of a producer that makes digests when asked."""

DIGEST_BYTES: Final = 16
MAX_DIGESTS: Final = 65_536
"""Of one pull; 1 MiB in its reply."""

SAMPLE_EVERY: Final = 16
"""Of a sample, one page in so many is looked at."""

_CHUNK_ROWS: Final = 4096
"""Rows gathered at once, unless one page has more."""

HASHERS: Final = min(4, os.cpu_count() or 1)
"""Threads of one runtime that hash; gathering and hashing run without Python's lock."""

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cell:
    """One component of one pair: what a producer rank owes a consumer rank of it."""

    source: Placed
    target: Placed
    move: Move


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one cell that are looked at, as rows of one memory: page ``i`` has rows ``[cuts[i], cuts[i+1])``."""

    cell: Cell
    rows: Rows
    cuts: _Int64s
    covered: int
    """Table entries of the consumer in them: more than pages where several are hashed at once."""

    @property
    def count(self) -> int:
        """How many digests they have."""
        return int(self.cuts.size) - 1


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of a pull, in order of cell and position, and what they stand for."""

    data: bytes
    pages: int
    """Pairs of (layer and component, entry of the consumer's table) that were hashed."""
    nbytes: int


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
class PageName:
    """One page of the consumer."""

    layer: str
    component: str
    block: int
    first: int
    last: int
    """Positions of the first and the last hashed row; of a state, the tokens that it is the state of."""

    def __str__(self) -> str:
        span = f"positions {self.first} to {self.last}" if self.first != self.last else f"position {self.first}"
        return f"layer {self.layer} component {self.component} block {self.block} ({span})"


@dataclass(frozen=True, slots=True)
class Wrong:
    """The first page that is not what the producer has, and how many there are."""

    where: PageName | None
    """``None``: the producer has pages that are none here."""
    here: str
    there: str
    """The two digests, in hexadecimal."""
    count: int
    of: int

    def __str__(self) -> str:
        return (
            f"{self.where or 'a page that is none here'} is {self.here} here and {self.there} at the producer; "
            f"{self.count} of {self.of} digests differ"
        )


def can_verify(placement: Placement) -> bool:
    """Whether this rank can read its pages."""
    return all(storage.memory == "cpu" for storage in placement.storages)


def features_of(local: Local) -> tuple[str, ...]:
    """What this worker can do, as it tells its peers."""
    return tuple(one for one in FEATURES if one != FEATURE or can_verify(local.placement))


class Hashers:
    """The threads of one runtime that make digests, apart from those that make and destroy engines."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(HASHERS, thread_name_prefix="kvferry-verify")

    async def digests(self, job: Job, *, side: Side, binding: Binding) -> Digests:
        """As :func:`digests_of`, by all the threads together."""
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._pool)
        pages = await run(pages_of, job, side)
        shares = [
            pages[round(n * len(pages) / HASHERS) : round((n + 1) * len(pages) / HASHERS)] for n in range(HASHERS)
        ]
        return joined(await asyncio.gather(*(run(hash_pages, share, side, binding) for share in shares if share)))

    async def close(self) -> None:
        """Begin no more, and wait for what is under way: memory may be unmapped after this."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


def digests_of(job: Job, *, side: Side, binding: Binding) -> Digests:
    """Hash what ``side`` holds of the pages of a pull."""
    return hash_pages(pages_of(job, side), side, binding)


def hash_pages(listed: Sequence[Pages], side: Side, binding: Binding) -> Digests:
    """The digests of some cells' pages, in order."""
    found: list[bytes] = []
    nbytes = 0
    for pages in listed:
        for digest, size in _hashed(pages, side, binding):
            found.append(digest)
            nbytes += size
    return Digests(b"".join(found), sum(pages.covered for pages in listed), nbytes)


def joined(parts: Sequence[Digests]) -> Digests:
    """Digests of cells that follow each other."""
    pages, nbytes = sum(part.pages for part in parts), sum(part.nbytes for part in parts)
    return Digests(b"".join(part.data for part in parts), pages, nbytes)


def compare(job: Job, here: Digests, there: bytes) -> Wrong | None:
    """The first page of the consumer whose digest is another one at the producer; ``None`` when all are equal."""
    if here.data == there:
        return None
    ours, theirs = _split(here.data), _split(there)
    least = min(len(ours), len(theirs))
    unlike = [place for place in range(least) if ours[place] != theirs[place]]
    place = unlike[0] if unlike else least
    return Wrong(
        where=_where(job, place),
        here=ours[place].hex() if place < len(ours) else "nothing",
        there=theirs[place].hex() if place < len(theirs) else "nothing",
        count=len(unlike) + abs(len(ours) - len(theirs)),
        of=len(ours),
    )


def _where(job: Job, place: int) -> PageName | None:
    """What the digest at ``place`` is of; ``None`` past the last."""
    for pages in pages_of(job, "consumer"):
        if place < pages.count:
            first, stop = int(pages.cuts[place]), int(pages.cuts[place + 1])
            position, block = pages.rows.position, int(pages.rows.block[first])
            return PageName(*pages.cell.target.component.key, block, int(position[first]), int(position[stop - 1]))
        place -= pages.count
    return None


def _split(data: bytes) -> list[bytes]:
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]


# ------------------------------------------------------------------------------------- which pages, and their rows


def pages_of(job: Job, side: Side) -> list[Pages]:
    """All pages that are looked at, cell by cell."""
    made: list[Pages] = []
    known: dict[tuple[object, ...], tuple[Rows, _Int64s]] = {}
    cells = _cells(job)
    found = [(cell, *_rows(cell, job, side, known)) for cell in cells]
    together = _entries_together([entries for _, _, entries in found])
    for cell, rows, entries in found:
        if not entries.size:
            continue
        starts = np.flatnonzero(np.diff(entries // together, prepend=-1))
        chosen = _chosen(starts.size, cell, job.ask)
        made.append(_only(cell, rows, entries, starts, chosen))
    return made


def _cells(job: Job) -> list[Cell]:
    source, target = job.plan.producers[job.pair[0]], job.plan.consumers[job.pair[1]]
    moves = job.plan.assignment.moves.get(job.pair, ())
    cells = [Cell(source.placed[move.src], target.placed[move.dst], move) for move in moves]
    return sorted(cells, key=lambda cell: (cell.target.component.key, _coordinates(cell)))


def _coordinates(cell: Cell) -> tuple[tuple[int, int], ...]:
    return tuple((interval.start, interval.stop) for interval in cell.move.box)


def _rows(
    cell: Cell, job: Job, side: Side, known: dict[tuple[object, ...], tuple[Rows, _Int64s]]
) -> tuple[Rows, _Int64s]:
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


def _entry_of(rows: Rows, target: Component, job: Job) -> _Int64s:
    group = job.plan.consumers[job.pair[1]].groups[target.group]
    if group.kind == "state":
        return np.zeros_like(rows.position)
    first = job.request.consumer[target.group].first_token or 0
    return (rows.position - first) // group.entry_tokens


def _entries_together(found: Sequence[_Int64s]) -> int:
    """How many entries share a digest, so that not too many are sent; a power of two."""
    together = 1
    while sum(_distinct(entries // together) for entries in found) > MAX_DIGESTS:
        if together > MAX_DIGESTS * 1024:
            break  # more cells than digests: one for each cell is the least
        together *= 2
    return together


def _chosen(count: int, cell: Cell, ask: VerifyAsk) -> _Int64s:
    """Which of a cell's pages are looked at, in order."""
    if ask.every == 1:
        return np.arange(count, dtype=np.int64)
    name = repr((cell.target.component.key, _coordinates(cell))).encode()
    salt = int.from_bytes(hashlib.sha256(struct.pack("<Q", ask.seed) + name).digest()[:8], "little")
    scores = _mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt))
    wanted = -(-count // ask.every)
    return np.sort(np.argsort(scores, kind="stable")[:wanted]).astype(np.int64)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: equal on every machine and in every version of NumPy."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _only(cell: Cell, rows: Rows, entries: _Int64s, starts: _Int64s, chosen: _Int64s) -> Pages:
    """The chosen pages: their rows, one page after the other."""
    stops = np.append(starts[1:], entries.size)
    sizes = (stops - starts)[chosen]
    cuts = np.concatenate([[0], np.cumsum(sizes)])
    if chosen.size == starts.size:
        picked = np.arange(entries.size)
    else:
        picked = np.repeat(starts[chosen] - cuts[:-1], sizes) + np.arange(cuts[-1])
    taken = Rows(rows.block[picked], rows.kernel_block[picked], rows.row[picked], rows.position[picked])
    return Pages(cell, taken, cuts, _distinct(entries[picked]))


def _distinct(ordered: _Int64s) -> int:
    """How many different values there are in an array that never falls."""
    return int(np.count_nonzero(np.diff(ordered)) + 1) if ordered.size else 0


# ----------------------------------------------------------------------------------------------------- hashing them


def _hashed(pages: Pages, side: Side, binding: Binding) -> Iterator[tuple[bytes, int]]:
    """The digest of every page, with how many bytes of cache it is of."""
    cell = pages.cell
    placed = cell.source if side == "producer" else cell.target
    named = hashlib.sha256(_name(cell))
    memory = _box_of(placed, cell.move, binding)
    position = pages.rows.position
    for begin, end in _chunks(pages.cuts):
        low, high = int(pages.cuts[begin]), int(pages.cuts[end])
        chunk = slice(low, high)
        found = memory[(pages.rows.block[chunk], pages.rows.kernel_block[chunk], pages.rows.row[chunk])]
        flat = np.ascontiguousarray(found).reshape(-1)
        width = flat.size // (high - low)
        for page in range(begin, end):
            first, stop = int(pages.cuts[page]), int(pages.cuts[page + 1])
            digest = named.copy()
            digest.update(struct.pack("<qqq", position[first], position[stop - 1], stop - first))
            part = flat[(first - low) * width : (stop - low) * width]
            digest.update(part.data)
            yield digest.digest()[:DIGEST_BYTES], part.size


def _name(cell: Cell) -> bytes:
    component = cell.target.component
    axes = [axis.name for axis in component.global_axes]
    return repr(("kvferry.page/1", *component.key, component.content.type, axes, _coordinates(cell))).encode()


def _box_of(placed: Placed, move: Move, binding: Binding) -> NDArray[np.uint8]:
    """The memory of a cell as ``[block, kernel block, row, *coordinates of the box, content byte]``."""
    component = placed.component
    cells = cells_of(component, binding.bases[placed.storage] + component.address)
    inner = tuple(
        slice(interval.start - axis.start, interval.stop - axis.start)
        for axis, interval in zip(component.global_axes, move.box, strict=True)
    )
    return cells[(slice(None), slice(None), slice(None), *inner)]


def _chunks(cuts: _Int64s) -> Iterator[tuple[int, int]]:
    """Runs of pages with not too many rows together."""
    begin, last = 0, int(cuts.size) - 1
    while begin < last:
        end = int(np.searchsorted(cuts, cuts[begin] + _CHUNK_ROWS, side="right")) - 1
        end = min(max(end, begin + 1), last)
        yield begin, end
        begin = end
