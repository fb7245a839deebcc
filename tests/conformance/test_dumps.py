"""Layouts of real models, as vLLM made them (``make dumps``), are planned as when they were written."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan import plan_dicts
from kvferry.testing.oracle import check_plan

DUMPS = Path(__file__).parent / "dumps"
PLANS = json.loads((DUMPS / "plans.json").read_text())
TAIL = 24
"""Tokens that the oracle looks at: it goes byte by byte."""


def side(name: str) -> list[dict[str, Any]]:
    paths = sorted((DUMPS / name).glob("rank-*.json"))
    assert paths
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("golden", PLANS, ids=lambda g: f"{g['producer']}-to-{g['consumer']}")
class TestDumps:
    def test_descriptors_and_bytes(self, golden: dict[str, Any]) -> None:
        plan = plan_dicts(side(golden["producer"]), side(golden["consumer"]), golden["request"])
        assert plan["stats"] == {"descriptors": golden["descriptors"], "bytes": golden["bytes"]}

    def test_the_end_of_the_request_byte_by_byte(self, golden: dict[str, Any]) -> None:
        producers, consumers = side(golden["producer"]), side(golden["consumer"])
        stop = golden["request"]["tokens"]["stop"]
        request = golden["request"] | {"tokens": {"start": stop - TAIL, "stop": stop}}
        assert check_plan(producers, consumers, request, plan_dicts(producers, consumers, request)) == []


def test_every_model_is_here_with_one_and_with_two_ranks() -> None:
    models = {(p["producer"].split("-")[0], len(side(p["producer"])), len(side(p["consumer"]))) for p in PLANS}
    names = {"qwen3", "lfm2", "gemma3", "deepseek_v2", "qwen3_next"}
    assert models >= {(name, *ranks) for name in names for ranks in ((1, 1), (1, 2), (2, 1))}
