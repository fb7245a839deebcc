"""The layout of an upstream consumer rank, from what its pull shows, and from ours where it shows nothing.

A pull of vLLM's own connector tells for each layer where its tensor begins, how far kernel blocks are apart and how
many bytes of each are moved. The components inside a page are taken to be those of our own layer of that name; blocks
of the declared size are made of kernel blocks as ours are. What its numbers contradict is refused. What comes out is
checked and planned like any layout: nothing of upstream's own arithmetic is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, TypeVar

from msgspec import structs

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.layout import BoundLayout, Component, Group, Layout, Parallel, Region, bind_layout
from kvferry.protocol import Pull
from kvferry.runtime.sides import Local
from kvferry.runtime.upstream_caches import CacheRegion, OwnCaches, groups_there
from kvferry.runtime.upstream_pages import check_heads, heads_of, of_rank, state_of_rank

_PACKED: Final = -1
"""What stands for the group of a region that several groups share."""

_T = TypeVar("_T")


def regions_shown(pull: Pull) -> tuple[CacheRegion, ...]:
    """The regions of a pull, as records; refused where its lists are not of one length."""
    names = pull.registered_layer_names
    columns = (pull.registered_layer_indices, pull.kv_caches_base_addr, pull.block_lens, pull.kv_block_lens)
    if not names or any(len(column) != len(names) for column in columns):
        raise _malformed(f"{len(names)} layer names beside lists of {[len(column) for column in columns]} numbers")
    if min(pull.block_lens) < 1 or min(pull.kv_block_lens) < 1 or min(pull.kv_caches_base_addr) < 0:
        raise _malformed("a region with a length below 1, or a negative address")
    groups = _beside(pull.registered_group_indices, names, "group indices", missing=0)
    shared = _beside(pull.registered_shared_group_ids, names, "shared groups", missing=())
    offsets = _beside(pull.registered_row_offsets, names, "row offsets", missing=-1)
    found = zip(names, *columns, groups, shared, offsets, strict=True)
    return tuple(
        CacheRegion(name, index, group, base, block, moved, tuple(several), offset)
        for name, index, base, block, moved, group, several, offset in found
    )


def shares_layers(pull: Pull, own: OwnCaches) -> bool:
    """Whether the consumer rank has any layer of this rank: it may be of another pipeline stage."""
    return not {region.layer for region in own.regions}.isdisjoint(pull.registered_layer_names)


def suppose_consumer(pull: Pull, local: Local) -> BoundLayout:
    """The consumer rank's layout, as far as this rank has its layers. Raises ``RemoteProtocolError``, ``PlanError``."""
    own, placement = local.caches, local.placement
    assert own is not None, "checked when the pull was taken in"  # noqa: S101
    mine, theirs = {region.layer: region for region in own.regions}, _by_layer(regions_shown(pull))
    _check_layers(pull, mine, theirs, stages=local.pp_size)
    pages = {layer: _page_of(local, layer) for layer in theirs}
    if pull.remote_tp_size != local.tp_size:
        pages = {
            layer: _page_there(layer, page, pull=pull, local=local, mine=mine[layer]) for layer, page in pages.items()
        }
        mine = {layer: _scaled(mine[layer], _page_of(local, layer), there=page) for layer, page in pages.items()}
    ratio = own.peer_block_size // own.peer_kernel_block_size
    strides = {
        layer: region.block_len * (1 if placement.groups[region.group].kind == "state" else ratio)
        for layer, region in theirs.items()
    }
    listed = max((b for _, lists in pull.req_blocks.values() for blocks in lists for b in blocks), default=0)
    count = _count_blocks(theirs, strides, at_least=max(*placement.blocks_of_group, _power(listed + 1)))
    components = tuple(
        structs.replace(
            _moved_to(component, mine[layer], theirs[layer], ratio=ratio, groups=placement.groups),
            num_blocks=count,
            block_stride=strides[layer],
        )
        for layer, page in pages.items()
        for component in page
    )
    groups = groups_there(placement.groups, block_size=own.peer_block_size)
    parallel = Parallel(pull.remote_tp_rank, pull.remote_tp_size, 0, 1, 0, 1)
    regions = _regions(components, placement.storages[0].memory)
    return bind_layout(Layout("upstream", parallel, regions, groups, components))


# ------------------------------------------------------------------------------------------ what is shown, and checked


def _by_layer(shown: Sequence[CacheRegion]) -> dict[str, CacheRegion]:
    found: dict[str, CacheRegion] = {}
    for region in shown:
        if region.layer in found:
            raise _incompatible(f"layer {region.layer!r} is registered in several pieces, which is not supported")
        if region.group == _PACKED:
            raise _incompatible(f"layer {region.layer!r} stands for a row that several groups share")
        found[region.layer] = region
    return found


def _check_layers(pull: Pull, here: Mapping[str, CacheRegion], there: dict[str, CacheRegion], *, stages: int) -> None:
    """Layers by name, number and group; those that other stages have are left out of ``there``."""
    missing = [layer for layer in here if layer not in there]
    extra = [layer for layer in there if layer not in here]
    alike = pull.remote_pp_size == stages
    if missing and (alike or pull.remote_pp_size == 1):
        raise _incompatible(f"it has no layer {missing[0]!r}, one of {len(missing)} that it lacks")
    if extra and (alike or stages == 1):
        raise _incompatible(f"it has layer {extra[0]!r}, one of {len(extra)} that are not known here")
    for layer in extra:
        del there[layer]
    for layer, region in there.items():
        mine = here[layer]
        if (region.index, region.group) != (mine.index, mine.group):
            raise _incompatible(
                f"layer {layer!r} is number {region.index} in group {region.group} there, {mine.index} in group "
                f"{mine.group} here"
            )


def _check_page(mine: CacheRegion, theirs: CacheRegion, *, live: int, group: Group) -> None:
    if theirs.kv_block_len > theirs.block_len:
        raise _malformed(f"layer {theirs.layer!r}: {theirs.kv_block_len} bytes in blocks {theirs.block_len} apart")
    if theirs.kv_block_len < live or (group.kind != "state" and theirs.kv_block_len != mine.kv_block_len):
        raise _incompatible(
            f"layer {theirs.layer!r}: a kernel block of {theirs.kv_block_len} bytes there, of {mine.kv_block_len} "
            f"bytes here ({live} of them looked at)"
        )


# ------------------------------------------------------------------------------------------------ what it comes to


def _page_of(local: Local, layer: str) -> tuple[Component, ...]:
    """Our own components of a layer, at their addresses."""
    bases = local.binding.bases
    return tuple(
        structs.replace(placed.component, address=placed.component.address + bases[placed.storage])
        for placed in local.placement.placed
        if placed.component.layer == layer
    )


def _page_there(
    layer: str, page: Sequence[Component], *, pull: Pull, local: Local, mine: CacheRegion
) -> tuple[Component, ...]:
    """The same components as a rank of another tensor parallel size holds them."""
    placed = [(component.address - mine.base, component) for component in page]
    own, sizes = local.caches, (local.tp_size, pull.remote_tp_size)
    if local.placement.groups[mine.group].kind == "state":
        if own is None or not own.even_states:
            raise _incompatible(f"layer {layer!r} keeps a state that every rank may hold whole")
        moved = [state_of_rank(one, offset, sizes=sizes, rank=pull.remote_tp_rank) for offset, one in placed]
        return tuple(structs.replace(one, address=mine.base + offset) for offset, one in moved)
    check_heads(layer, placed, most_ranks=max(local.tp_size, pull.remote_tp_size))
    return tuple(of_rank(component, rank=pull.remote_tp_rank, size=pull.remote_tp_size) for component in page)


def _scaled(region: CacheRegion, here: Sequence[Component], *, there: Sequence[Component]) -> CacheRegion:
    """What our own region would be with the peer's number of heads."""
    moved = region.kv_block_len * heads_of(there) // heads_of(here)
    return replace(region, kv_block_len=moved)


def _moved_to(
    component: Component, mine: CacheRegion, theirs: CacheRegion, *, ratio: int, groups: Sequence[Group]
) -> Component:
    """Our component of this layer, where the consumer keeps it."""
    group, inside = groups[component.group], component.address - mine.base
    live = inside + component.content.nbytes + sum((axis.count - 1) * axis.stride for axis in component.axes)
    _check_page(mine, theirs, live=live, group=group)
    moved = structs.replace(component, address=theirs.base + inside)
    if group.kind == "state":
        return moved
    return structs.replace(moved, kernel_blocks=ratio, kernel_stride=theirs.block_len if ratio > 1 else 0)


def _count_blocks(theirs: Mapping[str, CacheRegion], strides: Mapping[str, int], *, at_least: int) -> int:
    """How many blocks the consumer may have: tensors that lie one after the other bound it. It is nowhere told."""
    bound = at_least
    steps: dict[int, int] = {}
    for layer, region in theirs.items():
        steps[region.base] = max(strides[layer], steps.get(region.base, 0))
    for low, high in pairwise(sorted(steps)):
        if high - low >= steps[low]:
            bound = min(bound, (high - low) // steps[low])
    return bound


def _power(number: int) -> int:
    """The next power of two, so that plans made for a few block ids serve many."""
    return 1 << max(0, number - 1).bit_length()


def _regions(components: Sequence[Component], memory: str) -> tuple[Region, ...]:
    """One region for each stretch of memory that components share; a copy never crosses from one into another."""
    spans: list[tuple[int, int]] = []
    for component in sorted(components, key=lambda one: one.address):
        start, stop = component.address, component.stop
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return tuple(Region(start, stop - start, memory) for start, stop in spans)


def _beside(column: Sequence[_T], names: Sequence[str], what: str, *, missing: _T) -> Sequence[_T]:
    if column and len(column) != len(names):
        raise _malformed(f"{len(column)} {what} for {len(names)} layers")
    return column or (missing,) * len(names)


def _malformed(said: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.MALFORMED, said)


def _incompatible(said: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.INCOMPATIBLE_PEER, f"vLLM's own connector as a consumer: {said}")
