"""What is secret of a router: transfer ids that nobody guesses, releases that are signed, the secret itself."""

import logging
import secrets
from pathlib import Path

import pytest

from kvferry.control import Secret, Verifier
from kvferry.router import Decode, Prefill, RouterConfig
from kvferry.testing.commands import call
from kvferry.testing.openai_engine import Mood, wait_until

TEXT = "5b3f0d6a9c1e47b28d5502f0a7e6c4d1"


def test_transfer_ids_are_drawn_from_the_systems_randomness(make_site, monkeypatch):
    drawn: list[int] = []
    real = secrets.token_hex

    def token_hex(nbytes: int) -> str:
        drawn.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(secrets, "token_hex", token_hex)
    site = make_site()
    site.complete(prompt=["a", "b", "c"], max_tokens=1)
    ids = [one["kv_transfer_params"]["transfer_id"] for one in site.prefilled()]
    assert len(set(ids)) == 3
    assert {len(one) for one in ids} == {32}
    assert drawn.count(16) >= 3


def test_releases_are_signed_where_there_is_a_secret(make_site, caplog):
    caplog.set_level(logging.DEBUG)
    secret = Secret.of(TEXT.encode(), source="test")
    site = make_site(secret=secret, rounds=1)
    site.prefills[0].mood = Mood(status=500)
    site.complete(prompt="a", max_tokens=1)
    (bootstrap,) = site.bootstraps
    wait_until(lambda: bootstrap.released, what="a release")
    headers, body = bootstrap.orders[0]
    Verifier(secret).check(headers.get("x-kvferry-auth"), method="POST", path="/kvferry/release", body=body)
    assert TEXT not in caplog.text


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_the_command_refuses_a_secret_that_others_can_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "s"
    file.touch(mode=0o600)
    file.write_text(TEXT if mode == 0o644 else "short")
    file.chmod(mode)
    result = call(["serve-router", "--prefill", "http://h:1", "--decode", "http://h:2", "--secret-file", file])
    assert result.status == 2
    assert ("chmod 600" if mode == 0o644 else "32 to 4096") in result.err
    assert TEXT not in result.out + result.err


def test_the_configuration_does_not_show_it() -> None:
    secret = Secret.of(TEXT.encode(), source="test")
    prefill, decode = Prefill("http://h:1", "http://h:2"), Decode("http://h:3")
    config = RouterConfig(prefills=(prefill,), decodes=(decode,), secret=secret)
    assert TEXT not in repr(config)
    assert "Secret(...)" in repr(config)
