"""Random models and the shape of the two sides that share one: which layers, groups, ranks and splits.

Everything is drawn from one ``random.Random``, so a case is named by its seed and Hypothesis can drive the same code.
Sizes are tiny: a few blocks of a few tokens, one to four heads, one to six bytes of content.
"""

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

# JSON as it is written to files: the generator and its faults poke anywhere in it, so typing it would say nothing.
Json = dict[str, Any]


@dataclass(slots=True)
class Tensor:
    """One component of a layer, whole."""

    name: str
    axes: list[tuple[str, int]]
    """Global axes (name, total); the first is sharded when ``shared`` says so."""
    nbytes: int
    content_type: str
    row_tokens: int = 1
    shared: bool = True
    opaque: bool = False
    optional: bool = False


@dataclass(slots=True)
class Layer:
    name: str
    index: int
    kind: str
    window: int | None
    chunk: int | None
    tensors: list[Tensor]

    @property
    def family(self) -> tuple[str, int | None, int | None]:
        """Layers of one family may share a group."""
        return (self.kind, self.window, self.chunk)


@dataclass(slots=True)
class Group:
    kind: str
    block_tokens: int
    window: int | None
    chunk: int | None
    ring: tuple[int, int] | None
    """(size, interleave) of context parallel."""

    @property
    def span(self) -> int:
        return self.block_tokens * (self.ring[0] if self.ring else 1)

    def low(self, start: int, stop: int) -> int:
        """Lowest needed position."""
        low = start if self.window is None else max(start, stop - self.window)
        return low if self.chunk is None or stop == 0 else max(low, (stop - 1) // self.chunk * self.chunk)


@dataclass(slots=True)
class Side:
    stages: int
    ranks: int
    """Tensor parallel ranks of a stage; context parallel ones are among them."""
    ring: int
    is_producer: bool
    groups: list[Group] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)
    stages_of: dict[str, list[int]] = field(default_factory=dict)
    overlay: list[int] = field(default_factory=list)
    """Groups that share one storage and one pool of block ids."""
    splits: dict[object, list[tuple[int, int]]] = field(default_factory=dict)
    """By total, the split that most tensors follow; by (layer, tensor), the one chosen for it."""
    kernels: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        return self.ranks // self.ring


def chance(rng: random.Random, percent: int) -> bool:
    return rng.randint(1, 100) <= percent


def draw_side(rng: random.Random, *, is_producer: bool, rings: bool) -> Side:
    """``rings``: whether there may be context parallel."""
    ring = rng.choice([2, 2, 3]) if rings and chance(rng, 70) else 1
    shards = rng.choice([1, 1, 1, 2, 2, 2, 3, 4] if ring == 1 else [1, 1, 2])
    stages = 2 if chance(rng, 14) else 1
    return Side(stages, shards * ring, ring, is_producer)


# ------------------------------------------------------------------------------------------------------------ layers


def draw_layers(rng: random.Random, shards: int) -> list[Layer]:
    """``shards``: the most different opaque shards that both sides can hold."""
    window, chunk = rng.randint(1, 9), rng.randint(2, 9)
    layers = []
    for index in range(rng.choice([1, 1, 2, 2, 3, 4])):
        kind = "state" if chance(rng, 24) else "attention"
        reach = rng.choice(["all", "all", "window", "chunk"]) if kind == "attention" else "all"
        if kind == "state":
            tensors = [_ring_buffer(rng, shards)] if chance(rng, 20) else _state(rng)
        else:
            tensors = rng.choice(_ATTENTION)(rng, shards)
        for tensor in tensors:
            tensor.optional = chance(rng, 4)
        layers.append(
            Layer(
                name=f"layers.{index}.{'mixer' if kind == 'state' else 'attn'}",
                index=index,
                kind=kind,
                window=window if reach == "window" else None,
                chunk=chunk if reach == "chunk" else None,
                tensors=tensors,
            )
        )
    return layers


def _heads(rng: random.Random) -> int:
    return rng.choice([1, 2, 2, 3, 4, 4])


def _plain(rng: random.Random, _: int) -> list[Tensor]:
    n = rng.randint(1, 6)
    return [Tensor("kv", [("head", _heads(rng))], n, f"bfloat16:kv{n}")]


def _apart(rng: random.Random, _: int) -> list[Tensor]:
    """K and V of the same heads, each a component: split halves, or interleaved."""
    heads, n = _heads(rng), rng.randint(1, 4)
    return [Tensor(name, [("head", heads)], n, f"bfloat16:{name}{n}") for name in ("k", "v")]


def _columns(rng: random.Random, _: int) -> list[Tensor]:
    """Keys stored column by column."""
    heads, dim, element = _heads(rng), rng.choice([2, 3]), rng.choice([1, 2])
    keys = Tensor("k", [("head", heads), ("dim", dim)], element, f"f{element}")
    return [keys, Tensor("v", [("head", heads)], element * dim, f"f{element}:v{dim}")]


def _slots(rng: random.Random, _: int) -> list[Tensor]:
    """K and V as an axis of two slots."""
    return [Tensor("kv", [("head", _heads(rng)), ("slot", 2)], rng.randint(1, 3), "bfloat16:slot")]


def _latent(rng: random.Random, _: int) -> list[Tensor]:
    """Latent attention: one row a token, the same on every rank; sometimes one row for several tokens."""
    axes = [("head", 1)] if chance(rng, 50) else []
    n = rng.randint(2, 6)
    return [Tensor("kv", axes, n, f"latent{n}", row_tokens=rng.choice([1, 1, 2, 4]), shared=False)]


def _scaled(rng: random.Random, _: int) -> list[Tensor]:
    heads = _heads(rng)
    data = Tensor("data", [("head", heads)], rng.randint(2, 4), "fp8")
    return [data, Tensor("scale", [("head", heads)], 1, "f32:scale")]


def _opaque(rng: random.Random, shards: int) -> list[Tensor]:
    total, tokens = rng.randint(1, shards), rng.choice([2, 4])
    n = tokens * rng.randint(1, 2)
    name = f"opaque:NEW_ATTN:bfloat16:isa:{tokens}"
    return [Tensor("kv", [("shard", total)], n, name, row_tokens=tokens, opaque=True)]


_ATTENTION = [_plain, _plain, _apart, _columns, _slots, _latent, _latent, _scaled, _opaque]


def _state(rng: random.Random) -> list[Tensor]:
    taps = [("tap", 2)] if chance(rng, 40) else []
    sections = [
        Tensor(f"conv.{name}", [("channel", rng.choice([2, 3, 4])), *taps], rng.randint(1, 2), "bfloat16:conv")
        for name in rng.sample(["q", "k", "v"], rng.randint(1, 3))
    ]
    return [*sections, Tensor("ssm", [("head", _heads(rng))], rng.randint(1, 6), "f32:ssm")]


def _ring_buffer(rng: random.Random, shards: int) -> Tensor:
    return Tensor("ring", [("shard", rng.randint(1, shards))], rng.randint(2, 8), "opaque:ring", opaque=True)


# ------------------------------------------------------------------------------------------------- groups and splits


def draw_groups(rng: random.Random, side: Side, layers: list[Layer], unit: int, common: dict[object, int]) -> None:
    """``unit``: every attention block is a multiple of it; ``common``: block sizes that both sides may share."""
    where: dict[object, list[int]] = {}
    for layer in layers:
        known = where.setdefault(layer.family, [])
        if not known or chance(rng, 15):
            known.append(len(side.groups))
            side.groups.append(_draw_group(rng, side, layer=layer, unit=unit, common=common))
        side.group_of[layer.name] = rng.choice(known)
        stage = layer.index * side.stages // len(layers)
        side.stages_of[layer.name] = list(range(side.stages)) if chance(rng, 15) else [stage]
    if len(side.groups) > 1 and chance(rng, 45):
        side.overlay = sorted(rng.sample(range(len(side.groups)), rng.randint(2, len(side.groups))))


def _draw_group(rng: random.Random, side: Side, *, layer: Layer, unit: int, common: dict[object, int]) -> Group:
    tokens = unit * rng.choice([1, 2, 2, 3, 4, 4, 6])
    tokens = common.setdefault(layer.family, tokens) if chance(rng, 45) else tokens
    ring = None
    if side.ring > 1 and layer.kind == "attention":
        ring = (side.ring, rng.choice([n for n in range(unit, tokens + 1, unit) if tokens % n == 0]))
    return Group(layer.kind, tokens, layer.window, layer.chunk, ring)


def share_of(rng: random.Random, side: Side, layer: Layer, tensor: Tensor, *, shard: int) -> tuple[int, int]:
    """[start, count) of the sharded axis that one rank holds."""
    total = tensor.axes[0][1]
    if tensor.opaque:
        return shard * total // side.shards, 1
    if not tensor.shared:
        return 0, total
    key = (layer.name, tensor.name)
    if key not in side.splits:
        usual = side.splits.setdefault(total, _draw_split(rng, side, total))
        side.splits[key] = _draw_split(rng, side, total) if chance(rng, 15) else usual
    return side.splits[key][shard]


def _draw_split(rng: random.Random, side: Side, total: int) -> list[tuple[int, int]]:
    n = side.shards
    way = rng.choice(["even", "even", "even", "cut", "overlap", "all"])
    if way == "all":
        return [(0, total)] * n
    if way == "overlap" and not side.is_producer:
        return [_interval(rng, 0, high=total) for _ in range(n)]
    if n >= total:
        split = [(rank * total // n, 1) for rank in range(n)]
    else:
        edges = [total * rank // n for rank in range(n + 1)]
        if way != "even":
            edges = [0, *sorted(rng.sample(range(1, total), n - 1)), total]
        split = [(a, b - a) for a, b in pairwise(edges)]
    if way != "overlap":
        return split
    return [_widened(rng, start, count=count, total=total) for start, count in split]


def _interval(rng: random.Random, low: int, *, high: int) -> tuple[int, int]:
    start = rng.randint(low, high - 1)
    return start, rng.randint(1, high - start)


def _widened(rng: random.Random, start: int, *, count: int, total: int) -> tuple[int, int]:
    first = rng.randint(max(0, start - 1), start)
    return first, rng.randint(start + count, min(total, start + count + 1)) - first


def kernel_blocks(rng: random.Random, side: Side, layer: Layer, tensor: Tensor) -> int:
    """How many kernel blocks a block of this component has; mostly the same on all ranks of a side."""
    group = side.groups[side.group_of[layer.name]]
    if layer.kind == "state":
        return 1
    rows = group.block_tokens // tensor.row_tokens
    if tensor.opaque:
        return rows
    key = (layer.name, tensor.name)
    if key not in side.kernels or chance(rng, 8):
        side.kernels[key] = 1 if chance(rng, 40) else rng.choice([n for n in range(1, rows + 1) if rows % n == 0])
    return side.kernels[key]
