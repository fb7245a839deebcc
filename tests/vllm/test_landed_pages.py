"""What is reported of a receive of vLLM's own connector that went wrong. The others: ``test_upstream.py``."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvferry.protocol import Span
from kvferry.testing.landed_pages import LandedPages, Landing
from kvferry.testing.transfer_report import read_reports

LANDING = Landing("r", "t", "p", Span(0, 8), ())
CONFIG = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="d"))


def test_a_failed_pull_is_reported_as_such_and_once(tmp_path: Path) -> None:
    report = tmp_path / "transfers.jsonl"
    pages = LandedPages(CONFIG, SimpleNamespace(), str(report))
    pages.expect(LANDING, SimpleNamespace(failed=True))
    pages.on_received(["another"])
    assert read_reports([report]) == {}
    for _ in range(2):
        pages.on_received(["r"])
    found = read_reports([report])["t"]
    assert [(line.status, line.digest, line.peer_engine_id) for line in found.consumer] == [("failed", None, "p")]
    assert found.landing_problems() == ("consumer: failed (the pull failed)",)


def test_what_came_before_a_cache_was_registered_is_a_bug_of_the_test(tmp_path: Path) -> None:
    pages = LandedPages(CONFIG, SimpleNamespace(), str(tmp_path / "transfers.jsonl"))
    pages.expect(LANDING, SimpleNamespace(failed=False))
    with pytest.raises(RuntimeError, match="no cache was registered"):
        pages.on_received(["r"])
