"""Layouts as production models have them, small enough for a demo: two unequal sides and requests for each.

* ``hybrid``: logical blocks of 768 tokens over attention kernel blocks of 64, state layers that overlay the attention
  pages; the decode side keeps its kernel blocks padded, so one logical block is twelve runs, never one of twelve times
  the length;
* ``latent``: MLA layers and a draft layer with heads of its own; blocks of 64 tokens against 128;
* ``window``: full and sliding-window layers in groups of their own, head-major blocks of 16 tokens against 32.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.layout import Component, Group, Layout
from kvferry.plan import BlockTable
from kvferry.testing.layouts import page, side_by_side, state, worker
from kvferry.testing.marked_memory import Tables


@dataclass(frozen=True, slots=True)
class Job:
    """One request: the same tokens on both sides."""

    name: str
    producer: Tables
    consumer: Tables


@dataclass(frozen=True, slots=True)
class Scenario:
    """Two layouts, both with one region at address 0, and what is to be moved."""

    name: str
    title: str
    producer: Layout
    consumer: Layout
    jobs: tuple[Job, ...]


PAGE = 64 * 1152
"""Bytes of a 64-token kernel block of 1,152 bytes a token; twelve of them are 884,736."""


def hybrid() -> Scenario:
    """768 over 64 with state layers that overlay the attention pages."""
    groups = [Group("attention", 768), Group("state", 768)]

    def side(*, kernel_stride: int, num_blocks: int) -> Layout:
        block = 12 * kernel_stride
        storages = [num_blocks * block * i for i in range(2)]
        parts: list[Component] = []
        for i, base in enumerate(storages):
            parts.append(page(f"layers.{4 * i + 3}.attn", heads=(0, 4, 4), tokens=64, nbytes=288, kernel_blocks=12,
                              kernel_stride=kernel_stride, num_blocks=num_blocks, address=base))  # fmt: skip
            offset = base
            sections = (("conv.q", 512, 6), ("conv.k", 512, 6), ("conv.v", 1024, 6), ("ssm", 16, 32_768))
            for name, channels, nbytes in sections:
                parts.append(state(f"layers.{4 * i}.kda", component=name, part=(0, channels, channels), nbytes=nbytes,
                                   num_blocks=num_blocks, address=offset, group=1, block_stride=block))  # fmt: skip
                offset += channels * nbytes
        return worker(parts, groups=groups)

    return _scenario(
        "hybrid",
        "768-token blocks over 64-token kernel blocks, state layers overlaid; padded kernel blocks at decode",
        side(kernel_stride=PAGE, num_blocks=12),
        side(kernel_stride=PAGE + 512, num_blocks=14),
        lengths=(768, 1_500, 2_304, 100),
    )


def latent() -> Scenario:
    """MLA with a draft layer."""
    groups = [Group("attention", 64), Group("attention", 64)]

    def side(*, tokens: int, num_blocks: int) -> Layout:
        layers = [page(f"layers.{i}.mla", tokens=tokens, nbytes=1152, num_blocks=num_blocks) for i in range(12)]
        draft = page("draft.0.attn", heads=(0, 2, 2), tokens=tokens, nbytes=256, num_blocks=num_blocks, group=1)
        sized = [Group(g.kind, tokens) for g in groups]
        return worker(side_by_side([*layers, draft], base=0, gap=256), groups=sized)

    return _scenario(
        "latent",
        "12 MLA layers and a draft layer, blocks of 64 against 128",
        side(tokens=64, num_blocks=130),
        side(tokens=128, num_blocks=70),
        lengths=(64, 700, 1_024, 1_999),
    )


def window() -> Scenario:
    """Sliding windows, unequal blocks."""

    def side(*, tokens: int, num_blocks: int) -> Layout:
        groups = [Group("attention", tokens), Group("attention", tokens, sliding_window=1024)]
        layers = [
            page(
                f"layers.{i}.attn",
                heads=(0, 4, 4),
                tokens=tokens,
                nbytes=128,
                num_blocks=num_blocks,
                group=int(i % 6 != 5),
            )
            for i in range(6)
        ]
        return worker(side_by_side(layers, base=0, gap=512), groups=groups)

    return _scenario(
        "window",
        "5 sliding-window layers to 1 full one, head-major blocks of 16 tokens against 32",
        side(tokens=16, num_blocks=560),
        side(tokens=32, num_blocks=290),
        lengths=(32, 1_000, 1_600, 2_400),
    )


SCENARIOS: dict[str, Callable[[], Scenario]] = {"hybrid": hybrid, "latent": latent, "window": window}


def _scenario(name: str, title: str, producer: Layout, consumer: Layout, *, lengths: Sequence[int]) -> Scenario:
    """Give every request blocks of its own on both sides; the last request has a prefix at the consumer already."""
    rng = random.Random(name)
    pools = [_Pool(side, rng) for side in (producer, consumer)]
    jobs = []
    for number, stop in enumerate(lengths):
        start = 0
        if number == len(lengths) - 1 and producer.groups[-1].kind == "attention":
            start = stop // 2 // consumer.groups[0].block_tokens * consumer.groups[0].block_tokens
        sides = [Tables(start, stop, pool.tables(first, stop)) for pool, first in zip(pools, (0, start), strict=True)]
        jobs.append(Job(f"{name}-{stop}", sides[0], sides[1]))
    return Scenario(name, title, producer, consumer, tuple(jobs))


class _Pool:
    """Block ids of one side; groups share the pool, so an id has one owner."""

    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self._groups = layout.groups
        self._free = list(range(1, min(c.num_blocks for c in layout.components)))
        rng.shuffle(self._free)

    def tables(self, first: int, stop: int) -> tuple[BlockTable, ...]:
        """Fresh blocks for positions from ``first`` on; entries before a window hold none."""
        return tuple(self._table(group, first, stop) for group in self._groups)

    def _table(self, group: Group, first: int, stop: int) -> BlockTable:
        if group.kind == "state":
            return BlockTable.of([self._free.pop()])
        low = max(first, stop - group.sliding_window) if group.sliding_window else first
        entries = range(first // group.block_tokens, -(-stop // group.block_tokens))
        blocks = [self._free.pop() if (e + 1) * group.block_tokens > low else None for e in entries]
        return BlockTable.of(blocks, first_token=entries.start * group.block_tokens)
