"""What vLLM's own MooncakeConnector would copy for a pair of layouts: its methods, on a carrier of the facts they read.

Used to compare numbers of descriptors and planning time in one run; needs vLLM. Regions are made from a layout the way
the connector registers tensors: one for each tensor whose blocks are compact (its length is the page, padding
included), one for each head of a tensor whose blocks are scattered, and one for each view into a *packed* row (its
length is what is live), which the connector merges, and lifts to the whole row, where both sides have the same row.
"""

import asyncio
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

from kvferry.layout import BoundLayout, Component
from kvferry.plan import BlockTable, TransferRequest
from kvferry.protocol import Pull

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"

Copies = tuple[list[int], list[int], list[int]]
"""(source addresses, destination addresses, lengths)."""


@dataclass(frozen=True, slots=True)
class UpstreamRank:
    """One worker and its place among the tensor-parallel ranks of its engine."""

    bound: BoundLayout
    tp_rank: int = 0
    tp_size: int = 1


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """What the connector knows of model and configuration."""

    kv_heads: int
    mla: bool = False
    packed: bool = False
    """Tensors are views into rows that hold several layers."""


def upstream_planner(
    producer: UpstreamRank, consumer: UpstreamRank, request: TransferRequest, model: UpstreamModel
) -> Callable[[], Copies]:
    """A call that plans ``request`` as the connector does; everything that it does once is done here."""
    module = importlib.import_module(MODULE)
    replicated = model.mla or producer.tp_size > model.kv_heads
    sides = [_regions(module, rank.bound, packed=model.packed) for rank in (producer, consumer)]
    local, remote, error = module._align_transfer_regions(*sides)
    assert error is None, error
    if producer.tp_size == consumer.tp_size or replicated:
        local, remote = module._coalesce_contiguous_transfer_regions(local, remote, promote_full_row=True)
    carrier = _carrier(module, producer, model, replicated=replicated)
    tables = [[_ids(table) for table in side] for side in (request.producer, request.consumer)]

    def plan() -> Copies:
        send = module.SendBlockMeta("p", "t", tables[0], asyncio.Event())
        asked = module.MooncakeXferMetadata(
            "host", 1, consumer.tp_size, consumer.tp_rank, {"d": ("t", tables[1])}, [], [], []
        )
        build = module.MooncakeConnectorWorker._build_transfer_params
        src, dst, nbytes, failed, fault = asyncio.run(build(carrier, [("d", send)], asked, local, remote))
        assert not failed, fault
        return src, dst, nbytes

    return plan


def upstream_answer(producer: UpstreamRank, pull: Pull, sent: Sequence[Sequence[int]], model: UpstreamModel) -> Copies:
    """What the connector copies for a pull of one request, as it came over the wire; raises what it answers else."""
    module = importlib.import_module(MODULE)
    replicated = model.mla or producer.tp_size > model.kv_heads
    remote = module._expand_transfer_regions(
        list(pull.kv_caches_base_addr),
        list(pull.block_lens),
        list(pull.kv_block_lens),
        list(pull.registered_layer_names),
        list(pull.registered_layer_indices),
        list(pull.registered_group_indices),
        [tuple(groups) for groups in pull.registered_shared_group_ids],
        list(pull.registered_row_offsets),
    )
    local, remote, error = module._align_transfer_regions(_regions(module, producer.bound, packed=False), remote)
    error = error or module._validate_asymmetric_region_lengths(
        local_regions=local,
        remote_regions=remote,
        local_tp_size=producer.tp_size,
        remote_tp_size=pull.remote_tp_size,
        producer_cache_replicated=replicated,
        total_num_kv_heads=None if model.mla else model.kv_heads,
    )
    if error is not None:
        raise ValueError(error)
    if producer.tp_size == pull.remote_tp_size or replicated:
        local, remote = module._coalesce_contiguous_transfer_regions(local, remote, promote_full_row=True)
    ((name, (transfer, lists)),) = pull.req_blocks.items()
    send = module.SendBlockMeta("p", transfer, [list(ids) for ids in sent], asyncio.Event())
    asked = module.MooncakeXferMetadata(
        "host",
        1,
        pull.remote_tp_size,
        pull.remote_tp_rank,
        {name: (transfer, [list(ids) for ids in lists])},
        [],
        [],
        [],
    )
    build = module.MooncakeConnectorWorker._build_transfer_params
    carrier = _carrier(module, producer, model, replicated=replicated)
    src, dst, nbytes, failed, fault = asyncio.run(build(carrier, [(name, send)], asked, local, remote))
    if failed:
        raise ValueError(fault)
    return src, dst, nbytes


def _ids(table: BlockTable) -> list[int]:
    ids: list[int] = table.ids.tolist()
    return ids


def _carrier(module: ModuleType, producer: UpstreamRank, model: UpstreamModel, *, replicated: bool) -> Any:
    placement = producer.bound.placement
    specs = [SimpleNamespace(kv_cache_spec=None) for _ in placement.groups]
    carrier = SimpleNamespace(
        kv_cache_config=SimpleNamespace(transfer_groups=specs, has_mamba_layers=False),
        _physical_blocks_per_logical_kv_block=max(component.pages for component in placement.components),
        use_mla=model.mla,
        tp_rank=producer.tp_rank,
        tp_size=producer.tp_size,
        transfer_topo=SimpleNamespace(total_num_kv_heads=model.kv_heads, local_replicates_kv_cache=replicated),
    )
    for name in ("_logical_to_kernel_block_ids", "_get_sender_transfer_plan", "_producer_cache_is_replicated"):
        setattr(carrier, name, MethodType(getattr(module.MooncakeConnectorWorker, name), carrier))
    return carrier


def _regions(module: ModuleType, bound: BoundLayout, *, packed: bool) -> list[Any]:
    regions = []
    for placed in bound.placement.placed:
        component = placed.component
        address = bound.binding.bases[placed.storage] + component.address
        stride = component.page_stride if component.pages > 1 else component.block_stride
        live = component.live_bytes // component.pages
        for offset in _scattered(component, stride):
            length = live if packed else stride
            row = component.address if packed else -1
            regions.append(
                module.TransferRegion(
                    component.layer, component.layer_index, address + offset, stride, length, component.group, (), row
                )
            )
    return regions


def _scattered(component: Component, stride: int) -> list[int]:
    """Where the blocks of each region begin: [0], or one place a head where heads lie outside of blocks."""
    heads = [axis for axis in component.global_axes if axis.stride >= stride and axis.count > 1]
    return [head * axis.stride for axis in heads for head in range(axis.count)] or [0]
