"""``--copies``: each prompt at several prefill engines, decode told of all, every copy let go in the end."""

import pytest

from kvferry.errors import ConfigError
from kvferry.router import Decode, Prefill, RouterConfig
from kvferry.testing.openai_engine import wait_until


def transfers_of(bodies):
    return sorted(body["kv_transfer_params"]["transfer_id"] for body in bodies)


def released_by(site):
    return sorted(transfer for peer in site.bootstraps for order in peer.released for transfer in order["transfer_ids"])


def reasons_of(site):
    return {order["reason"] for peer in site.bootstraps for order in peer.released}


@pytest.mark.parametrize("stream", [False, True])
def test_decode_is_told_of_every_copy_and_unused_ones_are_released(make_site, stream):
    site = make_site(prefills=3, copies=2)
    assert site.complete(prompt="a", stream=stream).status_code == 200
    (decoded,) = site.decoded()
    params = decoded["kv_transfer_params"]
    (other,) = params["remote_alternatives"]
    assert sorted([params["transfer_id"], other["transfer_id"]]) == transfers_of(site.prefilled())
    named = {(params["remote_engine_id"], params["remote_bootstrap_addr"]),
             (other["remote_engine_id"], other["remote_bootstrap_addr"])}  # fmt: skip
    assert len(named) == 2
    assert named <= {(f"P{index}", peer.url) for index, peer in enumerate(site.bootstraps)}
    wait_until(lambda: released_by(site) == [other["transfer_id"]], what="the copy is released")
    assert reasons_of(site) == {"not-needed"}


def test_one_copy_is_what_it_was(make_site):
    site = make_site(prefills=2)
    assert site.complete(prompt="a").status_code == 200
    assert len(site.prefilled()) == 1
    assert "remote_alternatives" not in site.decoded()[0]["kv_transfer_params"]


def test_a_failed_copy_is_replaced_by_another_engine(make_site):
    site = make_site(prefills=3, copies=2)
    site.prefills[0].stop()
    assert site.complete(prompt="a").status_code == 200
    (decoded,) = site.decoded()
    assert len(decoded["kv_transfer_params"]["remote_alternatives"]) == 1


def test_fewer_copies_than_wanted_are_served(make_site):
    site = make_site(prefills=2, copies=2)
    site.prefills[0].stop()
    assert site.complete(prompt="a").status_code == 200
    (decoded,) = site.decoded()
    assert "remote_alternatives" not in decoded["kv_transfer_params"]


def test_a_failed_decode_lets_all_copies_go_and_the_next_round_has_copies_too(make_site):
    site = make_site(prefills=2, decodes=1, copies=2, rounds=2)
    site.decodes[0].mood.status = 500
    assert site.complete(prompt="a").status_code == 500
    assert len(site.prefilled()) == 4
    wait_until(lambda: released_by(site) == transfers_of(site.prefilled()), what="all are released")
    assert reasons_of(site) == {"decode-failed"}


def test_a_refused_prompt_is_refused_once_and_leaves_nothing(make_site):
    site = make_site(prefills=2, copies=2)
    site.prefills[0].mood.status = 400
    answer = site.complete(prompt="a")
    assert answer.status_code == 400
    assert site.decoded() == []
    wait_until(lambda: set(transfers_of(one.body for one in site.prefills[1].received)) <= set(released_by(site)),
               what="whatever the other engine was asked for is released")  # fmt: skip


def test_more_copies_than_engines_are_refused():
    prefills, decodes = (Prefill("http://a:1", "http://a:2"),), (Decode("http://b:1"),)
    with pytest.raises(ConfigError, match="copies must be 1 to the 1 prefill engines given, got 2"):
        RouterConfig(prefills=prefills, decodes=decodes, copies=2)
