"""What is said of a vLLM release before anything is built on it."""

import logging
import sys
from collections.abc import Iterator
from fractions import Fraction

import pytest

from kvferry.errors import ConfigError, ConfigReason
from kvferry.vllm.layouts import Heads, Page, parts_of
from kvferry.vllm.releases import ORDER_FLAGS, TRIED, order_of, refuse_old, warn_of_untried


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Also where the connector has sent kvferry's log to vLLM's handlers."""
    logger = logging.getLogger("kvferry.vllm.releases")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1", "0.33.0+cpu", "0.33.7"])
def test_a_release_that_was_tried_is_taken_silently(version: str, caplog: pytest.LogCaptureFixture) -> None:
    refuse_old(version)
    warn_of_untried(version)
    assert caplog.messages == []


@pytest.mark.parametrize(("version", "said"), [("0.34.0", "newer"), ("1.0.0", "newer"), ("dev", "does not say")])
def test_what_was_not_tried_is_used_with_a_warning(version: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvferry"):
        refuse_old(version)
        warn_of_untried(version)
    assert len(set(caplog.messages)) == 1
    assert said in caplog.text
    assert f"{TRIED[0][0]}.{TRIED[0][1]}" in caplog.text


@pytest.mark.parametrize("version", ["0.31.9", "0.9.2"])
def test_what_is_too_old_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM {version}.*0\.32 or newer") as refused:
        refuse_old(version)
    assert refused.value.reason is ConfigReason.MISSING_DEPENDENCY


def test_it_is_refused_before_anything_is_imported_that_it_may_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvferry.vllm
    import vllm

    assert kvferry.vllm.FerryConnector.__name__ == "FerryConnector"
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    monkeypatch.delitem(sys.modules, "kvferry.vllm.connector", raising=False)
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.2"):
        kvferry.vllm.FerryConnector  # noqa: B018
    assert "kvferry.vllm.connector" not in sys.modules


class Implementation:
    """Of an attention layer, as vLLM has it: it says of its order what it says, or nothing."""

    def __init__(self, **flags: bool) -> None:
        self.__dict__.update(flags)


class Layer:
    def __init__(self, **flags: bool) -> None:
        self.impl = Implementation(**flags)


def rocm_page(backend: str) -> Page:
    """Of two sides, keys and values of 2 heads of 64, 16 tokens."""
    return Page(
        layer="attn",
        backend=backend,
        kernel="rocm",
        order="LBHNC",
        cache="bfloat16",
        tokens=16,
        state_tokens=Fraction(1),
        slots=2,
        rows=16,
        width=256,
        slot_stride=4096,
        row_stride=256,
        itemsize=2,
        heads=Heads(0, 2, 2),
        repacked=True,
        key_size=64,
        value_size=64,
    )


@pytest.mark.parametrize("flag", ORDER_FLAGS)
def test_a_page_in_another_order_than_its_backends_moves_between_equal_workers_only(flag: str) -> None:
    plain, other = order_of("ROCM_ATTN", Layer(**{flag: False})), order_of("ROCM_ATTN", Layer(**{flag: True}))
    assert plain == order_of("ROCM_ATTN", Layer()) == order_of("ROCM_ATTN", None) == "ROCM_ATTN"
    assert [part.name for part in parts_of(rocm_page(plain))] == ["k", "v"]
    (whole,) = parts_of(rocm_page(other))
    assert {axis.name for axis in whole.axes} == {"shard", "token"}
    assert ORDER_FLAGS[flag] in whole.content.type
