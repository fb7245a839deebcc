"""Every reason of a refusal is on its page, with a command and a message that the command really gives.

The inputs of each example are built here; the command and the message are read from the page.
"""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.errors import PlanReason
from kvferry.layout import Axis, Component, Content, Group, Layout, Region, encode_layout
from kvferry.plan import BlockTable, TransferRequest, encode_request
from kvferry.testing.commands import call
from kvferry.testing.layouts import page, state, worker

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "refusals.md").read_text()

Files = dict[str, bytes]


@dataclass(frozen=True)
class Section:
    """One reason on the page."""

    reason: str
    body: str

    def fenced(self, language: str) -> str:
        found: list[str] = re.findall(rf"```{language}\n(.*?)\n```", self.body, flags=re.DOTALL)
        assert len(found) == 1, f"{self.reason} has {len(found)} blocks of {language}"
        return found[0]


SECTIONS = {
    reason: Section(reason, body)
    for reason, body in re.findall(r"^## `([a-z-]+)`\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
}


def side(first: int = 0, count: int = 4, *, layers: int = 1, **more: Any) -> Layout:
    """A rank that holds ``count`` of four heads, 16 tokens a block, 8 blocks."""
    size = count * 16 * 128 * 8
    pages = [
        page(f"model.layers.{n}.self_attn", heads=(first, count, 4), tokens=16, nbytes=128, address=65_536 + n * size)
        for n in range(layers)
    ]
    return msgspec.structs.replace(worker(pages), **more)


def request(stop: int, producer: list[int], consumer: list[int], *, first: int = 0) -> bytes:
    tables = (BlockTable.of(producer, first_token=0),), (BlockTable.of(consumer, first_token=first),)
    return encode_request(TransferRequest(0, stop, *tables))


def files(producer: Layout, consumer: Layout, wanted: bytes | None = None) -> Files:
    sides = {"P0.json": encode_layout(producer), "D0.json": encode_layout(consumer)}
    return sides | ({} if wanted is None else {"R.json": wanted})


def invalid_layout() -> Files:
    return files(side(groups=(Group("attention", 32),)), side())


def invalid_request() -> Files:
    return files(side(), side(), request(64, [0, 1, 2, 3], [4, 5, 6], first=24))


def overlapping_memory() -> Files:
    one = page(
        "model.layers.3.self_attn", heads=(0, 2, 2), tokens=64, nbytes=576, kernel_blocks=12, block_stride=73_728
    )
    return files(worker([one]), side())


def outside_region() -> Files:
    return files(side(regions=(Region(65_536, 60_000),)), side())


def duplicate_blocks() -> Files:
    attention = page("model.layers.1.self_attn", tokens=16, nbytes=128)
    mixer = state("model.layers.0.mixer", nbytes=1024, group=1, block_stride=2048)
    hybrid = worker([attention, mixer], groups=[Group("attention", 16), Group("state", 16)])
    attends, keeps = BlockTable.of([1, 2], first_token=0), BlockTable.of([2])
    tables = (attends, BlockTable.of([5])), (attends, keeps)
    return files(hybrid, hybrid, encode_request(TransferRequest(0, 32, *tables)))


def incompatible_content() -> Files:
    def typed(nbytes: int, words: str) -> Layout:
        one = page("model.layers.0.self_attn", heads=(0, 4, 4), tokens=16, nbytes=nbytes)
        return worker([msgspec.structs.replace(one, content=Content(nbytes, words))])

    return files(typed(256, "bfloat16:k64+v64"), typed(128, "fp8_e4m3:k64+v64"))


def missing_layer() -> Files:
    return files(side(), side(layers=2))


def missing_coordinates() -> Files:
    return files(side(0, 2), side())


def missing_positions() -> Files:
    return files(side(), side(), request(48, [1, 2], [4, 5, 6]))


def limit_exceeded() -> Files:
    return files(side(), side(), request(128, list(range(8)), [7, 3, 5, 1, 4, 0, 6, 2]))


def unsupported() -> Files:
    axes = (Axis("side", 0, 2, 2, 1 << 20), Axis("token", 0, 16, 16, 64))
    one = Component("model.layers.0.self_attn", 0, "kv", 0, 1 << 20, 8, 1024, axes, Content(64, "bfloat16"), 1, 1024, 1)
    regions = [Region(1 << 20, 8192), Region(1 << 21, 8192, "cuda:0")]
    return files(worker([one], regions=regions), side())


EXAMPLES: dict[PlanReason, Callable[[], Files]] = {
    PlanReason.INVALID_LAYOUT: invalid_layout,
    PlanReason.INVALID_REQUEST: invalid_request,
    PlanReason.OVERLAPPING_MEMORY: overlapping_memory,
    PlanReason.OUTSIDE_REGION: outside_region,
    PlanReason.DUPLICATE_BLOCKS: duplicate_blocks,
    PlanReason.INCOMPATIBLE_CONTENT: incompatible_content,
    PlanReason.MISSING_LAYER: missing_layer,
    PlanReason.MISSING_COORDINATES: missing_coordinates,
    PlanReason.MISSING_POSITIONS: missing_positions,
    PlanReason.LIMIT_EXCEEDED: limit_exceeded,
    PlanReason.UNSUPPORTED: unsupported,
}


def test_the_page_has_one_section_for_each_reason_and_no_other() -> None:
    assert list(SECTIONS) == [reason.value for reason in PlanReason]
    assert set(EXAMPLES) == set(PlanReason)


@pytest.mark.parametrize("reason", PlanReason)
def test_every_section_has_cause_and_remedy(reason: PlanReason) -> None:
    body = SECTIONS[reason.value].body
    assert "**Cause.**" in body
    assert "**Remedy.**" in body


@pytest.mark.parametrize("reason", PlanReason)
def test_the_documented_command_gives_the_documented_answer(
    reason: PlanReason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in EXAMPLES[reason]().items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    section = SECTIONS[reason.value]
    program, *arguments = shlex.split(section.fenced("console").removeprefix("$ "))
    assert program == "kvferry"
    answer = call(arguments)
    assert answer.refusal["reason"] == reason.value
    documented = json.loads(section.fenced("json"))
    assert documented == {"error": answer.refusal}
