"""What a right plan may and must write, from layouts and a request given as plain JSON dictionaries.

First the layouts are judged alone, then in pairs, then with the request; every reason to refuse is collected, since any
one of them may be given. What is left is, for each consumer, a map from destination address to byte of the model, and
for each row the producers that may send it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from kvferry.testing.oracle_layout import (
    Coordinates,
    File,
    Group,
    MalformedError,
    Part,
    file_faults,
    read_file,
    read_memory,
)
from kvferry.testing.oracle_request import (
    Cell,
    Findings,
    Request,
    have_positions,
    held_rows,
    is_needed,
    judge_overlay,
    judge_tables,
    read_request,
    unlisted_needed,
)

Json = Mapping[str, object]
Byte = tuple[Cell, int]
"""One byte of the model: a cell and the offset in its content."""

Regions = tuple[tuple[int, int], ...]
"""``[first, past the last)`` of each registered region."""


@dataclass(frozen=True, slots=True)
class Refusal:
    reasons: frozenset[str]
    """Any one of them may be given."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Who may send a cell to one consumer."""

    allowed: frozenset[int]
    preferred: int
    """Replica ``k mod n`` where the holders of exactly this cell are taken as the set; used by ``strict`` checks."""


@dataclass(slots=True)
class Target:
    """What one consumer may find in its memory afterwards."""

    required: dict[int, Byte] = field(default_factory=dict)
    carriable: dict[int, Byte] = field(default_factory=dict)
    group: dict[int, int] = field(default_factory=dict)
    """Consumer group of each of these addresses."""
    serves: dict[Cell, Serve] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expectation:
    targets: tuple[Target, ...]
    sources: tuple[dict[int, Byte], ...]
    """Of each producer: address -> byte, for all listed blocks."""
    producer_regions: tuple[Regions, ...]
    consumer_regions: tuple[Regions, ...]
    tolerated: frozenset[str]
    """Reasons with which another reading of the contract would refuse: such a refusal is accepted too."""

    def addresses_of(self, producer: int, byte: Byte) -> list[int]:
        return [address for address, held in self.sources[producer].items() if held == byte]


def expect(producers: Sequence[Json], consumers: Sequence[Json], request: Json) -> Refusal | Expectation:
    found = Findings(set(), set())
    sides = [_read_side(producers, found), _read_side(consumers, found)]
    asked = _read_request(request, found)
    overlaid = [_judge_memory(side, found) for side in sides]
    if all(sides):
        _judge_pair(sides[0], sides[1], found)
    told = asked is not None and all(sides)
    if asked is not None:
        for files, tables, pairs in zip(sides, (asked.producer, asked.consumer), overlaid, strict=True):
            if files:
                judge_tables(files, tables, found)
                told = told and have_positions(files[0].groups, tables)
                if len(tables) == len(files[0].groups):
                    judge_overlay(files, pairs, tables, found)
    # Positions mean nothing in a layout that contradicts itself, nor in a table that begins inside an entry.
    if asked is None or not told or "invalid-layout" in found.faults:
        return Refusal(frozenset(found.faults | found.unsure))
    expectation = _expectation(sides[0], sides[1], asked, found)
    if found.faults:
        return Refusal(frozenset(found.faults | found.unsure))
    return expectation


def _read_side(values: Sequence[Json], found: Findings) -> list[File]:
    """The files of one side, or none where they cannot be judged together."""
    files = []
    for value in values:
        try:
            file = read_file(value)
        except MalformedError:
            found.faults.add("invalid-layout")
            continue
        found.faults |= file_faults(file)
        if any(part.lacks_rows or part.lacks_stride for part in file.parts):
            found.unsure.add("invalid-layout")
        files.append(file)
    if len(files) < len(values):
        return []
    if len({tuple(group.shape() for group in file.groups) for file in files}) > 1:
        found.faults.add("invalid-layout")
        if len({len(file.groups) for file in files}) > 1:
            return []
    return files


def _read_request(value: Json, found: Findings) -> Request | None:
    try:
        return read_request(value)
    except MalformedError:
        found.faults.add("invalid-request")
        return None


def _judge_memory(files: Sequence[File], found: Findings) -> set[tuple[int, int]]:
    overlaid: set[tuple[int, int]] = set()
    for file in files:
        memory = read_memory(file)
        found.faults |= memory.faults
        found.unsure |= memory.unsure
        overlaid |= memory.overlaid
    return overlaid


# ------------------------------------------------------------------------------------- what the layouts alone decide


def _compatible(mine: Part, theirs: Part, my_file: File, their_file: File) -> bool:
    def said(part: Part, file: File) -> tuple[object, ...]:
        group = file.groups[part.group]
        axes = sorted((axis.name, axis.total) for axis in part.axes if axis.name != "token")
        content = (part.nbytes, part.content_type, part.row_tokens)
        return (content, axes, group.kind, group.window, group.chunk)

    return said(mine, my_file) == said(theirs, their_file)


def _judge_pair(producers: Sequence[File], consumers: Sequence[File], found: Findings) -> None:
    layers = {part.layer for file in producers for part in file.parts}
    for consumer in consumers:
        for part in consumer.parts:
            held = [(file, other) for file in producers if (other := file.part(part.key)) is not None]
            if not held:
                if not part.optional:
                    found.faults.add("missing-layer")
                    if part.layer in layers:
                        # The layer is there and one of its components is not: it misses "the component's coordinates".
                        found.faults.add("missing-coordinates")
                continue
            if not all(_compatible(part, other, consumer, file) for file, other in held):
                found.faults.add("incompatible-content")
            elif not {c for _, other in held for c in other.coordinates()} >= set(part.coordinates()):
                found.faults.add("missing-coordinates")
            elif len({_dealt(file.groups[other.group]) for file, other in held}) > 1:
                # Right in principle: producers that deal the positions of one component out in several ways.
                found.unsure |= {"unsupported", "missing-coordinates", "missing-positions"}
            elif _rings_missing(part, consumer, held):
                # Coordinates are all there, but no file has some positions (a context parallel rank is absent). It
                # matters only when such a position is needed, which is then ``missing-positions``.
                found.unsure |= {"missing-coordinates", "missing-positions"}


def _dealt(group: Group) -> tuple[int, int] | None:
    return (group.ring.size, group.ring.interleave) if group.ring else None


def _period(part: Part, consumer: File, held: Sequence[tuple[File, Part]]) -> range:
    """First positions of rows over one period of all context parallel interleavings."""
    rings = [consumer.groups[part.group].ring, *(file.groups[other.group].ring for file, other in held)]
    return range(0, lcm(part.row_tokens, *(r.size * r.interleave for r in rings if r)), part.row_tokens)


def _holders(
    where: Coordinates, position: int | None, producers: Sequence[File], key: tuple[str, str]
) -> tuple[int, ...]:
    """Producers whose layout holds the coordinates, and the position unless it is None, whatever their tables list."""
    found = []
    for index, file in enumerate(producers):
        part = file.part(key)
        if part is None:
            continue
        group = file.groups[part.group]
        ring_holds = position is None or group.kind == "state" or group.holds(position)
        if ring_holds and _inside(where, part):
            found.append(index)
    return tuple(found)


def _inside(where: Coordinates, part: Part) -> bool:
    box = part.box()
    if [name for name, _, _ in box] != [name for name, _ in where]:
        return False
    return all(start <= x < start + count for (_, start, count), (_, x) in zip(box, where, strict=True))


def _rings_missing(part: Part, consumer: File, held: Sequence[tuple[File, Part]]) -> bool:
    files = [file for file, _ in held]
    group = consumer.groups[part.group]
    positions = [p for p in _period(part, consumer, held) if group.holds(p)]
    return any(not _holders(where, p, files, part.key) for where in part.coordinates() for p in positions)


class Replicas:
    """The rule "the k-th consumer that needs a byte of a set of equal replicas reads from replica k mod n".

    ``exact`` takes as a set the holders of one cell; ``equal`` takes producers with equal boxes. They differ only
    where producers overlap in part, and there any holder is accepted.
    """

    def __init__(self, producers: Sequence[File], consumers: Sequence[File]) -> None:
        self._producers = producers
        self._exact: dict[tuple[int, ...], list[int]] = {}
        self._equal: dict[tuple[int, ...], list[int]] = {}
        self._holders: dict[tuple[tuple[str, str], Coordinates, int], tuple[int, ...]] = {}
        for index, consumer in enumerate(consumers):
            for part in consumer.parts:
                self._count(index, part, consumer)

    def _count(self, index: int, part: Part, consumer: File) -> None:
        held = [(file, other) for file in self._producers if (other := file.part(part.key)) is not None]
        positions = [p for p in _period(part, consumer, held) if consumer.groups[part.group].holds(p)]
        for where in part.coordinates():
            for position in positions:
                holders = self.holders(part.key, where, position)
                if holders:
                    _note(self._exact, holders, index)
                for holder in holders:
                    _note(self._equal, self._twins(part.key, holder, holders), index)

    def holders(self, key: tuple[str, str], where: Coordinates, position: int) -> tuple[int, ...]:
        memo = (key, where, position)
        if memo not in self._holders:
            self._holders[memo] = _holders(where, position, self._producers, key)
        return self._holders[memo]

    def _twins(self, key: tuple[str, str], one: int, holders: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(other for other in holders if self._box(key, other) == self._box(key, one))

    def _box(self, key: tuple[str, str], producer: int) -> tuple[tuple[str, int, int], ...]:
        part = self._producers[producer].part(key)
        return part.box() if part else ()

    def coordinates_known(self, cell: Cell) -> bool:
        """Whether some producer file holds the coordinates, at this position or at others."""
        return bool(_holders(cell[2], None, self._producers, (cell[0], cell[1])))

    def serve(self, consumer: int, cell: Cell) -> Serve:
        """For a cell that some producer holds."""
        key = (cell[0], cell[1])
        # The period repeats: any position tells as well as any other of the same phase.
        holders = self.holders(key, cell[2], cell[3])
        exact = _turn(holders, self._exact[holders], consumer)
        if self._twins(key, holders[0], holders) != holders:
            return Serve(frozenset(holders), exact)
        return Serve(frozenset({exact, _turn(holders, self._equal[holders], consumer)}), exact)


def _note(counts: dict[tuple[int, ...], list[int]], replicas: tuple[int, ...], consumer: int) -> None:
    needing = counts.setdefault(replicas, [])
    if consumer not in needing:
        needing.append(consumer)


def _turn(replicas: tuple[int, ...], needing: list[int], consumer: int) -> int:
    return replicas[needing.index(consumer) % len(replicas)]


# ----------------------------------------------------------------------------------------- what the request decides


def _expectation(
    producers: Sequence[File], consumers: Sequence[File], request: Request, found: Findings
) -> Expectation:
    held: set[Cell] = set()
    sources: list[dict[int, Byte]] = []
    for file in producers:
        source: dict[int, Byte] = {}
        for part, cell, address, _ in held_rows(file, request.producer, request.stop):
            held.add(cell)
            for offset in range(part.nbytes):
                source[address + offset] = (cell, offset)
        sources.append(source)
    replicas = Replicas(producers, consumers)
    targets = []
    for index, file in enumerate(consumers):
        _judge_blocks(file, producers, request, found)
        targets.append(_target(index, file, request, held=held, replicas=replicas, found=found))
    return Expectation(
        tuple(targets),
        tuple(sources),
        tuple(file.regions for file in producers),
        tuple(file.regions for file in consumers),
        frozenset(found.unsure),
    )


def _judge_blocks(file: File, producers: Sequence[File], request: Request, found: Findings) -> None:
    """A listed block that a moved component does not have."""
    for part in file.parts:
        moved = any(producer.part(part.key) for producer in producers)
        table = request.consumer[part.group]
        if moved and unlisted_needed(part, file.groups[part.group], table, request):
            found.faults.add("invalid-request")


def _target(
    index: int, file: File, request: Request, *, held: set[Cell], replicas: Replicas, found: Findings
) -> Target:
    target = Target()
    rows = []
    busy = set()
    """(component, entry) with a required row."""
    for part, cell, address, entry in held_rows(file, request.consumer, request.stop):
        needed = is_needed(part, file.groups[part.group], request, cell)
        if needed and cell not in held and replicas.coordinates_known(cell):
            found.faults.add("missing-positions")
        if needed:
            busy.add((part.key, entry))
        rows.append((part, cell, address, entry, needed))
    for part, cell, address, entry, needed in rows:
        carried = cell[3] >= request.start and (part.key, entry) in busy
        if cell in held and (needed or carried):
            target.serves[cell] = replicas.serve(index, cell)
            _put(target, part, cell, address, needed=needed)
    return target


def _put(target: Target, part: Part, cell: Cell, address: int, *, needed: bool) -> None:
    bytes_of = target.required if needed else target.carriable
    for offset in range(part.nbytes):
        bytes_of[address + offset] = (cell, offset)
        target.group[address + offset] = part.group
