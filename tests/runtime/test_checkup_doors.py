"""What a checkup says about the secret, by value."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.runtime.checkup import Deployment, HostAddress, LocalAddress, Verdict, check_doors, resolve_host

TEXT = "5b3f0d6a9c1e47b28d5502f0a7e6c4d1"
HERE = (LocalAddress("lo", "127.0.0.1"), LocalAddress("eth0", "10.0.0.3"))


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_SECRET", raising=False)


def host(ip: str = "10.0.0.3") -> HostAddress:
    return resolve_host(ip, HERE)


def test_no_secret_is_a_warning_where_others_can_come() -> None:
    found = check_doors(Deployment(), host())
    assert found.verdict is Verdict.WARNING
    assert "secret_file" in found.advice
    assert check_doors(Deployment(), host("127.0.0.1")).verdict is Verdict.NOTE


def test_a_secret_is_good_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s"
    file.touch(mode=0o600)
    file.write_text(TEXT)
    for deployment in (Deployment(secret_file=str(file)), Deployment()):
        found = check_doors(deployment, host())
        assert found.verdict is Verdict.OK
        assert "no plain one is open" in found.said
        assert TEXT not in repr(found)
        monkeypatch.setenv("KVFERRY_SECRET", TEXT)
    listed = check_doors(replace(Deployment(), upstream_networks=("10.1.0.0/16",)), host())
    assert "open to 10.1.0.0/16" in listed.said


def test_a_secret_that_cannot_be_used_fails(tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_text(TEXT)
    file.chmod(0o644)
    found = check_doors(Deployment(secret_file=str(file)), host())
    assert found.verdict is Verdict.FAILED
    assert "0644" in found.said
