"""What is said of a vLLM release before anything is built on it."""

import logging
from collections.abc import Iterator

import pytest

from kvferry.errors import ConfigError, ConfigReason
from kvferry.vllm.releases import TRIED, check_release


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Also where the connector has sent kvferry's log to vLLM's handlers."""
    logger = logging.getLogger("kvferry.vllm.releases")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1", "0.33.0+cpu", "0.33.7"])
def test_a_release_that_was_tried_is_taken_silently(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_release(version)
    assert caplog.messages == []


@pytest.mark.parametrize(("version", "said"), [("0.34.0", "newer"), ("1.0.0", "newer"), ("dev", "does not say")])
def test_what_was_not_tried_is_used_with_a_warning(version: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvferry"):
        check_release(version)
    assert len(set(caplog.messages)) == 1
    assert said in caplog.text
    assert f"{TRIED[0][0]}.{TRIED[0][1]}" in caplog.text


@pytest.mark.parametrize("version", ["0.31.9", "0.9.2"])
def test_what_is_too_old_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM {version}.*0\.32 or newer") as refused:
        check_release(version)
    assert refused.value.reason is ConfigReason.MISSING_DEPENDENCY
