"""The demo with real engines: it succeeds, its last line counts, and it does not succeed when it must not."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.testing.demo_vllm import CELLS, demo_prompts, run_demo
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.transfer_report import read_reports

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]


def shown(cells: list[str], folder: Path, forge: EngineForge, transport: str = "mooncake") -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=120)
    status = run_demo(cells=cells, folder=folder, console=console, forge=forge, transport=transport)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def test_every_request_is_equal_and_every_transfer_proven(tmp_path: Path, forge: EngineForge) -> None:
    status, text = shown([*CELLS], tmp_path, forge)
    print(text)
    last = text.splitlines()[-1]
    match = re.fullmatch(r"demo: (\d+)/(\d+) requests equal, (\d+) transfers, (\d+) bytes, 0 mismatches", last)
    assert match, last
    equal, requests, transfers, nbytes = map(int, match.groups())
    assert equal == requests == transfers == sum(len(demo_prompts(name)) for name in CELLS)
    reports = [transfer for name in CELLS for transfer in read_reports([tmp_path / name / "transfers.jsonl"]).values()]
    assert nbytes == sum(transfer.nbytes for transfer in reports)
    assert all(line.transport == "mooncake:tcp" for transfer in reports for line in transfer.producer)
    assert any(line.start == 768 for transfer in reports for line in transfer.consumer)  # the repeated prompt
    assert status == 0


def test_an_engine_that_does_not_start_ends_the_demo_with_its_reason(tmp_path: Path, forge: EngineForge) -> None:
    status, text = shown(["dense"], tmp_path, forge, transport="pigeon")
    assert status == 1
    assert "pigeon" in text
    assert text.splitlines()[-1] == "demo: 0/0 requests equal, 0 transfers, 0 bytes, 1 mismatches"
