"""The commands for people on random pairs, wrong ones too: never a traceback, and one story from all of them."""

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvferry.testing.commands import Answer, call
from kvferry.testing.strategies import Case, random_case

SEEDS = 40


def written(folder: Path, case: Case) -> tuple[list[Path], list[Path], Path]:
    sides = []
    for letter, side in (("P", case.producers), ("D", case.consumers)):
        paths = [folder / f"{letter}{place}.json" for place in range(len(side))]
        for path, layout in zip(paths, side, strict=True):
            path.write_text(json.dumps(layout))
        sides.append(paths)
    request = folder / "R.json"
    request.write_text(json.dumps(case.request))
    return sides[0], sides[1], request


def answered(answer: Answer) -> bool:
    """Whether the command answered; a refusal must be a proper one."""
    if answer.status == 0:
        assert answer.err == ""
        return True
    assert answer.refusal["reason"]
    return False


def picture(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert "nan" not in path.read_text()
    assert float(root.get("height", "0")) > 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_command_answers_or_refuses(seed: int, tmp_path: Path) -> None:
    case = random_case(random.Random(seed))
    producers, consumers, request = written(tmp_path, case)
    sides = ["--producer", *producers, "--consumer", *consumers]
    svg = tmp_path / "picture.svg"
    planned = answered(call(["plan", *sides, "--request", request, "--svg", svg, "--json"]))
    if planned:
        picture(svg)
    checked = call(["check", *sides, "--json"])
    plannable = answered(checked)
    assert plannable or not planned
    assert answered(call(["explain", *sides])) == plannable
    assert answered(call(["explain", *sides, "--request", request])) >= planned
    reports = [inspected(path, svg) for path in (*producers, *consumers)]
    if plannable:
        assert None not in reports
        every_byte_is_moved_once(json.loads(checked.out), reports[len(producers) :], case)


def inspected(path: Path, svg: Path) -> dict[str, Any] | None:
    answer = call(["inspect", path, "--json"])
    if not answered(answer):
        return None
    report: dict[str, Any] = json.loads(answer.out)
    if report["components"]:
        assert call(["inspect", path, "--svg", svg]).status == 0
        picture(svg)
    return report


def every_byte_is_moved_once(checked: dict[str, Any], consumers: list[dict[str, Any] | None], case: Case) -> None:
    """What ``check`` would move to a consumer is what ``inspect`` says that it holds."""
    if checked["warnings"] or any(c.get("optional") for d in case.consumers for c in d["components"]):
        return
    for place, report in enumerate(consumers):
        assert report is not None
        pairs = [pair for pair in checked["pairs"] if pair["consumer"] == place]
        held = sum(g["live_bytes_per_1000_tokens"] or 0 for g in report["groups"])
        state = sum(g["live_bytes_per_block"] for g in report["groups"] if g["kind"] == "state")
        assert sum(pair["bytes_per_1000_tokens"] for pair in pairs) == pytest.approx(held)
        assert sum(pair["bytes_per_state"] for pair in pairs) == state
