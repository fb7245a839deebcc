"""Small sides for the tests of pairs: dense caches in any of vLLM's orders, states in sections, requests over both."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.layout import TOKEN, Axis, Component, Content, ContextParallel, Group, Layout, encode_layout
from kvferry.testing.fuzz_plan import kvferry_planner
from kvferry.testing.layouts import side_by_side, state, worker
from kvferry.testing.oracle import check_plan

Json = dict[str, Any]

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""L layers, B blocks, H heads, N tokens, C content; outermost first."""

POOL = 8


@dataclass(frozen=True)
class Cache:
    """The attention layers of one rank."""

    heads: tuple[int, int, int] = (0, 2, 2)
    """(start, count, total)."""
    layers: Sequence[str] = ("l0", "l1")
    order: str = "LBHNC"
    tokens: int = 4
    """Of one kernel block."""
    kernel_blocks: int = 1
    content: Content = field(default=Content(2, "bfloat16"))
    component: str = "kv"
    row_tokens: int = 1
    group: int = 0
    axis: str | None = "head"
    """None: every rank has all of it (MLA)."""

    @property
    def block_tokens(self) -> int:
        return self.tokens * self.kernel_blocks

    def components(self, base: int) -> list[Component]:
        rows = self.tokens // self.row_tokens
        sizes = {"L": len(self.layers), "B": POOL * self.kernel_blocks, "H": self.heads[1], "N": rows}
        strides, reach = {}, self.content.nbytes
        for dim in reversed(self.order[:-1]):
            strides[dim] = reach
            reach *= sizes[dim]
        axes = [Axis(TOKEN, 0, rows, rows, strides["N"])]
        if self.axis is not None:
            axes.append(Axis(self.axis, *self.heads, strides["H"]))
        return [
            Component(layer, place, self.component, self.group, base + place * strides["L"], POOL,
                      strides["B"] * self.kernel_blocks, tuple(axes), self.content, self.kernel_blocks, strides["B"],
                      self.row_tokens)
            for place, layer in enumerate(self.layers)
        ]  # fmt: skip


def share(rank: int, ranks: int, total: int) -> tuple[int, int, int]:
    """(start, count, total) of one rank; ranks beyond ``total`` hold copies."""
    return rank * total // ranks, max(1, total // ranks), total


def tp(ranks: int, heads: int, base: int, **kwargs: Any) -> list[Layout]:
    """One side of tensor-parallel ranks."""
    return [attention(Cache(share(rank, ranks, heads), **kwargs), base=base + (rank << 20)) for rank in range(ranks)]


def attention(*caches: Cache, base: int, groups: Sequence[Group] | None = None) -> Layout:
    """One rank that holds ``caches``, each in its own memory."""
    parts: list[Component] = []
    for place, cache in enumerate(caches):
        parts += cache.components(base + (place << 16))
    return worker(parts, groups=groups or [Group("attention", caches[0].block_tokens)])


@dataclass(frozen=True)
class Section:
    """One separately sharded part of a recurrent state."""

    total: int
    nbytes: int = 1
    replicated_beyond: int | None = None
    """Ranks beyond this number hold copies (groups of Mamba2); None: every rank has a part of its own."""


def states(ranks: int, sections: Mapping[str, Section], base: int) -> list[Layout]:
    """One side of ranks whose layers ``s0`` and ``s1`` have ``sections``, one behind the other in a block."""
    side = []
    for rank in range(ranks):
        parts = []
        for layer in ("s0", "s1"):
            for name, section in sections.items():
                pieces = min(ranks, section.replicated_beyond or ranks)
                part = share(rank * pieces // ranks, pieces, section.total)
                parts.append(state(layer, component=name, part=part, nbytes=section.nbytes, num_blocks=3))
        side.append(worker(side_by_side(parts, base=base + (rank << 20), gap=3), groups=[Group("state", 8)]))
    return side


def request(start: int, stop: int, *sides: Sequence[Layout], seed: int = 0) -> Json:
    """Tables over [0, stop) and one entry more, of blocks drawn at random, for each group of both sides."""
    rng = random.Random(seed)
    tables: list[list[Json]] = []
    for side in sides:
        blocks = list(range(POOL))
        rng.shuffle(blocks)
        tables.append([])
        for group in side[0].groups:
            entries = 1 if group.kind == "state" else -(-stop // group.entry_tokens) + 1
            assert entries <= POOL, "the pool is too small for this range"
            taken = rng.sample(range(3 if group.kind == "state" else POOL), entries)
            tables[-1].append({"blocks": taken} if group.kind == "state" else {"blocks": taken, "first_token": 0})
    return {
        "format": "kvferry.request/1",
        "tokens": {"start": start, "stop": stop},
        "producer": tables[0],
        "consumer": tables[1],
    }


def files(side: Sequence[Layout]) -> list[Json]:
    return [json.loads(encode_layout(layout)) for layout in side]


def planned(producers: Sequence[Layout], consumers: Sequence[Layout], wanted: Json) -> Json:
    """The plan of a pair, held to the oracle byte by byte, the choice of replicas included."""
    sides = files(producers), files(consumers)
    plan = kvferry_planner(*sides, wanted)
    assert "error" not in plan, plan
    assert check_plan(*sides, wanted, plan, strict=True) == []
    return plan


def refused(producers: Sequence[Layout], consumers: Sequence[Layout], wanted: Json) -> str:
    """The reason for which a pair is refused; the oracle must refuse it too."""
    sides = files(producers), files(consumers)
    plan = kvferry_planner(*sides, wanted)
    assert check_plan(*sides, wanted, plan) == []
    reason: str = plan["error"]["reason"]
    return reason


def interleaved(cp_rank: int, size: int, interleave: int, block_tokens: int) -> list[Group]:
    """The one group of a context-parallel rank."""
    return [Group("attention", block_tokens, context_parallel=ContextParallel(cp_rank, size, interleave))]
