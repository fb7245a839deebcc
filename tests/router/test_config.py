"""Addresses and numbers are checked once, at the door."""

import pytest
import typer
from typer.testing import CliRunner

from kvferry.cli.serve_router import serve_router
from kvferry.errors import ConfigError, ConfigReason
from kvferry.router import Cooldown, Decode, Patience, Prefill, RouterConfig


@pytest.mark.parametrize(
    ("text", "url", "bootstrap"),
    [
        ("http://h:1", "http://h:1", "http://h:8998"),
        ("http://h:1/,9000", "http://h:1", "http://h:9000"),
        (" https://h:1 , 9000 ", "https://h:1", "http://h:9000"),
        ("http://h:1,https://other:5/", "http://h:1", "https://other:5"),
        ("http://[::1]:1,9", "http://[::1]:1", "http://[::1]:9"),
        ("http://a_b.é:1", "http://a_b.é:1", "http://a_b.é:8998"),
    ],
)
def test_prefill_addresses(text, url, bootstrap):
    assert Prefill.parse(text) == Prefill(url, bootstrap)


@pytest.mark.parametrize(
    "text",
    ["h:1", "ftp://h:1", "http://", "http://h:0", "http://h:99999", "http://h:1,x", "http://h:1,0", "http://h:1?a"]
    + ["http://h:1?", "http://h:1/#", "http://a..b:1", f"http://{'a' * 64}:1", "http://h:1/\x01", "http://h h:1"]
    + ["http://h:1,", "http://h:1,8998,1", "http://h:1/v1", "http://h:1/v1/,8998"],
)
def test_bad_addresses_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="--prefill") as caught:
        Prefill.parse(text)
    assert caught.value.reason is ConfigReason.INVALID_VALUE


@pytest.mark.parametrize(
    "options",
    [
        {"prefills": ()},
        {"decodes": ()},
        {"decodes": (Decode("http://d:1"), Decode("http://d:1"))},
        {"port": 70000},
        {"rounds": 0},
        {"max_batch": 0},
        {"max_body": 0},
        {"directory_ttl": -1.0},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(options):
    good = {"prefills": (Prefill("http://p:1", "http://p:2"),), "decodes": (Decode("http://d:1"),)}
    RouterConfig(**good)
    with pytest.raises(ConfigError):
        RouterConfig(**{**good, **options})


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_timeouts_are_positive_and_finite(seconds):
    with pytest.raises(ConfigError):
        Patience(connect=seconds)


def test_a_pause_cannot_shrink():
    with pytest.raises(ConfigError):
        Cooldown(5, 4)
    assert [Cooldown(1, 6).seconds(failures) for failures in (1, 2, 3, 4, 500)] == [1, 2, 4, 6, 6]


def test_what_was_typed_is_named():
    with pytest.raises(ConfigError, match="--prefill 'http://h:1,abc': bootstrap port 'abc' is neither"):
        Prefill.parse("http://h:1,abc")
    with pytest.raises(ConfigError, match="rounds must be at least 1, got 0$"):
        RouterConfig(prefills=(Prefill("http://p:1", "http://p:2"),), decodes=(Decode("http://d:1"),), rounds=0)


def test_the_command_refuses_bad_addresses_with_status_2():
    app = typer.Typer()
    app.command()(serve_router)
    result = CliRunner().invoke(app, ["--prefill", "nonsense", "--decode", "http://d:1"])
    assert result.exit_code == 2
    assert "invalid-value" in result.output
    assert "nonsense" in result.output
