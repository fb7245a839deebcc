"""Pages under another tensor parallel size: what a rank of a peer holds of a layer of ours.

Only two kinds of page can be told without asking the peer. Pages in which a head is one run, all heads follow one
another, and each head is held by one rank: then only the number of heads in a page changes. And states all of whose
parts are cut evenly: then whatever lies outside of the axis that is cut shrinks or grows with it. One latent row that
all ranks hold (MLA) is the same everywhere. Opaque pages, parts that ranks have copies of, and pages with tokens
outside of heads are refused.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import structs

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.layout import Axis, Component

_EVEN_PARTS: Final = frozenset({"conv", "conv.q", "conv.k", "conv.v", "ssm"})
"""Parts of a state that are always cut; of others (B and C of Mamba2) ranks may have copies."""


def is_outermost(name: str, component: Component) -> bool:
    """Whether one coordinate of this axis is a run of its own: all other axes lie within it."""
    axis = next((one for one in component.axes if one.name == name), None)
    return axis is not None and (axis.count == 1 or _inner(component, axis) <= axis.stride)


def check_heads(layer: str, page: Sequence[tuple[int, Component]], *, most_ranks: int) -> None:
    """Raise unless this page, of components at offsets, can be cut by heads over up to so many ranks."""
    for offset, component in page:
        axes = {axis.name: axis for axis in component.global_axes}
        head = axes.get("head")
        if head is None or any(axis.count < axis.total for axis in axes.values() if axis is not head):
            raise _refused(layer, "its parts are not heads")
        if head.total == 1:
            continue
        if head.total % most_ranks:
            raise _refused(layer, f"{head.total} heads over up to {most_ranks} ranks, so that ranks hold copies")
        if not is_outermost("head", component) or offset + _inner(component, head) > head.stride:
            raise _refused(layer, "heads are not the outermost axis of its page")


def of_rank(component: Component, *, rank: int, size: int) -> Component:
    """A component of a checked page, as rank ``rank`` of ``size`` holds it."""
    axes = tuple(_cut(axis, rank, size=size) if axis.name == "head" else axis for axis in component.axes)
    return structs.replace(component, axes=axes)


def state_of_rank(component: Component, offset: int, *, sizes: tuple[int, int], rank: int) -> tuple[int, Component]:
    """A part of a state at ``offset`` of a page, and where it is for a rank of ``sizes[1]`` instead of ``sizes[0]``."""
    here, there = sizes
    cut = [axis for axis in component.axes if axis.name in ("channel", "head")]
    if component.component not in _EVEN_PARTS or len(cut) != 1:
        raise _refused(component.layer, f"ranks may have copies of its part {component.component!r}")
    (axis,) = cut
    if axis.count * here != axis.total or axis.total % there:
        raise _refused(component.layer, f"{axis.total} parts of {component.component!r} over {there} ranks")
    count = axis.total // there
    axes = tuple(
        structs.replace(one, start=rank * count, count=count)
        if one is axis
        else structs.replace(one, stride=_grown(one.stride, sizes) if one.stride > axis.stride else one.stride)
        for one in component.axes
    )
    return _grown(offset, sizes), structs.replace(component, axes=axes)


def heads_of(page: Sequence[Component]) -> int:
    """Heads in a page, of the whole model's where it has one for all ranks."""
    return max((axis.count for one in page for axis in one.axes if axis.name == "head"), default=1)


def _cut(axis: Axis, rank: int, *, size: int) -> Axis:
    if axis.total == 1:
        return axis
    count = axis.total // size
    return structs.replace(axis, start=rank * count, count=count)


def _grown(nbytes: int, sizes: tuple[int, int]) -> int:
    assert nbytes * sizes[0] % sizes[1] == 0, "a whole number of parts lies before it"  # noqa: S101
    return nbytes * sizes[0] // sizes[1]


def _inner(component: Component, axis: Axis) -> int:
    """Bytes from the first to one past the last within one coordinate of an axis."""
    return component.content.nbytes + sum((one.count - 1) * one.stride for one in component.axes if one is not axis)


def _refused(layer: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        ProtocolReason.INCOMPATIBLE_PEER,
        f"vLLM's own connector as a peer of another tensor parallel size: layer {layer!r}: {why}",
    )
