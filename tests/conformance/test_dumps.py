"""Layouts of real models, as vLLM made them (``make dumps``), are planned as when they were written, and rightly."""

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cli.plan import Planned, plan_transfers
from kvferry.layout import Layout, bind_layout, parse_layout
from kvferry.plan import TransferRequest, parse_request
from kvferry.testing.marked_memory import MarkedMemory, Tables

DUMPS = Path(__file__).parent / "dumps"
PLANS = json.loads((DUMPS / "plans.json").read_text())
golden_plans = pytest.mark.parametrize("golden", PLANS, ids=lambda g: f"{g['producer']}-to-{g['consumer']}")


def side(name: str) -> list[Layout]:
    layouts = [parse_layout(path.read_bytes()) for path in (DUMPS / name).glob("rank-*.json")]
    return sorted(layouts, key=lambda one: (one.parallel.pp_rank, one.parallel.tp_rank))


def plan(producers: Sequence[Layout], consumers: Sequence[Layout], request: TransferRequest) -> Planned:
    return plan_transfers([bind_layout(p) for p in producers], [bind_layout(c) for c in consumers], request)


def from_zero(layout: Layout) -> Layout:
    (region,) = layout.regions
    parts = tuple(msgspec.structs.replace(c, address=c.address - region.address) for c in layout.components)
    return msgspec.structs.replace(layout, regions=(msgspec.structs.replace(region, address=0),), components=parts)


def carry_out(planned: Planned) -> None:
    for transfer in planned.transfers:
        rows = transfer.descriptors
        for src, dst, nbytes in zip(rows.src.tolist(), rows.dst.tolist(), rows.nbytes.tolist(), strict=True):
            ctypes.memmove(dst, src, nbytes)


@golden_plans
def test_descriptors_and_bytes(golden: dict[str, Any]) -> None:
    request = parse_request(msgspec.json.encode(golden["request"]))
    planned = plan(side(golden["producer"]), side(golden["consumer"]), request)
    assert (planned.descriptors, planned.total_bytes) == (golden["descriptors"], golden["bytes"])


@golden_plans
def test_every_byte_that_is_needed_comes_from_its_place(golden: dict[str, Any]) -> None:
    request = parse_request(msgspec.json.encode(golden["request"]))
    producers, consumers = (
        [MarkedMemory(from_zero(layout)) for layout in side(golden[end])] for end in ("producer", "consumer")
    )
    sent = Tables(request.start, request.stop, request.producer)
    wanted = Tables(request.start, request.stop, request.consumer)
    for memory in producers:
        memory.fill(sent)
    carry_out(plan([m.layout for m in producers], [m.layout for m in consumers], request))
    for memory in consumers:
        wrong, looked_at = memory.check(wanted)
        assert wrong == []
        assert looked_at > 0
        assert memory.untouched_outside([wanted]) == 0


def test_every_model_is_here_with_one_and_with_two_ranks() -> None:
    found = {(p["producer"].split("-")[0], len(side(p["producer"])), len(side(p["consumer"]))) for p in PLANS}
    names = {"qwen3", "lfm2", "gemma3", "deepseek_v2", "qwen3_next"}
    assert found >= {(name, *ranks) for name in names for ranks in ((1, 1), (1, 2), (2, 1))}
