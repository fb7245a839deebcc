"""Layout files as the oracle reads them: plain records, plain loops, nothing taken from ``kvferry.layout``.

``read_file`` turns one JSON dictionary into records or raises ``MalformedError``. ``file_faults`` judges what only
shows when numbers are put together (a token axis that does not fill its block, two bytes in one place). Memory is
judged by visiting every byte of every block, so keep layouts small: this is a yardstick, not a tool.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product

LIMIT = 2**63
MAX_BYTES = 8_000_000
"""Above this many bytes a component is not visited; see ``read_memory``."""

Coordinates = tuple[tuple[str, int], ...]
"""Sorted (axis name, coordinate) of all axes but ``token``."""


class MalformedError(Exception):
    """Not the shape that the contract asks for: nothing further can be judged."""


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    start: int
    count: int
    total: int
    stride: int


@dataclass(frozen=True, slots=True)
class Ring:
    """``context_parallel`` of a group; one rank of one when the file has none."""

    rank: int
    size: int
    interleave: int


@dataclass(frozen=True, slots=True)
class Group:
    kind: str
    block_tokens: int
    window: int | None
    chunk: int | None
    ring: Ring | None

    @property
    def span(self) -> int:
        """Consecutive positions covered by one table entry."""
        return self.block_tokens * (self.ring.size if self.ring else 1)

    def shape(self) -> tuple[object, ...]:
        """What must be equal in all files of one side."""
        ring = (self.ring.size, self.ring.interleave) if self.ring else None
        return (self.kind, self.block_tokens, self.window, self.chunk, ring)

    def position(self, entry_start: int, index: int) -> int:
        """Global position of the ``index``-th rank-local position of an entry."""
        if self.ring is None:
            return entry_start + index
        turn, within = divmod(index, self.ring.interleave)
        return entry_start + (turn * self.ring.size + self.ring.rank) * self.ring.interleave + within

    def holds(self, position: int) -> bool:
        if self.ring is None:
            return True
        return (position // self.ring.interleave) % self.ring.size == self.ring.rank


@dataclass(frozen=True, slots=True)
class Part:
    """One component."""

    layer: str
    name: str
    group: int
    address: int
    num_blocks: int
    block_stride: int
    kernel_blocks: int
    kernel_stride: int
    row_tokens: int
    axes: tuple[Axis, ...]
    nbytes: int
    content_type: str
    optional: bool
    lacks_rows: bool = False
    """A state whose file does not say that it has one kernel block of one row."""
    lacks_stride: bool = False
    """One kernel block, and a stride of 0 to the next, which there is not: either reading is accepted."""

    @property
    def key(self) -> tuple[str, str]:
        return (self.layer, self.name)

    def token_axes(self) -> list[Axis]:
        return [axis for axis in self.axes if axis.name == "token"]

    def box(self) -> tuple[tuple[str, int, int], ...]:
        """Sorted (axis, start, count) of the global axes."""
        return tuple(sorted((a.name, a.start, a.count) for a in self.axes if a.name != "token"))

    def coordinates(self) -> list[Coordinates]:
        """Every combination of global coordinates held."""
        ranges = [[(name, start + i) for i in range(count)] for name, start, count in self.box()]
        return [tuple(choice) for choice in product(*ranges)]

    def volume(self) -> int:
        size = self.num_blocks * self.kernel_blocks * self.nbytes
        for axis in self.axes:
            size *= axis.count
        return size

    def last_byte(self) -> int:
        last = self.address + (self.num_blocks - 1) * self.block_stride
        last += (self.kernel_blocks - 1) * self.kernel_stride + self.nbytes - 1
        for axis in self.axes:
            last += (axis.count - 1) * axis.stride
        return last

    def rows(self, block: int) -> Iterator[tuple[int, Coordinates, int]]:
        """(rank-local position index of the row in the block, coordinates, address of its first content byte)."""
        steps = [[(a, i) for i in range(a.count)] for a in self.axes]
        for kernel in range(self.kernel_blocks):
            start = self.address + block * self.block_stride + kernel * self.kernel_stride
            for choice in product(*steps):
                address, row, rows = start, 0, 0
                where: list[tuple[str, int]] = []
                for axis, i in choice:
                    address += i * axis.stride
                    if axis.name == "token":
                        row, rows = i, axis.count
                    else:
                        where.append((axis.name, axis.start + i))
                yield (kernel * rows + row) * self.row_tokens, tuple(sorted(where)), address


@dataclass(frozen=True, slots=True)
class File:
    regions: tuple[tuple[int, int], ...]
    """``[first, past the last)``."""
    groups: tuple[Group, ...]
    parts: tuple[Part, ...]
    memories: tuple[str, ...] = ()
    """Of each region."""

    def part(self, key: tuple[str, str]) -> Part | None:
        return next((part for part in self.parts if part.key == key), None)


# ---------------------------------------------------------------------------------------------------------- reading


def fields(value: object, needed: set[str], allowed: set[str] | None = None) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise MalformedError(f"not an object: {value!r}")
    names = set(value)
    if needed - names or names - needed - (allowed or set()):
        raise MalformedError(f"fields {sorted(map(str, names))}")
    return value


def integer(value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < LIMIT:
        raise MalformedError(f"not an integer from {least}: {value!r}")
    return value


def items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise MalformedError(f"not a list: {value!r}")
    return value


def text(value: object) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"not a string: {value!r}")
    return value


def _maybe(value: object) -> int | None:
    return None if value is None else integer(value, 1)


def _region(value: object) -> tuple[int, int]:
    got = fields(value, {"address", "nbytes"}, {"memory"})
    memory = text(got.get("memory", "cpu"))
    if memory != "cpu" and not (memory.startswith("cuda:") and memory[5:].isdigit()):
        raise MalformedError(f"memory {memory}")
    first = integer(got["address"], 0)
    return first, first + integer(got["nbytes"], 1)


def _ring(value: object) -> Ring | None:
    if value is None:
        return None
    got = fields(value, {"rank", "size", "interleave"})
    return Ring(integer(got["rank"], 0), integer(got["size"], 1), integer(got["interleave"], 1))


def _group(value: object) -> Group:
    got = fields(value, {"kind", "block_tokens"}, {"sliding_window", "chunk", "context_parallel"})
    kind = text(got["kind"])
    if kind not in ("attention", "state"):
        raise MalformedError(f"kind {kind}")
    window, chunk = _maybe(got.get("sliding_window")), _maybe(got.get("chunk"))
    return Group(kind, integer(got["block_tokens"], 1), window, chunk, _ring(got.get("context_parallel")))


def _axis(value: object) -> Axis:
    got = fields(value, {"name", "start", "count", "total", "stride"})
    start, count = integer(got["start"], 0), integer(got["count"], 1)
    return Axis(text(got["name"]), start, count, integer(got["total"], 1), integer(got["stride"], 1))


_PART = {"layer", "layer_index", "component", "group", "address", "num_blocks", "block_stride"}
_PART |= {"kernel_blocks", "kernel_stride", "tokens_per_row", "axes", "content"}


_OF_ROWS = {"kernel_blocks", "kernel_stride", "tokens_per_row"}
"""Of these a state has none, so a file may be thought complete without them: either reading is accepted."""


def _part(value: object) -> Part:
    got = fields(value, _PART - _OF_ROWS, {"optional", *_OF_ROWS})
    content = fields(got["content"], {"nbytes", "type"})
    optional = got.get("optional", False)
    if not isinstance(optional, bool):
        raise MalformedError(f"optional {optional!r}")
    integer(got["layer_index"], 0)
    return Part(
        layer=text(got["layer"]),
        name=text(got["component"]),
        group=integer(got["group"], 0),
        address=integer(got["address"], 0),
        num_blocks=integer(got["num_blocks"], 1),
        block_stride=integer(got["block_stride"], 1),
        kernel_blocks=integer(got.get("kernel_blocks", 1), 1),
        kernel_stride=integer(got.get("kernel_stride", 1), 0),
        row_tokens=integer(got.get("tokens_per_row", 1), 1),
        axes=tuple(_axis(axis) for axis in items(got["axes"])),
        nbytes=integer(content["nbytes"], 1),
        content_type=text(content["type"]),
        optional=optional,
        lacks_rows=not got.keys() >= _OF_ROWS,
        lacks_stride=got.get("kernel_stride") == 0,
    )


_PARALLEL = {"tp_rank", "tp_size", "pp_rank", "pp_size", "pcp_rank", "pcp_size"}


def read_file(value: object) -> File:
    got = fields(value, {"format", "engine_id", "parallel", "regions", "groups", "components"})
    if got["format"] != "kvferry.layout/1":
        raise MalformedError(f"format {got['format']!r}")
    text(got["engine_id"])
    for number in fields(got["parallel"], _PARALLEL).values():
        integer(number, 0)
    regions = tuple(_region(region) for region in items(got["regions"]))
    groups = tuple(_group(group) for group in items(got["groups"]))
    parts = tuple(_part(part) for part in items(got["components"]))
    for part in parts:
        if part.group >= len(groups):
            raise MalformedError(f"{part.key} is in group {part.group} of {len(groups)}")
        if part.lacks_rows and groups[part.group].kind != "state":
            raise MalformedError(f"{part.key} lacks one of {sorted(_OF_ROWS)}")
        if part.lacks_stride and part.kernel_blocks > 1:
            raise MalformedError(f"{part.key}: {part.kernel_blocks} kernel blocks at one place")
    if not regions:
        raise MalformedError("a placement: no regions")
    memories = tuple(str(region.get("memory", "cpu")) for region in items(got["regions"]) if isinstance(region, dict))
    return File(regions, groups, parts, memories)


# ---------------------------------------------------------------------------------------------------------- judging


def file_faults(file: File) -> set[str]:
    """Reasons for which this file alone is refused."""
    faults: set[str] = set()
    ordered = sorted(file.regions)
    if any(first[1] > second[0] for first, second in pairwise(ordered)):
        # "disjoint" is said under regions, and overlap is also a matter of memory: either name is right.
        faults |= {"overlapping-memory", "invalid-layout"}
    if any(_bad_group(group) for group in file.groups):
        faults.add("invalid-layout")
    if len({part.key for part in file.parts}) < len(file.parts):
        faults.add("invalid-layout")
    if any(_bad_part(part, file.groups[part.group]) for part in file.parts):
        faults.add("invalid-layout")
    return faults


def _bad_group(group: Group) -> bool:
    if group.ring is None:
        return False
    if group.kind == "state" or group.ring.rank >= group.ring.size:
        return True
    return group.block_tokens % group.ring.interleave != 0


def _bad_part(part: Part, group: Group) -> bool:
    names = [axis.name for axis in part.axes]
    if len(set(names)) < len(names) or any(a.start + a.count > a.total for a in part.axes):
        return True
    token = part.token_axes()
    if group.kind == "state":
        return bool(token) or part.kernel_blocks != 1
    if len(token) != 1 or token[0].start != 0 or token[0].count != token[0].total:
        return True
    if group.ring is not None and group.ring.interleave % part.row_tokens:
        return True
    return token[0].count * part.row_tokens * part.kernel_blocks != group.block_tokens


@dataclass(frozen=True, slots=True)
class Memory:
    """What visiting every byte of one file showed."""

    faults: frozenset[str]
    unsure: frozenset[str]
    """Reasons that a stricter reading of the contract would give."""
    overlaid: frozenset[tuple[int, int]]
    """Pairs of groups that share at least one byte."""


def read_memory(file: File) -> Memory:
    faults: set[str] = set()
    unsure: set[str] = set()
    owners: dict[int, list[tuple[int, int]]] = {}
    pairs: set[tuple[int, int]] = set()
    for index, part in enumerate(file.parts):
        covered = _covered(part.address, part.last_byte() + 1, file.regions)
        if part.last_byte() >= LIMIT:
            # "All integers are below 2^63" may be said of the addresses that follow from them, too.
            unsure.add("invalid-layout")
        if part.volume() > MAX_BYTES:
            if covered:
                raise ValueError(f"{part.key} has {part.volume()} bytes: too many for the oracle")
            faults.add("outside-region")
            unsure.add("overlapping-memory")
            continue
        if not covered:
            # Bytes may still all lie in regions, with an unregistered gap where the component has padding. The
            # contract says "every component lies in the registered regions": read by bytes here, by range by some.
            unsure.add("outside-region")
        if len(_memories(part, file)) > 1:
            # Half in host memory and half on an accelerator: right in principle, and nothing that an engine has.
            unsure.add("unsupported")
        for block in range(part.num_blocks):
            for _, _, address in part.rows(block):
                if not _covered(address, address + part.nbytes, file.regions):
                    faults.add("outside-region")
                for byte in range(address, address + part.nbytes):
                    held = owners.setdefault(byte, [])
                    for other, other_block in held:
                        mine, theirs = part.group, file.parts[other].group
                        if other == index or mine == theirs or block != other_block:
                            faults.add("overlapping-memory")
                        else:
                            pairs.add((min(mine, theirs), max(mine, theirs)))
                    held.append((index, block))
    return Memory(frozenset(faults), frozenset(unsure), frozenset(pairs))


def _memories(part: Part, file: File) -> set[str]:
    """The kinds of memory that the range of ``part`` meets."""
    regions = zip(file.regions, file.memories, strict=True)
    return {memory for (first, stop), memory in regions if first <= part.last_byte() and part.address < stop}


def _covered(first: int, stop: int, regions: tuple[tuple[int, int], ...]) -> bool:
    """Whether every byte of ``[first, stop)`` lies in a region; touching regions may share the job."""
    at = first
    for low, high in sorted(regions):
        if low <= at < high:
            at = high
    return at >= stop


def clusters(file: File) -> list[set[int]]:
    """Sets of groups whose components' address ranges overlap, directly or through others."""
    sets: list[tuple[set[int], list[tuple[int, int]]]] = []
    for part in file.parts:
        mine: set[int] = {part.group}
        ranges = [(part.address, part.last_byte())]
        rest = []
        for groups, taken in sets:
            if any(a <= part.last_byte() and part.address <= b for a, b in taken):
                mine |= groups
                ranges += taken
            else:
                rest.append((groups, taken))
        sets = [*rest, (mine, ranges)]
    return [groups for groups, _ in sets]
