"""Random addresses for the components of one worker: nested and interleaved strides, packed and padded rows, overlays.

A *shape* is a component without addresses: a list of dimensions (``block``, ``kernel`` and the axes) with their counts.
Dimensions are nested in any order, so the block may be inside the head; two coprime dimensions may interleave; several
components of one shape may take turns (halves, combs); a row of blocks may pack several; groups may lie on each other.
"""

import random
from dataclasses import dataclass, field

from kvferry.testing.case_model import Json, chance


@dataclass(slots=True)
class Shape:
    part: Json
    """The component's dictionary, to be given its address and strides."""
    dims: list[tuple[str, int]]
    nbytes: int
    group: int
    offset: int = 0
    strides: dict[str, int] = field(default_factory=dict)

    def inner(self) -> list[tuple[str, int]]:
        return [dim for dim in self.dims if dim[0] != "block"]


@dataclass(slots=True)
class Storage:
    shapes: list[Shape]
    extent: int


def _pad(rng: random.Random, loose: bool) -> int:
    return rng.randint(1, 4) if loose and chance(rng, 45) else 0


def _nest(rng: random.Random, order: list[tuple[str, int]], nbytes: int, *, loose: bool) -> tuple[dict[str, int], int]:
    """Strides for dimensions listed from the outermost to the innermost, and the bytes that they span."""
    strides: dict[str, int] = {}
    extent = nbytes + _pad(rng, loose)
    inner = list(reversed(order))
    if len(inner) > 1 and _coprime(inner[0][1], inner[1][1]) and chance(rng, 25):
        # Two dimensions that interleave: x*b + y*a with x < a and y < b never meets itself.
        (first, a), (second, b) = inner[0], inner[1]
        strides[first], strides[second] = b * extent, a * extent
        extent *= (a - 1) * b + (b - 1) * a + 1
        inner = inner[2:]
    for name, count in inner:
        strides[name] = extent
        extent = extent * count + _pad(rng, loose)
    return strides, extent


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def _ordered(rng: random.Random, dims: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Block, kernel block, then the axes in some order; or any order at all."""
    dims = list(dims)
    rng.shuffle(dims)
    if chance(rng, 60):
        rank = {"block": 0, "kernel": 1}
        dims.sort(key=lambda dim: rank.get(dim[0], 2))
    return dims


def alone(rng: random.Random, shape: Shape) -> Storage:
    shape.strides, extent = _nest(rng, _ordered(rng, shape.dims), shape.nbytes, loose=chance(rng, 35))
    return Storage([shape], extent)


def taking_turns(rng: random.Random, shapes: list[Shape]) -> Storage:
    """Components of one shape with one more dimension between them, anywhere in the order."""
    order = _ordered(rng, shapes[0].dims)
    order.insert(rng.randint(0, len(order)), ("turn", len(shapes)))
    strides, extent = _nest(rng, order, shapes[0].nbytes, loose=chance(rng, 30))
    for turn, shape in enumerate(shapes):
        shape.strides, shape.offset = dict(strides), turn * strides["turn"]
    return Storage(shapes, extent)


def in_rows(rng: random.Random, levels: list[list[Shape]]) -> Storage:
    """One row a block. Each level packs its components side by side; the levels lie on one another."""
    widths = []
    for shapes in levels:
        width = _pad(rng, len(levels) > 1)
        loose = chance(rng, 40)
        for shape in shapes:
            shape.strides, extent = _nest(rng, _ordered(rng, shape.inner()), shape.nbytes, loose=loose)
            shape.offset = width
            width += extent
        widths.append(width)
    row = max(widths) + _pad(rng, chance(rng, 50))
    blocks = max(dict(shape.dims)["block"] for shapes in levels for shape in shapes)
    every = [shape for shapes in levels for shape in shapes]
    for shape in every:
        shape.strides["block"] = row
    return Storage(every, row * blocks)


def draw_storages(rng: random.Random, shapes: list[Shape], overlay: list[int]) -> list[Storage]:
    """``overlay``: groups that share one pool of block ids, so that they may lie on each other or share rows."""
    by_group: dict[int, list[Shape]] = {}
    for shape in shapes:
        by_group.setdefault(shape.group, []).append(shape)
    storages = []
    together = [by_group.pop(group) for group in overlay if group in by_group]
    if together and chance(rng, 85):
        storages.append(in_rows(rng, together))
    elif together:
        storages.append(in_rows(rng, [[shape for level in together for shape in level]]))
    for members in by_group.values():
        storages += _draw_group_storages(rng, members)
    rng.shuffle(storages)
    return storages


def _draw_group_storages(rng: random.Random, shapes: list[Shape]) -> list[Storage]:
    rest = list(shapes)
    storages = []
    while rest:
        first = rest.pop(0)
        twins = [s for s in rest if sorted(s.dims) == sorted(first.dims) and s.nbytes == first.nbytes]
        if twins and chance(rng, 50):
            storages.append(taking_turns(rng, [first, *twins]))
            rest = [s for s in rest if not any(s is twin for twin in twins)]
        elif rest and chance(rng, 35):
            others = rest[: rng.randint(1, len(rest))]
            storages.append(in_rows(rng, [[first, *others]]))
            rest = rest[len(others) :]
        else:
            storages.append(alone(rng, first))
    return storages


_BASES = [0, 1000, 4096, 65536, 140_000_000_000, 2**62]


def place(rng: random.Random, storages: list[Storage]) -> list[tuple[int, int]]:
    """Writes addresses and strides into the components; returns ``[first, past the last)`` of each storage."""
    cursor = rng.choice(_BASES)
    bounds = []
    for storage in storages:
        for shape in storage.shapes:
            _write(shape, cursor + shape.offset)
        bounds.append((cursor, cursor + storage.extent))
        cursor += storage.extent + (rng.randint(1, 16) if chance(rng, 50) else 0)
    return bounds


def _write(shape: Shape, address: int) -> None:
    shape.part["address"] = address
    shape.part["block_stride"] = shape.strides["block"]
    shape.part["kernel_stride"] = shape.strides["kernel"]
    for axis in shape.part["axes"]:
        axis["stride"] = shape.strides[axis["name"]]


def draw_regions(rng: random.Random, bounds: list[tuple[int, int]], used: list[Shape]) -> list[Json]:
    """Registered memory around the storages: one region, one each, cut at seams, or only where bytes are."""
    way = rng.choice(["one", "seams", "seams", "seams", "tight"] if chance(rng, 40) else ["one", "each"])
    if way == "one" or not bounds:
        ends = [(bounds[0][0], bounds[-1][1])] if bounds else [(4096, 8192)]
    elif way == "each":
        ends = bounds
    elif way == "seams":
        ends = [piece for bound in bounds for piece in _cut(rng, *bound)]
    else:
        ends = _tight(used, widest=rng.randint(0, 12))
    memory = {"memory": rng.choice(["cpu", "cuda:0"])} if chance(rng, 40) else {}
    regions = [{"address": a, "nbytes": b - a, **memory} for a, b in ends]
    if chance(rng, 30):
        rng.shuffle(regions)
    return regions


def mix_memories(file: Json) -> None:
    """Now and then what lies behind the end of some component is another memory; no component lies in both.

    Drawn from what is in the file, so that the seeds of cases that were found before keep their cases.
    """
    rng = random.Random(str(file["regions"]))
    spans = [(part["address"], part["address"] + _reach(part)) for part in file["components"]]
    ends = sorted({stop for _, stop in spans if not any(first < stop < last for first, last in spans)})
    if not ends or not chance(rng, 30):
        return
    cut, other = rng.choice(ends), {"memory": "cuda:1"}
    regions: list[Json] = []
    for region in file["regions"]:
        first, stop = region["address"], region["address"] + region["nbytes"]
        if first < cut < stop:
            regions += [{**region, "nbytes": cut - first}, {**region, "address": cut, "nbytes": stop - cut, **other}]
        else:
            regions.append({**region, **other} if first >= cut else region)
    file["regions"] = regions


def _reach(part: Json) -> int:
    """Bytes from the first to one past the last."""
    blocks = (part["num_blocks"] - 1) * part["block_stride"] + (part["kernel_blocks"] - 1) * part["kernel_stride"]
    inner: int = sum((axis["count"] - 1) * axis["stride"] for axis in part["axes"])
    return int(blocks + inner + part["content"]["nbytes"])


def _cut(rng: random.Random, first: int, stop: int) -> list[tuple[int, int]]:
    if stop - first < 2:
        return [(first, stop)]
    cuts = sorted({rng.randint(first + 1, stop - 1) for _ in range(rng.randint(1, 3))})
    return list(zip([first, *cuts], [*cuts, stop], strict=True))


def _tight(used: list[Shape], *, widest: int) -> list[tuple[int, int]]:
    """Regions that leave out padding wider than ``widest``."""
    starts = sorted((shape.part["address"] + offset, shape.nbytes) for shape in used for offset in _offsets(shape))
    ends: list[tuple[int, int]] = []
    for start, nbytes in starts:
        if ends and start <= ends[-1][1] + widest:
            ends[-1] = (ends[-1][0], max(ends[-1][1], start + nbytes))
        else:
            ends.append((start, start + nbytes))
    return ends


def _offsets(shape: Shape) -> list[int]:
    offsets = [0]
    for name, count in shape.dims:
        offsets = [offset + i * shape.strides[name] for offset in offsets for i in range(count)]
    return offsets
