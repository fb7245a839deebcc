"""The options, by value: defaults, what is taken from upstream's deployments, what is refused and with which words."""

import pytest

from kvferry.errors import ConfigError, ConfigReason
from kvferry.vllm.config import Config, ignored_options, parse_config, split_address


def test_empty_options_are_the_defaults() -> None:
    assert parse_config({}) == Config()


def test_options_that_upstream_deployments_carry_are_taken() -> None:
    extra = {"mooncake_protocol": "rdma", "device_name": "mlx5_0", "num_workers": 10}
    assert parse_config(extra) == Config(mooncake_protocol="rdma", device_name="mlx5_0")
    assert list(ignored_options(extra)) == ["num_workers"]


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"transpot": "cma"})
    assert refused.value.reason is ConfigReason.UNKNOWN_OPTION
    assert "'transpot'" in refused.value.message
    assert "'transport'" in refused.value.message


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"transport": "nixl"}, ["transport", "'nixl'", "'mooncake' or 'cma'"]),
        ({"publish_timeout": "480"}, ["publish_timeout", "'480'", "float"]),
        ({"publish_timeout": 0}, ["publish_timeout", "0", "above 0"]),
        ({"side_channel_port": 70_000}, ["side_channel_port", "70000", "65535"]),
        ({"bootstrap_port": True}, ["bootstrap_port", "True", "int"]),
        ({"host": 7}, ["host", "7", "str or null"]),
        ({"bootstrap_server_address": "nowhere"}, ["bootstrap_server_address", "'nowhere'", "host:port"]),
    ],
)
def test_bad_values_are_refused_with_both_values(extra: dict[str, object], said: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(extra)
    assert refused.value.reason is ConfigReason.INVALID_VALUE
    for words in said:
        assert words in refused.value.message


def test_whole_numbers_are_taken_for_times() -> None:
    assert parse_config({"pull_timeout": 30}).pull_timeout == 30.0


@pytest.mark.parametrize(("address", "parts"), [("10.0.0.1:8998", ("10.0.0.1", 8998)), ("[fd00::1]:1", ("fd00::1", 1))])
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
