"""Memory of binding: a bounded number of bytes for each descriptor, whatever the shape."""

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest

from kvferry.layout import BoundLayout, Component, bind_layout
from kvferry.plan import BlockTable, TransferRequest, compile_plan
from kvferry.testing.layouts import Order, page, side_by_side, worker

MOST_BYTES = 100
"""Of peak memory for each descriptor, the columns themselves (24) included."""

POOL, BLOCKS, TOKENS, HEADS = 4000, 2000, 16, 8


@dataclass(frozen=True)
class Shape:
    """Layers of a pair; the producer is the first of ``producers`` ranks, the consumer has all heads."""

    layers: int
    producers: int
    orders: tuple[Order, Order]
    runs: int
    """Descriptors of one block of one layer."""
    scales: bool = False

    def cache(self, order: Order, heads: tuple[int, int, int], base: int) -> BoundLayout:
        parts: list[Component] = []
        for layer in range(self.layers):
            for name, nbytes in (("data", 64), ("scale", 8))[: 1 + self.scales]:
                parts.append(
                    page(f"l{layer}", component=name, heads=heads, tokens=TOKENS, nbytes=nbytes, num_blocks=POOL,
                         order=order)
                )  # fmt: skip
        return bind_layout(worker(side_by_side(parts, base=base)))


SHAPES = {
    "layers apart": Shape(61, 1, ("head-major", "head-major"), 1),
    "data and scales apart": Shape(30, 1, ("head-major", "head-major"), 2, scales=True),
    "a head split": Shape(61, 2, ("head-major", "head-major"), 1),
    "a head split of token-major pages": Shape(4, 2, ("token-major", "token-major"), TOKENS),
    "unequal page orders": Shape(1, 1, ("head-major", "token-major"), HEADS * TOKENS),
}


@pytest.mark.parametrize("name", SHAPES)
def test_peak_of_check_and_bind(name: str) -> None:
    shape = SHAPES[name]
    held = HEADS // shape.producers
    sources = [shape.cache(shape.orders[0], (r * held, held, HEADS), (r + 1) << 40) for r in range(shape.producers)]
    target = shape.cache(shape.orders[1], (0, HEADS, HEADS), 1 << 45)
    plan = compile_plan([source.placement for source in sources], [target.placement])
    blocks = [np.random.default_rng(seed).permutation(POOL)[:BLOCKS].tolist() for seed in (1, 2)]
    tables = [BlockTable.of(some, first_token=0) for some in blocks]
    request = TransferRequest(0, BLOCKS * TOKENS, (tables[0],), (tables[1],))
    pair = plan.pair(0, 0)
    assert pair is not None
    tracemalloc.start()
    try:
        plan.check(request)
        descriptors = pair.bind(request, src=sources[0].binding, dst=target.binding)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert descriptors.count == shape.layers * shape.runs * BLOCKS
    assert peak < MOST_BYTES * descriptors.count
