"""A whole fleet is replaced under load, process by process: from vLLM's own connector to kvferry.

The same with processes that nothing was forked from, and with more requests, is ``make rolling-upgrade``.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.rolling_upgrade import Upgrade, upgrade

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.timeout(900)]


def test_a_fleet_moves_from_upstream_to_kvferry_under_load_without_a_wrong_answer(
    tmp_path: Path, model_folder: Path, forge: EngineForge, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    rolled = upgrade(Upgrade(build_model(QWEN3, model_folder), tmp_path, forge=forge))
    print(rolled, *rolled.own, sep="\n")
    assert rolled.faults == []
    kinds = ("upstream", "ferry")
    assert rolled.pairs.keys() == {(first, second) for first in kinds for second in kinds}
    assert len(rolled.own) < sum(rolled.pairs.values()) / 10
    assert rolled.digests > 10
    assert rolled.landed > 10
