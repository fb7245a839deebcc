"""Random pairs of sides with a request, as the JSON dictionaries of the contract, for every feature that it has.

``random_case`` is a plain function of a ``random.Random``: case n of a fuzz run is named by its seed. ``cases`` is the
Hypothesis strategy over the same code, with the random draws made by Hypothesis, so that failures shrink.
"""

import copy
import json
import random
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.testing.case_faults import put_fault
from kvferry.testing.case_features import features_of
from kvferry.testing.case_memory import Shape, draw_regions, draw_storages, mix_memories, place
from kvferry.testing.case_model import (
    Json,
    Layer,
    Side,
    Tensor,
    chance,
    draw_groups,
    draw_layers,
    draw_side,
    kernel_blocks,
    share_of,
)
from kvferry.testing.case_request import draw_draft, draw_range, draw_tables

MAX_BYTES = 12_000
"""Cache bytes of all workers of one case together; a larger draw is thrown away."""

FAULTY_PERCENT = 26
"""Cases given a fault; some faults turn out to be none, so about a fifth must be refused."""


@dataclass(slots=True)
class Case:
    producers: list[Json]
    consumers: list[Json]
    request: Json
    fault: str | None = None
    """The fault that was put in, if any; the oracle says whether the case must be refused."""

    def to_json(self) -> str:
        """Complete and readable: paste it into a file to have the case back."""
        return json.dumps({"producers": self.producers, "consumers": self.consumers, "request": self.request})

    def copy(self) -> "Case":
        return copy.deepcopy(self)


def random_case(rng: random.Random) -> Case:
    """One case: mostly plannable, sometimes with a fault."""
    case = _right_case(rng)
    while _volume(case) > MAX_BYTES:
        case = _right_case(rng)
    if chance(rng, FAULTY_PERCENT):
        case.fault = put_fault((case.producers, case.consumers, case.request), rng)
    if case.fault is None:
        for file in (*case.producers, *case.consumers):
            mix_memories(file)
    return case


def cases() -> st.SearchStrategy[Case]:
    return st.randoms(use_true_random=False).map(random_case)


def features(case: Case) -> set[str]:
    """Names of the features of the contract that occur in a case (see ``case_features.EVERY``)."""
    return features_of(case.producers, case.consumers, case.request)


def _volume(case: Case) -> int:
    total = 0
    for file in case.producers + case.consumers:
        for part in file["components"]:
            size = part["num_blocks"] * part["kernel_blocks"] * part["content"]["nbytes"]
            for axis in part["axes"]:
                size *= axis["count"]
            total += size
    return total


def _right_case(rng: random.Random) -> Case:
    rings = chance(rng, 20)
    sides = [draw_side(rng, is_producer=producer, rings=rings) for producer in (True, False)]
    layers = draw_layers(rng, min(side.shards for side in sides))
    unit = max(tensor.row_tokens for layer in layers for tensor in layer.tensors)
    common: dict[object, int] = {}
    for side in sides:
        draw_groups(rng, side, layers, unit, common)
    start, stop = draw_range(rng, sides)
    files, tables = [], []
    for side in sides:
        drafts = [draw_draft(rng, side, group, start, stop) for group in side.groups]
        drawn = draw_tables(rng, side, drafts)
        tables.append(drawn.tables)
        files.append(_draw_files(rng, side, listed=_listed(rng, side, layers), num_blocks=drawn.num_blocks))
    request: Json = {
        "format": "kvferry.request/1",
        "tokens": {"start": start, "stop": stop},
        "producer": tables[0],
        "consumer": tables[1],
    }
    return Case(files[0], files[1], request)


def _listed(rng: random.Random, side: Side, layers: list[Layer]) -> list[tuple[Layer, Tensor]]:
    """What one side has: all, but for optional components on the producer's side and some on the consumer's."""
    pairs = [(layer, tensor) for layer in layers for tensor in layer.tensors]
    if side.is_producer:
        return [(layer, tensor) for layer, tensor in pairs if not (tensor.optional and chance(rng, 75))]
    gone = {layer.name for layer in layers if len(layers) > 1 and chance(rng, 6)}
    return [(layer, tensor) for layer, tensor in pairs if layer.name not in gone]


def _draw_files(
    rng: random.Random, side: Side, *, listed: list[tuple[Layer, Tensor]], num_blocks: list[int]
) -> list[Json]:
    files = []
    for stage in range(side.stages):
        for rank in range(side.ranks):
            shapes = [
                _draw_shape(rng, side, layer, tensor, shard=rank // side.ring, num_blocks=num_blocks)
                for layer, tensor in listed
                if stage in side.stages_of[layer.name]
            ]
            files.append(_draw_file(rng, side, shapes, stage=stage, rank=rank))
    return files


def _draw_shape(
    rng: random.Random, side: Side, layer: Layer, tensor: Tensor, *, shard: int, num_blocks: list[int]
) -> Shape:
    group = side.group_of[layer.name]
    kernels = kernel_blocks(rng, side, layer, tensor)
    axes: list[Json] = [{"name": name, "start": 0, "count": total, "total": total} for name, total in tensor.axes]
    if tensor.axes:
        axes[0]["start"], axes[0]["count"] = share_of(rng, side, layer, tensor, shard=shard)
    if layer.kind == "attention":
        rows = side.groups[group].block_tokens // tensor.row_tokens // kernels
        axes.insert(rng.randint(0, len(axes)), {"name": "token", "start": 0, "count": rows, "total": rows})
    part: Json = {
        "layer": layer.name,
        "layer_index": layer.index,
        "component": tensor.name,
        "group": group,
        "num_blocks": num_blocks[group],
        "kernel_blocks": kernels,
        "tokens_per_row": tensor.row_tokens,
        "axes": axes,
        "content": {"nbytes": tensor.nbytes, "type": tensor.content_type},
    }
    if tensor.optional:
        part["optional"] = True
    dims = [("block", num_blocks[group]), ("kernel", kernels), *((a["name"], a["count"]) for a in axes)]
    return Shape(part, dims, tensor.nbytes, group)


def _draw_file(rng: random.Random, side: Side, shapes: list[Shape], *, stage: int, rank: int) -> Json:
    storages = draw_storages(rng, shapes, side.overlay)
    bounds = place(rng, storages)
    return {
        "format": "kvferry.layout/1",
        "engine_id": "prefill-0" if side.is_producer else "decode-0",
        "parallel": {
            "tp_rank": rank,
            "tp_size": side.ranks,
            "pp_rank": stage,
            "pp_size": side.stages,
            "pcp_rank": 0,
            "pcp_size": 1,
        },
        "regions": draw_regions(rng, bounds, shapes),
        "groups": [_group_json(side, index, rank=rank) for index in range(len(side.groups))],
        "components": [shape.part for shape in shapes],
    }


def _group_json(side: Side, index: int, *, rank: int) -> Json:
    group = side.groups[index]
    value: Json = {"kind": group.kind, "block_tokens": group.block_tokens}
    if group.kind == "attention":
        value["sliding_window"] = group.window
    if group.chunk is not None:
        value["chunk"] = group.chunk
    if group.ring is not None:
        value["context_parallel"] = {
            "rank": rank % side.ring,
            "size": group.ring[0],
            "interleave": group.ring[1],
        }
    return value
