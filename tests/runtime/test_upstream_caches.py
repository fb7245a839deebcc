"""What is declared of upstream peers, what is assumed, and how it is said beforehand."""

from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import ConfigError, ConfigReason, RemoteProtocolError
from kvferry.runtime.checkup import Deployment, choices_of, local_addresses
from kvferry.runtime.upstream_caches import Declared, OwnCaches
from kvferry.vllm.config import parse_config
from kvferry.vllm.deployment import deployment_of

OWN = OwnCaches((), 128, 32, "bfloat16", "LBHNC", usual_layout="LBHNC")


@pytest.mark.parametrize(
    ("value", "reason", "said"),
    [
        ({"block": 16}, ConfigReason.UNKNOWN_OPTION, "nearest is 'block_size'"),
        ({"block_size": 0}, ConfigReason.INVALID_VALUE, "above 0"),
        ({"block_size": True}, ConfigReason.INVALID_VALUE, "above 0"),
        ({"kernel_block_size": "16"}, ConfigReason.INVALID_VALUE, "above 0"),
        ({"cache_dtype": ""}, ConfigReason.INVALID_VALUE, "a text"),
        ({"layout": "NHD"}, ConfigReason.INVALID_VALUE, "layout names"),
        ("LBHNC", ConfigReason.INVALID_VALUE, "a table"),
    ],
)
def test_a_wrong_declaration_is_refused(value: Any, reason: ConfigReason, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config({"upstream_peer": value})
    assert caught.value.reason is reason


def test_what_is_not_declared_is_as_here_and_said() -> None:
    assert OWN.assumptions() == "block_size 128, kernel_block_size 32, cache_dtype bfloat16, layout LBHNC"
    some = replace(OWN, declared=Declared(block_size=768, layout="LBHNC"))
    assert (some.peer_block_size, some.peer_kernel_block_size) == (768, 32)
    assert some.assumptions() == "kernel_block_size 32, cache_dtype bfloat16"


def test_where_nothing_is_split_here_nothing_is_split_there() -> None:
    whole = OwnCaches((), 64, 64, "bfloat16", "LBHNC", declared=Declared(block_size=16))
    assert whole.peer_kernel_block_size == 16


def test_the_layout_is_assumed_to_be_what_upstream_asks_for() -> None:
    OWN.check_declared()
    token_major = replace(OWN, layout="LBNHC")
    with pytest.raises(RemoteProtocolError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        token_major.check_declared()
    replace(token_major, declared=Declared(layout="BLNHC")).check_declared()
    replace(token_major, usual_layout=None).check_declared()


def test_the_reports_say_who_may_be_a_peer() -> None:
    def line(extra: dict[str, Any]) -> tuple[str, str]:
        choices, _ = choices_of(deployment_of(parse_config(extra), explicit=extra), local_addresses(), {})
        (one,) = [choice for choice in choices if choice.name == "upstream peers"]
        return one.value, one.why

    assert line({"host": "127.0.0.1"}) == (
        "allow",
        "default; assumed to be as here: block_size, kernel_block_size, cache_dtype, layout",
    )
    assert line({"host": "127.0.0.1", "upstream_peers": "refuse"}) == ("refuse", "option upstream_peers")
    assert line({"host": "127.0.0.1", "upstream_peers": ["10.0.0.0/8"], "upstream_peer": {"block_size": 16}})[0] == (
        "10.0.0.0/8"
    )
    assert line({"host": "127.0.0.1", "transport": "cma"})[0] == "refuse"
    assert Deployment().upstream_peers == "refuse"
