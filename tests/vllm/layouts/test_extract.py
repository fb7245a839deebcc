"""Layouts from tensors that vLLM's own allocator makes of its own configurations; layers are stand-ins.

Values are written through vLLM's views, as kernels do that go by strides, and read at the layout's addresses.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.errors import ConfigError, PlanError
from kvferry.layout import Component, Layout, Parallel

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ONE = Parallel(0, 1, 0, 1, 0, 1)


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """vLLM's own classes; imported late, since importing them warns."""
    import torch
    from vllm.config import VllmConfig
    from vllm.v1 import kv_cache_interface as specs
    from vllm.v1.worker.utils import allocate_kv_cache

    return SimpleNamespace(torch=torch, config=VllmConfig, specs=specs, allocate=allocate_kv_cache)


class Backend:
    """What is asked of an attention backend."""

    def __init__(self, name: str, sizes: tuple[int, ...] = ()) -> None:
        self.get_name = lambda: name
        self.get_supported_kernel_block_sizes = lambda spec: list(sizes)


class Worker:
    """A worker's caches: groups of (layer names, spec), placed by vLLM's allocator."""

    def __init__(self, vllm: SimpleNamespace, *groups: tuple[list[str], Any], backend: Backend | None = None) -> None:
        self.vllm = vllm
        self.groups = [vllm.specs.KVCacheGroupSpec(names, spec) for names, spec in groups]
        self.tensors: list[Any] = []
        self.config = vllm.config()
        layer = SimpleNamespace(get_attn_backend=lambda: backend or Backend("FLASH_ATTN"))
        for names, _ in groups:
            self.config.compilation_config.static_forward_context.update(dict.fromkeys(names, layer))

    def place(self, names: list[str], *, size: int, layer_stride: int, block_stride: int, offset: int = 0) -> None:
        self.tensors.append(self.vllm.specs.KVCacheTensor(size, names, layer_stride, block_stride, offset=offset))

    def allocate(self, num_blocks: int, *, order: str = "LBHNC", kernel: list[int] | None = None) -> None:
        self.cache_config = self.vllm.specs.KVCacheConfig(num_blocks, self.tensors, self.groups, kv_cache_layout=order)
        layout = self.vllm.specs.KVCacheLayout[order]
        self.caches = self.vllm.allocate(self.cache_config, self.vllm.torch.device("cpu"), layout, kernel)

    def layout(self, parallel: Parallel = ONE) -> Layout:
        from kvferry.vllm.layouts.extract import layout_of_worker

        return layout_of_worker(
            self.caches, self.cache_config, vllm_config=self.config, engine_id="e", parallel=parallel
        )


def full(vllm: SimpleNamespace, block: int = 16, **changed: Any) -> Any:
    plain = {"block_size": block, "num_kv_heads": 2, "head_size": 8, "dtype": vllm.torch.bfloat16}
    return vllm.specs.FullAttentionSpec(**{**plain, **changed})


def read(tensor: Any, component: Component, block: int, page: int, **at: int) -> np.ndarray:
    """Content at one place of the storage of ``tensor``, by the file form's formula."""
    import torch

    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    address = component.address + block * component.block_stride + page * component.page_stride
    address += sum((at[a.name] - a.start) * a.stride for a in component.axes) - storage.data_ptr()
    return memory[address : address + component.content.nbytes]


def every_row(component: Component) -> Iterator[tuple[int, int, int, int]]:
    axes = {a.name: a for a in component.axes}
    yield from np.ndindex(component.num_blocks, component.pages, axes["head"].count, axes["token"].count)


STRIDES = {
    "LBHNC": (5 * 1024, 1024), "LBNHC": (5 * 1024, 1024), "LHBNC": (5 * 1024, 512),
    "BLHNC": (1024, 2048), "BLNHC": (1024, 2048), "BHLNC": (512, 2048),
}  # fmt: skip


@pytest.mark.parametrize("order", STRIDES)
def test_every_layout_of_vllm_is_read_where_it_is_written(order: str, vllm: SimpleNamespace) -> None:
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    worker = Worker(vllm, (names, full(vllm)))
    layer_stride, block_stride = STRIDES[order]
    worker.place(names, size=10 * 1024, layer_stride=layer_stride, block_stride=block_stride)
    worker.allocate(5, order=order)
    layout = worker.layout()
    assert [c.layer_index for c in layout.components] == [0, 1]
    for component in layout.components:
        tensor = worker.caches[component.layer]
        tensor.copy_(vllm.torch.randn(tensor.shape))
    for component in layout.components:
        tensor = worker.caches[component.layer]
        for block, page, head, token in every_row(component):
            expected = tensor[block, head, token].view(vllm.torch.uint8).numpy()
            assert (read(tensor, component, block, page, head=head, token=token) == expected).all()


def test_kernel_blocks_come_from_the_tensor(vllm: SimpleNamespace) -> None:
    worker = Worker(vllm, (["a.0"], full(vllm, 544)))
    page = 544 * 2 * 32
    worker.place(["a.0"], size=3 * page, layer_stride=3 * page, block_stride=page)
    worker.allocate(3, kernel=[32])
    (component,) = worker.layout().components
    assert (component.pages, component.page_stride, component.block_stride) == (17, 2048, page)


MODEL_AND_DRAFT = (["model.layers.0.attn", "model.layers.1.attn"], "draft_model.layers.0.attn")


def two_kernels(vllm: SimpleNamespace, backend: Backend) -> Worker:
    """Blocks of 64 tokens: two kernel blocks in the model's layers, four in the draft's."""
    names, draft = MODEL_AND_DRAFT
    groups = (names, full(vllm, 64)), ([draft], full(vllm, 64, num_kv_heads=4, head_size=4))
    worker = Worker(vllm, *groups, backend=backend)
    page = 64 * 64
    worker.place(names, size=10 * page, layer_stride=5 * page, block_stride=page)
    worker.place([draft], size=10 * page, layer_stride=10 * page, block_stride=page)
    worker.allocate(5, kernel=[32, 16])
    return worker


def test_each_group_has_the_kernel_blocks_of_its_own_tensors(vllm: SimpleNamespace) -> None:
    """Layers that only guess may have another backend than the model's, with blocks of another size."""
    names, draft = MODEL_AND_DRAFT
    worker = two_kernels(vllm, Backend("FLASH_ATTN"))
    page = 64 * 64
    layout = worker.layout()
    assert {c.layer: (c.group, c.pages, c.page_stride, c.block_stride) for c in layout.components} == {
        **dict.fromkeys(names, (0, 2, 32 * 64, page)),
        draft: (1, 4, 16 * 64, page),
    }
    heads = {c.layer: {axis.name: axis.count for axis in c.axes} for c in layout.components}
    assert heads == {**{name: {"head": 2, "token": 32} for name in names}, draft: {"head": 4, "token": 16}}
    assert {group.block_tokens for group in layout.groups} == {64}
    for component in layout.components:
        tensor = worker.caches[component.layer]
        tensor.copy_(vllm.torch.randn(tensor.shape))
        for block, page_of_it, head, token in every_row(component):
            row = tensor[block * component.pages + page_of_it, head, token].view(vllm.torch.uint8).numpy()
            assert (read(tensor, component, block, page_of_it, head=head, token=token) == row).all()


def test_pages_of_an_unknown_backend_are_of_the_kernel_blocks_of_their_group(vllm: SimpleNamespace) -> None:
    names, draft = MODEL_AND_DRAFT
    components = two_kernels(vllm, Backend("SOMETHING_NEW")).layout().components
    assert {c.layer: (c.pages, c.content.nbytes, c.content.type.rpartition(":")[2]) for c in components} == {
        **dict.fromkeys(names, (2, 32 * 64, "32")),
        draft: (4, 16 * 64, "16"),
    }


def state(vllm: SimpleNamespace, **changed: Any) -> Any:
    plain = {"block_size": 16, "shapes": ((2, 64),), "dtypes": (vllm.torch.float32,)}
    kind = vllm.specs.MambaAttentionBackendEnum.SHORT_CONV
    return vllm.specs.MambaSpec(**{**plain, "mamba_type": kind, **changed})


def test_groups_overlay_and_each_moves_its_own_live_bytes(vllm: SimpleNamespace) -> None:
    worker = Worker(vllm, (["conv.0"], state(vllm, page_size_padded=1024)), (["attn.1"], full(vllm)))
    worker.place(["conv.0"], size=5120, layer_stride=5120, block_stride=1024)
    worker.place(["attn.1"], size=5120, layer_stride=5120, block_stride=1024)
    worker.allocate(5)
    layout = worker.layout()
    assert [(g.kind, g.block_tokens) for g in layout.groups] == [("state", 16), ("attention", 16)]
    assert [(c.component, c.live_bytes, c.block_stride) for c in layout.components] == [
        ("conv", 512, 1024),
        ("kv", 1024, 1024),
    ]
    assert len({c.address for c in layout.components}) == 1
    assert len(layout.regions) == 1


def test_two_regions_of_one_block_keep_length_stride_and_offset_apart(vllm: SimpleNamespace) -> None:
    # blocks of 1,000 bytes: 600 live at 0, 300 live at 600, 100 of padding
    one, other = full(vllm, 15, num_kv_heads=1, head_size=10), full(vllm, 15, num_kv_heads=1, head_size=5)
    worker = Worker(vllm, (["a.0"], one), (["b.1"], other))
    worker.place(["a.0"], size=10_000, layer_stride=10_000, block_stride=1000)
    worker.place(["b.1"], size=10_000, layer_stride=10_000, block_stride=1000, offset=600)
    worker.allocate(10)
    layout = worker.layout()
    first, second = layout.components
    base = layout.regions[0].address
    assert (first.address - base + 3 * first.block_stride, first.last_in_block) == (3000, 600)
    assert (second.address - base + 3 * second.block_stride, second.last_in_block) == (3600, 300)


def test_caches_of_one_address_and_two_lengths_are_both_listed(vllm: SimpleNamespace) -> None:
    worker = Worker(vllm, (["swa.0"], full(vllm, 16)), (["wide.1"], full(vllm, 32)))
    worker.place(["swa.0"], size=20_480, layer_stride=20_480, block_stride=2048)
    worker.place(["wide.1"], size=20_480, layer_stride=20_480, block_stride=2048)
    worker.allocate(10)
    assert [c.live_bytes for c in worker.layout().components] == [1024, 2048]


def simple(vllm: SimpleNamespace, spec: Any, *, name: str = "model.layers.0.attn") -> Worker:
    worker = Worker(vllm, ([name], spec))
    page = spec.page_size_bytes
    worker.place([name], size=4 * page, layer_stride=4 * page, block_stride=page)
    worker.allocate(4)
    return worker


def test_windows_and_chunks(vllm: SimpleNamespace) -> None:
    common = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": vllm.torch.bfloat16}
    window = vllm.specs.SlidingWindowSpec(**common, sliding_window=48, extra_retained_tokens=3)
    assert simple(vllm, window).layout().groups[0].sliding_window == 50
    chunk = vllm.specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=64)
    assert simple(vllm, chunk).layout().groups[0].chunk == 64
    noted = full(vllm, sliding_window=48)
    assert simple(vllm, noted).layout().groups[0].sliding_window is None


def test_positions_are_dealt_out_over_decode_context_parallel_ranks(vllm: SimpleNamespace) -> None:
    latent = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": vllm.torch.bfloat16}
    worker = simple(vllm, vllm.specs.MLAAttentionSpec(**latent))
    worker.config.parallel_config.decode_context_parallel_size = 2
    worker.config.parallel_config.cp_kv_cache_interleave_size = 4
    shares = [worker.layout(Parallel(rank, 4, 0, 1, 0, 1)).groups[0].context_parallel for rank in range(4)]
    assert [(s.rank, s.size, s.interleave) for s in shares if s] == [(0, 2, 4), (1, 2, 4), (0, 2, 4), (1, 2, 4)]


def test_a_missing_tensor_is_refused_by_name(vllm: SimpleNamespace) -> None:
    worker = Worker(vllm, (["a.kv", "a.index"], full(vllm)))
    worker.place(["a.kv", "a.index"], size=8192, layer_stride=4096, block_stride=1024)
    worker.allocate(4)
    del worker.caches["a.index"]
    with pytest.raises(ConfigError, match=r"'a\.index'.*no tensor was registered"):
        worker.layout()


def test_a_tensor_that_no_group_owns_is_refused_unless_it_is_shared(vllm: SimpleNamespace) -> None:
    worker = simple(vllm, full(vllm))
    (owner,) = worker.caches.values()
    worker.caches["model.layers.9.attn"] = owner
    assert [c.layer for c in worker.layout().components] == ["model.layers.0.attn"]
    worker.caches["model.layers.9.attn"] = owner[:2]
    with pytest.raises(ConfigError, match=r"'model\.layers\.9\.attn'.*no cache group owns"):
        worker.layout()


def test_sharing_layers_inside_a_group_are_listed_once(vllm: SimpleNamespace) -> None:
    worker = simple(vllm, full(vllm))
    worker.groups[0].layer_names.append("model.layers.9.attn")
    worker.caches["model.layers.9.attn"] = worker.caches["model.layers.0.attn"]
    assert [c.layer for c in worker.layout().components] == ["model.layers.0.attn"]


def test_groups_that_vllm_does_not_transfer_are_left_out(vllm: SimpleNamespace) -> None:
    worker = Worker(vllm, (["hot.0"], full(vllm)), (["attn.1"], full(vllm)))
    worker.place(["hot.0", "attn.1"], size=8192, layer_stride=4096, block_stride=1024)
    worker.groups[0] = replace(worker.groups[0], enable_kv_transfer=False)
    worker.allocate(4)
    layout = worker.layout()
    assert [(c.layer, c.group) for c in layout.components] == [("attn.1", 0)]
    assert len(layout.groups) == 1


def test_encoder_decoder_attention_is_refused_by_name(vllm: SimpleNamespace) -> None:
    cross = vllm.specs.CrossAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=vllm.torch.bfloat16)
    worker = simple(vllm, cross, name="decoder.layers.0.cross")
    with pytest.raises(ConfigError, match=r"'decoder\.layers\.0\.cross'.*CrossAttentionSpec"):
        worker.layout()


def test_ring_buffers_are_opaque_states_of_equal_shards(vllm: SimpleNamespace) -> None:
    ring = vllm.specs.CircularBufferSpec(12, num_kv_heads=1, head_size=8, head_size_v=0, dtype=vllm.torch.float32)
    layout = simple(vllm, ring).layout(Parallel(1, 2, 0, 1, 0, 1))
    (component,) = layout.components
    assert (layout.groups[0].kind, component.component, component.content.nbytes) == ("state", "ring", 12 * 32)
    assert [(a.name, a.start, a.count, a.total) for a in component.axes] == [("shard", 1, 1, 2)]
    assert component.content.type == "opaque:FLASH_ATTN:float32:cpu:12"


def test_a_tensor_that_contradicts_the_configuration_is_refused(vllm: SimpleNamespace) -> None:
    worker = simple(vllm, full(vllm))
    worker.tensors[0].block_stride = 512
    with pytest.raises(ConfigError, match="block stride: the tensor has 1024, vLLM's configuration 512"):
        worker.layout()


def test_a_spec_that_contradicts_the_tensor_is_refused(vllm: SimpleNamespace) -> None:
    worker = simple(vllm, full(vllm))
    worker.groups[0].kv_cache_spec = full(vllm, 32)
    with pytest.raises(PlanError, match="transfer length 2048 exceeds block stride 1024"):
        worker.layout()


def test_a_packed_page_is_cut_as_its_backend_cuts_it(vllm: SimpleNamespace) -> None:
    packed = vllm.specs.MLAAttentionSpec(
        512, num_kv_heads=1, head_size=512, dtype=vllm.torch.uint8, tokens_per_state=4, state_content_bytes=584,
        cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4",
    )  # fmt: skip
    worker = Worker(vllm, (["attn.0"], packed), backend=Backend("FLASHMLA_SPARSE_DSV4", (256,)))
    page = packed.page_size_bytes
    worker.place(["attn.0"], size=4 * page, layer_stride=4 * page, block_stride=page)
    worker.allocate(4)
    parts = {c.component: c for c in worker.layout().components}
    assert {(c.pages, c.page_stride, c.row_tokens) for c in parts.values()} == {(2, 64 * 584, 4)}
    assert parts["scale"].address - parts["data"].address == 64 * 576
