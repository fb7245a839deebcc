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
        ({"retries": -1}, ["retries", "-1", "0 or more"]),
        ({"verify": "some"}, ["verify", "'some'", "'off' or 'sample' or 'full'"]),
        ({"host": 7}, ["host", "7", "str or null"]),
        ({"upstream_peers": ["10.0.0.1/8"]}, ["upstream_peers", "'10.0.0.1/8'", "network"]),
        ({"upstream_peers": "some"}, ["upstream_peers", "'some'", "'allow' or 'refuse'", "list"]),
        ({"upstream_peers": [10]}, ["upstream_peers", "[10]"]),
        ({"write_targets": ["here"]}, ["write_targets", "'here'", "network"]),
        ({"write_targets": "10.0.0.0/8"}, ["write_targets", "'10.0.0.0/8'", "list"]),
        ({"secure_port": 70_000}, ["secure_port", "70000", "65535"]),
        ({"max_message_bytes": 1 << 27}, ["max_message_bytes", "134217728", "at most 67108864"]),
        ({"bootstrap_tls_cert": "a.pem"}, ["bootstrap_tls_cert", "bootstrap_tls_key", "together"]),
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


def test_networks_are_kept_as_they_were_written() -> None:
    made = parse_config({"upstream_peers": ["10.0.0.0/8", "fd00::1"], "write_targets": []})
    assert made.upstream_peers == ("10.0.0.0/8", "fd00::1")
    assert made.write_targets == ()


@pytest.mark.parametrize(
    "value", [["MC_FORCE_TCP=1"], ["MC_IB_TC"], ["PATH=/tmp"], "MC_IB_TC=3", [3], {"MC_IB_TC": "3"}]
)
def test_settings_of_the_engine_are_checked_when_they_are_read(value: object) -> None:
    assert parse_config({"mooncake_env": ["MC_IB_TC=3"]}).mooncake_env == ("MC_IB_TC=3",)
    with pytest.raises(ConfigError, match="mooncake_env") as refusal:
        parse_config({"mooncake_env": value})
    assert refusal.value.reason is ConfigReason.INVALID_VALUE
