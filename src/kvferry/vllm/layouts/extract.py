"""The layout of one worker, read from what vLLM registers.

For each layer of each carried group: the tensor says where blocks and kernel blocks are, the spec how much of them is
live, the backend table (or the model's states) what lies where inside. Every number is taken from the one source that
knows it, and compared with any other that claims to. All tensors of the specs must be there, and no tensor may be
left over: a cache that moves in part is a wrong answer.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec

from kvferry.errors import ConfigError, ConfigReason
from kvferry.layout import Component, Content, Layout, Parallel, Region, check_layout
from kvferry.vllm.layouts.backends import Page, Part, cuts_pages, opaque_type, parts_of, shard_axis
from kvferry.vllm.layouts.facts import Backend, Model
from kvferry.vllm.layouts.geometry import PageSpec, Paging, View, check_page, paging_of, split_further
from kvferry.vllm.layouts.groups import TransferGroup, transfer_groups
from kvferry.vllm.layouts.heads import Heads
from kvferry.vllm.layouts.state import state_parts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

Caches = Mapping[str, "torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]"]
"""What vLLM gives ``register_kv_caches``."""


def layout_of_worker(
    kv_caches: Caches,
    kv_cache_config: "KVCacheConfig",
    *,
    vllm_config: "VllmConfig",
    engine_id: str,
    parallel: Parallel,
) -> Layout:
    """The checked layout of one worker, absolute addresses.

    Raises :class:`ConfigError` (it cannot be carried) or :class:`PlanError` (its sources contradict each other),
    naming the layer.
    """
    groups = transfer_groups(kv_cache_config, vllm_config, parallel=parallel)
    _check_leftovers(kv_caches, kv_cache_config)
    owners = _owners(kv_caches, groups)
    reader = _Reader(Model(vllm_config, parallel), kv_cache_config, _placements(kv_cache_config))
    components: list[Component] = []
    for number, group in enumerate(groups):
        for name, spec in group.layers:
            if name in owners:
                components += reader.components(_Layer(name, spec, number), kv_caches[name])
    tensors = [tensor for name in owners for tensor in tensors_of(kv_caches[name])]
    layout = Layout(engine_id, parallel, _regions(tensors), tuple(g.group for g in groups), tuple(components))
    check_layout(layout)
    return layout


def parallel_of_this_process(vllm_config: "VllmConfig") -> Parallel:
    """Where this process stands, from vLLM's own process groups."""
    config = vllm_config.parallel_config
    return Parallel(
        parallel_state.get_tp_group().rank_in_group,
        config.tensor_parallel_size,
        parallel_state.get_pp_group().rank_in_group,
        config.pipeline_parallel_size,
        parallel_state.get_pcp_group().rank_in_group,
        config.prefill_context_parallel_size,
    )


# ------------------------------------------------------------------------------------- which tensors, which memory


def _owners(kv_caches: Caches, groups: Iterable[TransferGroup]) -> frozenset[str]:
    """Layers to list: all of the specs but those that share the cache of an earlier layer of their own group."""
    owners: dict[tuple[int, Any], str] = {}
    for number, group in enumerate(groups):
        for name, _ in group.layers:
            if name not in kv_caches:
                raise _refused(name, "its spec has a cache, but no tensor was registered for it")
            owners.setdefault((number, _identity(kv_caches[name])), name)
    return frozenset(owners.values())


def _check_leftovers(kv_caches: Caches, kv_cache_config: "KVCacheConfig") -> None:
    """Every registered tensor is some group's, or shares the cache of a layer that is."""
    named = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    known = {_identity(cache) for name, cache in kv_caches.items() if name in named}
    for name, cache in kv_caches.items():
        if name not in named and _identity(cache) not in known:
            raise _refused(name, "a cache was registered for it that no cache group owns")


def _identity(cache: Any) -> tuple[Any, ...]:
    return tuple((t.data_ptr(), tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in tensors_of(cache))


def tensors_of(cache: Any) -> tuple[Any, ...]:
    """Of one entry of what vLLM registers."""
    return tuple(cache) if isinstance(cache, list | tuple) else (cache,)


def _regions(tensors: Iterable[Any]) -> tuple[Region, ...]:
    """The memory behind the tensors: whole storages, joined where one lies in another."""
    spans = {(_memory(t), t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}
    regions: list[Region] = []
    for memory, address, nbytes in sorted(spans):
        last = regions[-1] if regions else None
        if last is not None and last.memory == memory and address < last.stop:
            stop = max(last.stop, address + nbytes)
            regions[-1] = Region(last.address, stop - last.address, memory)
        else:
            regions.append(Region(address, nbytes, memory))
    return tuple(regions)


def _memory(tensor: Any) -> str:
    device = tensor.device
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def view_of(tensor: Any) -> View:
    """A tensor without torch."""
    item = tensor.element_size()
    return View(tensor.data_ptr(), tuple(tensor.shape), tuple(item * s for s in tensor.stride()), item)


# --------------------------------------------------------------------------------------------------- one layer


@dataclass(frozen=True, slots=True)
class _Place:
    """Where vLLM's own configuration puts a layer."""

    offset: int
    block_stride: int
    is_host: bool


def _placements(kv_cache_config: "KVCacheConfig") -> dict[str, _Place]:
    return {
        name: _Place(t.offset + place * t.layer_stride, t.block_stride, t.host_resident)
        for t in kv_cache_config.kv_cache_tensors
        for place, name in enumerate(t.layers)
    }


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    spec: Any
    group: int

    @property
    def index(self) -> int:
        """The layer's number as its name tells it: for people, and for the model's per-layer configuration."""
        return next((int(part) for part in self.name.split(".") if part.isdigit()), 0)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one layer after the other."""

    model: Model
    config: "KVCacheConfig"
    places: Mapping[str, _Place]

    def components(self, layer: _Layer, cache: Any) -> tuple[Component, ...]:
        """The components of one layer. A fetch does without those of a draft that the producer does not have."""
        found = self._read(layer, cache)
        if not self.model.is_draft(layer.name, layer.index):
            return found
        return tuple(msgspec.structs.replace(one, optional=True) for one in found)

    def _read(self, layer: _Layer, cache: Any) -> tuple[Component, ...]:
        if isinstance(layer.spec, MambaSpec):
            return tuple(self._state(layer, cache))
        tensors = tensors_of(cache)
        if len(tensors) != 1:
            raise _refused(layer.name, f"an attention cache of {len(tensors)} tensors is not known here")
        if isinstance(layer.spec, CircularBufferSpec):
            return tuple(self._ring(layer, tensors[0]))
        return tuple(self._attention(layer, tensors[0]))

    def _paging(self, layer: _Layer, tensor: Any) -> Paging:
        paging = paging_of(view_of(tensor), self.config.num_blocks, layer=layer.name)
        place = self.places.get(layer.name)
        if place is not None:
            offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
            _agree(layer.name, "offset in its storage", offset, place.offset)
            _agree(layer.name, "block stride", paging.block_stride, place.block_stride)
        return paging

    def _attention(self, layer: _Layer, tensor: Any) -> Iterator[Component]:
        spec, view = layer.spec, view_of(tensor)
        paging = self._paging(layer, tensor)
        check_page(view, _page_spec(spec), paging, layer=layer.name)
        backend = self.model.backend(layer.name, spec)
        page = self._page(layer, view, backend=backend, ratio=paging.kernel_blocks)
        page, paging = _as_cut(page, paging, backend)
        for part in parts_of(page):
            yield _component(layer, part, address=view.address, paging=paging)

    def _page(self, layer: _Layer, view: View, *, backend: Backend, ratio: int) -> Page:
        spec = layer.spec
        return Page(
            layer=layer.name,
            backend=backend.name,
            kernel=backend.kernel,
            order=self.config.kv_cache_layout or "unknown",
            cache=backend.cache,
            tokens=spec.block_size // ratio,
            state_tokens=Fraction(spec.tokens_per_state),
            slots=view.shape[1],
            rows=view.shape[2],
            width=view.shape[3] * view.itemsize,
            slot_stride=view.strides[1],
            row_stride=view.strides[2],
            itemsize=view.itemsize,
            heads=self.model.heads(layer.name, layer.index, spec=spec),
            repacked=spec.num_head_slots is not None,
            key_size=spec.head_size,
            value_size=spec.head_size_v,
        )

    def _ring(self, layer: _Layer, tensor: Any) -> Iterator[Component]:
        view = view_of(tensor)
        paging = self._paging(layer, tensor)
        check_page(view, _page_spec(layer.spec), paging, layer=layer.name)
        if paging.kernel_blocks != 1 or not view.is_dense_inside:
            raise _refused(layer.name, f"a ring buffer whose block is not one run: shape {view.shape}, {view.strides}")
        backend = self.model.backend(layer.name, layer.spec)
        kind = opaque_type(backend.name, backend.cache, order=backend.kernel, tokens=layer.spec.block_size)
        nbytes = layer.spec.unpadded_page_size_bytes
        tp = self.model.tp
        axis = shard_axis(Heads(tp.rank, 1, tp.size), nbytes)
        yield _component(layer, Part("ring", 0, (axis,), Content(nbytes, kind)), address=view.address, paging=paging)

    def _state(self, layer: _Layer, cache: Any) -> Iterator[Component]:
        tensors, spec = tensors_of(cache), self.model.state(layer.name, layer.spec)
        if len(tensors) != 1:
            raise _refused(layer.name, f"a state of {len(tensors)} tensors instead of one raw page is not known here")
        view, live = view_of(tensors[0]), sum(state.nbytes for state in spec.states)
        paging = self._paging(layer, tensors[0])
        if paging.kernel_blocks != 1:
            raise _refused(layer.name, f"a state block cut into {paging.kernel_blocks} kernel blocks")
        _agree(layer.name, "live bytes of a state", layer.spec.state_content_size_bytes, live)
        if live > view.strides[0] or not view.is_dense_inside:
            raise _refused(layer.name, f"a state of {live} bytes in blocks of shape {view.shape}, {view.strides}")
        for part in state_parts(spec):
            yield _component(layer, part, address=view.address, paging=paging)


def _page_spec(spec: Any) -> PageSpec:
    return PageSpec(
        block_tokens=spec.block_size,
        slots=spec.num_heads,
        state_tokens=Fraction(spec.tokens_per_state),
        content_nbytes=spec.state_content_size_bytes,
        page_nbytes=spec.unpadded_page_size_bytes,
    )


def _as_cut(page: Page, paging: Paging, backend: Backend) -> tuple[Page, Paging]:
    """The page as the kernel sees it, where a packed block holds kernel blocks that the tensor does not show."""
    sizes = backend.kernel_blocks
    supported = [s for s in sizes if isinstance(s, int)]
    if not cuts_pages(backend.name) or len(supported) != len(sizes) or not sizes or page.tokens in supported:
        return page, paging
    tokens = max((s for s in supported if page.tokens % s == 0), default=page.tokens)
    pieces = page.tokens // tokens
    if pieces == 1 or page.slots != 1 or page.rows % pieces:
        return page, paging
    rows = page.rows // pieces
    return replace(page, rows=rows, tokens=tokens), split_further(paging, pieces, rows * page.row_stride)


def _component(layer: _Layer, part: Part, *, address: int, paging: Paging) -> Component:
    return Component(
        layer=layer.name,
        layer_index=layer.index,
        component=part.name,
        group=layer.group,
        address=address + part.offset,
        num_blocks=paging.num_blocks,
        block_stride=paging.block_stride,
        kernel_blocks=paging.kernel_blocks,
        kernel_stride=paging.kernel_stride,
        tokens_per_row=part.tokens_per_row,
        axes=part.axes,
        content=part.content,
    )


def _agree(layer: str, what: str, tensor: int, config: int) -> None:
    if tensor != config:
        raise _refused(layer, f"{what}: the tensor has {tensor}, vLLM's configuration {config}")


def _refused(layer: str, what: str) -> ConfigError:
    return ConfigError(ConfigReason.UNSUPPORTED_MODEL, f"layer {layer!r}: {what}")
