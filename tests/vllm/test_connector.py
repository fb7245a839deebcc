"""The object that vLLM holds: what it takes from a connector around it, and what it refuses."""

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvferry.errors import ConfigError
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.vllm.metadata import FerryHandshake, Siblings

from . import engine_core as core

pytestmark = pytest.mark.vllm


@dataclass
class Other(KVConnectorHandshakeMetadata):
    """What a worker of another connector says of itself."""


def test_ranks_are_introduced_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    engine = core.make_core(build_model(QWEN3, tmp_path), "kv_both", core.full_attention(), ranks=4)
    said = {(pp, tp): FerryHandshake(f"{pp}{tp}".encode()) for tp in (1, 0) for pp in (1, 0)}
    engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(said)
    (siblings,) = engine.schedule().orders
    assert isinstance(siblings, Siblings)
    assert siblings.placements == (b"00", b"01", b"10", b"11")


def test_the_word_of_another_connector_is_refused_before_any_request(tmp_path: Path) -> None:
    """MultiConnector passes on what its first child says that says anything, and gives it to all of them."""
    engine = core.make_core(build_model(QWEN3, tmp_path), "kv_both", core.full_attention())
    with pytest.raises(ConfigError, match="introduced by another connector \\(Other\\)"):
        engine.scheduler.connector.set_xfer_handshake_metadata({0: Other()})
