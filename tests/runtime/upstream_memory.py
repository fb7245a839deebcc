"""Memory of ranks with small layouts, for tests of exchanges with vLLM's own connector; read by plain loops."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from kvferry.ids import EngineId, Incarnation
from kvferry.layout import Component, Group, Layout, bind_layout
from kvferry.plan import Descriptors
from kvferry.runtime import Local
from kvferry.runtime.upstream_caches import Declared
from kvferry.testing.layouts import page, side_by_side, worker
from kvferry.testing.upstream_peer import caches_of

ROW = 8
"""Bytes of one token of one head."""
HEADS = 4


@dataclass
class Memory:
    """Bytes, and the layout that they have."""

    bytes: np.ndarray
    layout: Layout

    @classmethod
    def of(cls, components: list[Component], groups: list[Group], *, filled: bool) -> "Memory":
        layout = worker(components, groups=groups)
        raw = np.zeros(layout.regions[0].nbytes, np.uint8)
        if filled:
            raw[:] = np.random.default_rng(3).integers(1, 256, raw.size, np.uint8)
        base = raw.ctypes.data
        moved = tuple(msgspec.structs.replace(one, address=one.address + base) for one in layout.components)
        region = msgspec.structs.replace(layout.regions[0], address=base)
        return cls(raw, msgspec.structs.replace(layout, components=moved, regions=(region,)))

    def token(self, layer: int, head: int, position: int, *, table: list[int], block_tokens: int) -> bytes:
        """One token of one head, by the layout's own formula; ``table`` covers the prompt from position 0 on."""
        one = self.layout.components[layer]
        axes = {axis.name: axis for axis in one.axes}
        kernel = block_tokens // one.pages
        block, inside = table[position // block_tokens], position % block_tokens
        at = one.address + block * one.block_stride + inside // kernel * one.page_stride
        at += (head - axes["head"].start) * axes["head"].stride + inside % kernel * axes["token"].stride
        return self.bytes[at - self.bytes.ctypes.data :][:ROW].tobytes()


def side(
    rank: int, size: int, *, block: int, kernel: int, filled: bool = False, packed: bool = False, blocks: int = 16
) -> Memory:
    """One rank: three layers of four heads, one after the other or (packed) in rows that hold all layers."""
    count = HEADS // size
    nbytes = count * kernel * ROW
    layers = [
        page(
            f"l{index}",
            heads=(rank * count, count, HEADS),
            tokens=kernel,
            nbytes=ROW,
            num_blocks=blocks,
            kernel_blocks=block // kernel,
            kernel_stride=3 * nbytes if packed else nbytes,
            block_stride=(block // kernel) * (3 * nbytes if packed else nbytes),
        )
        for index in range(3)
    ]
    if packed:
        placed = [msgspec.structs.replace(one, address=index * nbytes) for index, one in enumerate(layers)]
        return Memory.of(placed, [Group("attention", block)], filled=filled)
    return Memory.of(side_by_side(layers, base=0), [Group("attention", block)], filled=filled)


def local_of(sides: list[Memory], rank: int, *, block: int, declared: Declared | None = None) -> Local:
    bound = [bind_layout(one.layout) for one in sides]
    return Local(
        Incarnation(EngineId("p"), "e"),
        "m",
        rank,
        bound[rank].binding,
        tuple(one.placement for one in bound),
        len(sides),
        1,
        caches=caches_of(sides[rank].layout, block_size=block, declared=declared),
    )


def move(source: Memory, target: Memory, rows: Iterable[tuple[int, int, int]]) -> int:
    """Carry copies out; how many there were."""
    count = 0
    for src, dst, nbytes in rows:
        count += 1
        here, there = src - source.bytes.ctypes.data, dst - target.bytes.ctypes.data
        target.bytes[there : there + nbytes] = source.bytes[here : here + nbytes]
    return count


def rows_of(rows: Descriptors) -> Iterable[tuple[int, int, int]]:
    return zip(rows.src, rows.dst, rows.nbytes, strict=True)


def check(
    sources: list[Memory], target: Memory, p_table: list[int], d_table: list[int], blocks: tuple[int, int], span: range
) -> None:
    each = HEADS // len(sources)
    head_axis = next(axis for axis in target.layout.components[0].axes if axis.name == "head")
    for layer in range(3):
        for head in range(head_axis.start, head_axis.stop):
            for position in span:
                source = sources[head // each]
                want = source.token(layer, head, position, table=p_table, block_tokens=blocks[0])
                assert target.token(layer, head, position, table=d_table, block_tokens=blocks[1]) == want
    listed = set(d_table[span.start // blocks[1] :])
    for layer, one in enumerate(target.layout.components):
        first = one.address - target.bytes.ctypes.data
        for block in set(range(one.num_blocks)) - listed:
            start = first + block * one.block_stride
            assert not target.bytes[start : start + one.last_in_block].any(), (layer, block)
