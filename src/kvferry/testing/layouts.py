"""Builders of small layouts for tests, demos and experiments: dense pages first, everything else by keyword.

>>> here = worker([page("l0", heads=(0, 2, 4), tokens=4, nbytes=8, num_blocks=3)])
>>> here.components[0].block_stride, here.regions[0].nbytes
(64, 192)
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvferry.layout import TOKEN, Axis, Component, Content, Group, Layout, Parallel, Region

ONE_RANK = Parallel(0, 1, 0, 1, 0, 1)

Order = Literal["head-major", "token-major"]


def page(
    layer: str,
    *,
    heads: tuple[int, int, int] = (0, 1, 1),
    tokens: int,
    nbytes: int,
    num_blocks: int = 8,
    kernel_blocks: int = 1,
    order: Order = "head-major",
    address: int = 0,
    group: int = 0,
    component: str = "kv",
    block_stride: int | None = None,
    kernel_stride: int | None = None,
    row_tokens: int = 1,
) -> Component:
    """An attention component; ``heads`` is (start, count, total), ``tokens`` those of one kernel block."""
    start, count, total = heads
    rows = tokens // row_tokens
    if order == "head-major":
        head_stride, row_stride = rows * nbytes, nbytes
    else:
        head_stride, row_stride = nbytes, count * nbytes
    kernel = kernel_stride or count * rows * nbytes
    axes = (Axis("head", start, count, total, head_stride), Axis(TOKEN, 0, rows, rows, row_stride))
    return Component(
        layer=layer,
        layer_index=_number(layer),
        component=component,
        group=group,
        address=address,
        num_blocks=num_blocks,
        block_stride=block_stride or kernel_blocks * kernel,
        axes=axes,
        content=Content(nbytes, f"bytes:{nbytes}"),
        kernel_blocks=kernel_blocks,
        kernel_stride=kernel,
        tokens_per_row=row_tokens,
    )


def state(
    layer: str,
    *,
    part: tuple[int, int, int] = (0, 1, 1),
    nbytes: int,
    num_blocks: int = 8,
    address: int = 0,
    group: int = 0,
    component: str = "ssm",
    block_stride: int | None = None,
) -> Component:
    """A state component with one ``channel`` axis; ``part`` is (start, count, total)."""
    start, count, total = part
    return Component(
        layer=layer,
        layer_index=_number(layer),
        component=component,
        group=group,
        address=address,
        num_blocks=num_blocks,
        block_stride=block_stride or count * nbytes,
        axes=(Axis("channel", start, count, total, nbytes),),
        content=Content(nbytes, f"bytes:{nbytes}"),
        kernel_blocks=1,
        kernel_stride=0,
        tokens_per_row=1,
    )


def at(component: Component, address: int) -> Component:
    """The same component elsewhere."""
    return msgspec.structs.replace(component, address=address)


def worker(
    components: Sequence[Component],
    *,
    groups: Sequence[Group] | None = None,
    regions: Sequence[Region] | None = None,
    engine_id: str = "engine",
) -> Layout:
    """A layout of ``components``; one region around all of them and one attention group unless given."""
    if groups is None:
        first = components[0]
        token = first.token_axis
        groups = [Group("attention", token.count * first.row_tokens * first.pages)] if token else [Group("state", 1)]
    if regions is None:
        low, high = min(c.address for c in components), max(whole(c) for c in components)
        regions = [Region(low, high - low)]
    return Layout(engine_id, ONE_RANK, tuple(regions), tuple(groups), tuple(components))


def whole(component: Component) -> int:
    """One past the last byte of the last block, padding included where the blocks follow each other."""
    return max(component.stop, component.address + component.num_blocks * component.block_stride)


def side_by_side(components: Sequence[Component], *, base: int, gap: int = 0) -> list[Component]:
    """The components one after the other from ``base`` on, ``gap`` bytes apart."""
    placed = []
    for component in components:
        placed.append(at(component, base))
        base = whole(placed[-1]) + gap
    return placed


def _number(layer: str) -> int:
    digits = "".join(ch for ch in layer if ch.isdigit())
    return int(digits) if digits else 0
