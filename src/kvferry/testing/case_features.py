"""Which features of the contract occur in a case, for the table of a fuzz run: what never occurs is not tested.

Layouts and requests that are malformed count only as their refusal. All is read from the case itself, not from how it
was drawn, so the table is right for cases from anywhere.
"""

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

from kvferry.testing.oracle_expect import Expectation, Json, Refusal, expect
from kvferry.testing.oracle_layout import (
    MAX_BYTES,
    File,
    Group,
    MalformedError,
    Part,
    clusters,
    read_file,
    read_memory,
)
from kvferry.testing.oracle_request import Request, lowest_needed, read_request

REASONS = (
    "invalid-layout",
    "invalid-request",
    "overlapping-memory",
    "outside-region",
    "duplicate-blocks",
    "incompatible-content",
    "missing-layer",
    "missing-coordinates",
    "missing-positions",
)


class Sides:
    """A readable case."""

    def __init__(self, producers: Sequence[Json], consumers: Sequence[Json], request: Json) -> None:
        self.producers = [read_file(file) for file in producers]
        self.consumers = [read_file(file) for file in consumers]
        self.request: Request = read_request(request)
        self._overlaid: list[set[tuple[int, int]]] | None = None

    @property
    def files(self) -> list[File]:
        return [*self.producers, *self.consumers]

    def parts(self) -> list[Part]:
        return [part for file in self.files for part in file.parts]

    def overlaid(self) -> list[set[tuple[int, int]]]:
        """Of each file, the pairs of groups that share bytes."""
        if self._overlaid is None:
            # One group cannot overlay; visiting every byte is slow.
            self._overlaid = [set(read_memory(file).overlaid) if len(file.groups) > 1 else set() for file in self.files]
        return self._overlaid

    def tables(self) -> list[tuple[Group, tuple[int | None, ...], int | None, bool]]:
        """(group, blocks, first token, whether it is the producer's)."""
        rows = []
        for files, tables, producer in (
            (self.producers, self.request.producer, True),
            (self.consumers, self.request.consumer, False),
        ):
            for group, table in zip(files[0].groups, tables, strict=False):
                rows.append((group, table.blocks, table.first_token, producer))
        return rows

    def pairs(self) -> list[tuple[Part, Group, Part, Group]]:
        """Every component that a consumer and a producer share, with their groups."""
        return [
            (mine, consumer.groups[mine.group], theirs, producer.groups[theirs.group])
            for consumer in self.consumers
            for mine in consumer.parts
            for producer in self.producers
            if (theirs := producer.part(mine.key)) is not None
        ]


def features_of(
    producers: Sequence[Json],
    consumers: Sequence[Json],
    request: Json,
    *,
    expected: Refusal | Expectation | None = None,
) -> set[str]:
    expected = expected or expect(producers, consumers, request)
    if isinstance(expected, Refusal):
        found = {f"refused: {reason}" for reason in expected.reasons if reason in REASONS} | {"refused"}
    else:
        found = _outcome(expected)
    try:
        sides = Sides(producers, consumers, request)
    except MalformedError:
        return found
    if any(part.volume() > MAX_BYTES for part in sides.parts()):
        return found
    return found | {name for name, occurs in _TESTS.items() if occurs(sides)}


def _outcome(expected: Expectation) -> set[str]:
    found = {"planned"}
    if any(target.required for target in expected.targets):
        found.add("bytes to move")
    else:
        found.add("nothing to move")
    if any(target.carriable for target in expected.targets):
        found.add("rows that may be carried")
    if any(len(serve.allowed) > 1 for target in expected.targets for serve in target.serves.values()):
        found.add("holders that overlap only in part")
    return found


# ----------------------------------------------------------------------------------------------- ranks and coordinates


def _twins(files: Sequence[File], same: Callable[[Part, Part, Group, Group], bool]) -> bool:
    for one, other in combinations(files, 2):
        for part in one.parts:
            twin = other.part(part.key)
            if twin is not None and same(part, twin, one.groups[part.group], other.groups[twin.group]):
                return True
    return False


def _equal(a: Part, b: Part, g: Group, h: Group) -> bool:
    return a.box() == b.box() and g.ring == h.ring


def _unequal(a: Part, b: Part, _g: Group, _h: Group) -> bool:
    return [n for _, _, n in a.box()] != [n for _, _, n in b.box()]


def _partly(a: Part, b: Part, _g: Group, _h: Group) -> bool:
    shared = set(a.coordinates()) & set(b.coordinates())
    return bool(shared) and a.box() != b.box()


def _sharded(sides: Sides) -> bool:
    return any(axis.count < axis.total for part in sides.parts() for axis in part.axes)


def _stages(files: Sequence[File]) -> bool:
    return len({frozenset(part.layer for part in file.parts) for file in files}) > 1


def _missing_on_consumer(sides: Sides) -> bool:
    held = {part.key for file in sides.producers for part in file.parts}
    return bool(held - {part.key for file in sides.consumers for part in file.parts})


def _optional_absent(sides: Sides) -> bool:
    held = {part.key for file in sides.producers for part in file.parts}
    return any(part.optional and part.key not in held for file in sides.consumers for part in file.parts)


# -------------------------------------------------------------------------------------------------------------- memory


def _dims(part: Part) -> list[tuple[int, int]]:
    """(stride, count) of every dimension with more than one step, from the innermost."""
    dims = [(part.block_stride, part.num_blocks), (part.kernel_stride, part.kernel_blocks)]
    dims += [(axis.stride, axis.count) for axis in part.axes]
    return sorted(dim for dim in dims if dim[1] > 1)


def _padding(part: Part) -> bool:
    return part.last_byte() + 1 - part.address > part.volume()


def _padded_kernel(part: Part) -> bool:
    rows = part.nbytes
    for axis in part.axes:
        rows *= axis.count
    inside = all(axis.stride < part.kernel_stride for axis in part.axes)
    return part.kernel_blocks > 1 and inside and part.kernel_stride > rows


def _interleaved(part: Part) -> bool:
    extent = part.nbytes
    for stride, count in _dims(part):
        if stride < extent:
            return True
        extent += (count - 1) * stride
    return False


def _block_inside(part: Part) -> bool:
    return part.num_blocks > 1 and any(a.count > 1 and a.stride > part.block_stride for a in part.axes)


def _strides(part: Part, outer: str, *, inner: str) -> bool:
    found = {axis.name: axis for axis in part.axes if axis.count > 1}
    return outer in found and inner in found and found[outer].stride > found[inner].stride


def _packed(file: File) -> bool:
    """Two components of one group in one row of blocks."""
    return any(
        a.group == b.group
        and a.block_stride == b.block_stride
        and abs(a.address - b.address) < a.block_stride
        and a.num_blocks > 1
        for a, b in combinations(file.parts, 2)
    )


def _shared_rows(sides: Sides) -> bool:
    """Groups whose ranges overlap while no byte does."""
    for file, overlaid in zip(sides.files, sides.overlaid(), strict=True):
        near = {(a, b) for cluster in clusters(file) for a in cluster for b in cluster if a < b}
        if near - overlaid:
            return True
    return False


def _touching(file: File) -> bool:
    return bool({stop for _, stop in file.regions} & {first for first, _ in file.regions})


def _memories_touch(file: File) -> bool:
    """Two regions follow each other and are not of one memory."""
    ordered = sorted(zip(file.regions, file.memories, strict=True))
    return any(one[1] == other[0] and a != b for (one, a), (other, b) in pairwise(ordered))


def _regions_of(part: Part, file: File) -> int:
    return sum(first <= part.last_byte() and part.address < stop for first, stop in file.regions)


def _row_over_seam(file: File) -> bool:
    seams = {stop for _, stop in file.regions} & {first for first, _ in file.regions}
    return bool(seams) and any(
        address < seam < address + part.nbytes
        for part in file.parts
        for block in range(part.num_blocks)
        for _, _, address in part.rows(block)
        for seam in seams
    )


def _gap_inside(file: File) -> bool:
    def gap(part: Part) -> bool:
        inside = [r for r in sorted(file.regions) if r[0] <= part.last_byte() and part.address < r[1]]
        return any(a[1] < b[0] for a, b in pairwise(inside))

    return any(gap(part) for part in file.parts)


# -------------------------------------------------------------------------------------------------------------- tables


def _attention(sides: Sides) -> list[tuple[Group, tuple[int | None, ...], int, bool]]:
    return [(g, b, f, p) for g, b, f, p in sides.tables() if g.kind == "attention" and f is not None]


def _states(sides: Sides) -> list[tuple[tuple[int | None, ...], int | None]]:
    return [(blocks, first) for group, blocks, first, _ in sides.tables() if group.kind == "state"]


def _sections(file: File) -> bool:
    return any(part.name.startswith("conv.") and part.name != "conv.q" for part in file.parts)


def _consecutive(sides: Sides) -> bool:
    return any(a is not None and b == a + 1 for _, blocks, _, _ in sides.tables() for a, b in pairwise(blocks))


def _scattered(sides: Sides) -> bool:
    return any(
        a is not None and b is not None and b != a + 1
        for _, blocks, _, _ in sides.tables()
        for a, b in pairwise(blocks)
    )


def _groups_differ(sides: Sides) -> bool:
    def sharing(files: Sequence[File]) -> set[frozenset[str]]:
        members: dict[int, set[str]] = {}
        for file in files:
            for part in file.parts:
                members.setdefault(part.group, set()).add(part.layer)
        return {frozenset(layers) for layers in members.values()}

    return sharing(sides.producers) != sharing(sides.consumers)


def _rings(files: Sequence[File]) -> bool:
    return any(group.ring for file in files for group in file.groups)


def _ring_sizes_differ(sides: Sides) -> bool:
    return any(g.ring and h.ring and g.ring.size != h.ring.size for _, g, _, h in sides.pairs())


def _interleaves_differ(sides: Sides) -> bool:
    return any(g.ring and h.ring and g.ring.interleave != h.ring.interleave for _, g, _, h in sides.pairs())


def _cut(sides: Sides, name: str) -> bool:
    """A window or chunk that leaves out positions after ``start``."""
    request = sides.request
    return any(
        getattr(group, name) is not None and lowest_needed(group, request) > request.start
        for group, _, _, _ in sides.tables()
    )


def _unaligned(sides: Sides, position: int) -> bool:
    return any(position % group.span for group, _, _, _ in _attention(sides))


def _lookahead(sides: Sides, *, producer: bool) -> bool:
    return any(
        side is producer and first + (len(blocks) - 1) * group.span >= sides.request.stop and blocks
        for group, blocks, first, side in _attention(sides)
    )


_TESTS: dict[str, Callable[[Sides], bool]] = {
    "sharded axis": _sharded,
    "replicas among producers": lambda s: _twins(s.producers, _equal),
    "replicas among consumers": lambda s: _twins(s.consumers, _equal),
    "unequal split of producers": lambda s: _twins(s.producers, _unequal),
    "unequal split of consumers": lambda s: _twins(s.consumers, _unequal),
    "producers overlapping in part": lambda s: _twins(s.producers, _partly),
    "consumers overlapping in part": lambda s: _twins(s.consumers, _partly),
    "pipeline stages of producers": lambda s: _stages(s.producers),
    "pipeline stages of consumers": lambda s: _stages(s.consumers),
    "several producers": lambda s: len(s.producers) > 1,
    "several consumers": lambda s: len(s.consumers) > 1,
    "layer that only producers have": _missing_on_consumer,
    "optional component": lambda s: any(part.optional for part in s.parts()),
    "optional component absent": _optional_absent,
    "kernel blocks at the producer": lambda s: any(p.kernel_blocks > 1 for f in s.producers for p in f.parts),
    "kernel blocks at the consumer": lambda s: any(p.kernel_blocks > 1 for f in s.consumers for p in f.parts),
    "kernel blocks differ": lambda s: any(a.kernel_blocks != b.kernel_blocks for a, _, b, _ in s.pairs()),
    "block tokens differ": lambda s: any(g.block_tokens != h.block_tokens for _, g, _, h in s.pairs()),
    "padding": lambda s: any(_padding(part) for part in s.parts()),
    "padded kernel block": lambda s: any(_padded_kernel(part) for part in s.parts()),
    "interleaved strides": lambda s: any(_interleaved(part) for part in s.parts()),
    "block inside an axis": lambda s: any(_block_inside(part) for part in s.parts()),
    "head outside token": lambda s: any(_strides(part, "head", inner="token") for part in s.parts()),
    "token outside head": lambda s: any(_strides(part, "token", inner="head") for part in s.parts()),
    "keys by column": lambda s: any(_strides(part, "dim", inner="token") for part in s.parts()),
    "opaque rows": lambda s: any(part.content_type.startswith("opaque") for part in s.parts()),
    "rows of several tokens": lambda s: any(part.row_tokens > 1 for part in s.parts()),
    "several components in a layer": lambda s: any(
        a.layer == b.layer for f in s.files for a, b in combinations(f.parts, 2)
    ),
    "components without a global axis": lambda s: any(not part.box() for part in s.parts()),
    "packed rows": lambda s: any(_packed(file) for file in s.files),
    "groups overlaid": lambda s: any(s.overlaid()),
    "groups share rows, not bytes": _shared_rows,
    "several groups": lambda s: any(len(file.groups) > 1 for file in s.files),
    "groups differ on the sides": _groups_differ,
    "several regions": lambda s: any(len(file.regions) > 1 for file in s.files),
    "touching regions": lambda s: any(_touching(file) for file in s.files),
    "touching regions of two memories": lambda s: any(_memories_touch(file) for file in s.files),
    "component in several regions": lambda s: any(_regions_of(p, f) > 1 for f in s.files for p in f.parts),
    "row across a seam": lambda s: any(_row_over_seam(file) for file in s.files),
    "unregistered gap inside": lambda s: any(_gap_inside(file) for file in s.files),
    "state": lambda s: bool(_states(s)),
    "state with sections": lambda s: any(_sections(file) for file in s.files),
    "one state a request": lambda s: any(first is None for _, first in _states(s)),
    "state table": lambda s: any(first is not None for _, first in _states(s)),
    "state with start = stop": lambda s: bool(_states(s)) and s.request.start == s.request.stop,
    "start = stop": lambda s: s.request.start == s.request.stop,
    "stop = 0": lambda s: s.request.stop == 0,
    "sliding window": lambda s: any(group.window for group, _, _, _ in s.tables()),
    "window cuts": lambda s: _cut(s, "window"),
    "chunk": lambda s: any(group.chunk for group, _, _, _ in s.tables()),
    "chunk cuts": lambda s: _cut(s, "chunk"),
    "context parallel producers": lambda s: _rings(s.producers),
    "context parallel consumers": lambda s: _rings(s.consumers),
    "context parallel sizes differ": _ring_sizes_differ,
    "context parallel interleaves differ": _interleaves_differ,
    "null entries at the producer": lambda s: any(None in b for _, b, _, p in s.tables() if p),
    "null entries at the consumer": lambda s: any(None in b for _, b, _, p in s.tables() if not p),
    "prefix hit": lambda s: any(f > 0 and not p for _, _, f, p in _attention(s)),
    "producer table begins later": lambda s: any(f > 0 and p for _, _, f, p in _attention(s)),
    "lookahead at the producer": lambda s: _lookahead(s, producer=True),
    "lookahead at the consumer": lambda s: _lookahead(s, producer=False),
    "start inside a block": lambda s: _unaligned(s, s.request.start),
    "stop inside a block": lambda s: _unaligned(s, s.request.stop),
    "consecutive blocks": _consecutive,
    "scattered blocks": _scattered,
}

EVERY = (
    "planned",
    "bytes to move",
    "nothing to move",
    "rows that may be carried",
    "holders that overlap only in part",
    *_TESTS,
    "refused",
    *(f"refused: {reason}" for reason in REASONS),
)
"""Every name that may occur and must, in one case of a hundred."""
