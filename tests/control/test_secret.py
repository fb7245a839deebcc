"""The shared secret: where it may come from, what is refused, and that nothing shows it."""

import logging
import os
import pickle
from pathlib import Path

import pytest

from kvferry.control import CurveKeys, Secret, find_secret, require_curve
from kvferry.errors import ConfigError, ConfigReason

TEXT = b"5b3f0d6a9c1e47b28d5502f0a7e6c4d1"


def written(path: Path, text: bytes = TEXT, *, mode: int = 0o600) -> str:
    path.write_bytes(text)
    path.chmod(mode)
    return str(path)


def refusal(call: object, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.reason is ConfigReason.INVALID_VALUE
    assert TEXT.decode() not in str(caught.value)
    return caught.value.message


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_file_that_others_cannot_read_is_read(tmp_path: Path, mode: int) -> None:
    assert Secret.read(written(tmp_path / "s", TEXT + b"\n", mode=mode)) == Secret.of(TEXT, source="here")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602, 0o601, 0o777])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    said = refusal(Secret.read, written(tmp_path / "s", mode=mode))
    assert f"{mode:04o}" in said
    assert "chmod 600" in said


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "regular" in refusal(Secret.read, str(tmp_path / "pipe"))
    assert "cannot be read" in refusal(Secret.read, str(tmp_path / "none"))
    assert "cannot be read" in refusal(Secret.read, str(tmp_path))


@pytest.mark.parametrize(
    "text", [b"", b"short", b"x" * 31, b" " * 40, b"abcabcabcabcabcabcabcabcabcabcabcabcabcabc", b"y" * 5000]
)
def test_short_long_and_monotonous_texts_are_refused_with_the_way_to_make_one(text: bytes) -> None:
    assert "openssl rand" in refusal(lambda: Secret.of(text, source="here"))


def test_the_file_wins_over_the_variable_and_neither_is_none(tmp_path: Path) -> None:
    other = TEXT[::-1]
    environ = {"KVFERRY_SECRET": other.decode()}
    assert find_secret(None, {}) is None
    assert find_secret(None, environ) == Secret.of(other, source="x")
    assert find_secret(written(tmp_path / "s"), environ) == Secret.of(TEXT, source="x")
    assert "KVFERRY_SECRET" in refusal(find_secret, None, {"KVFERRY_SECRET": "too short"})


def test_keys_differ_by_use_and_by_secret_and_are_the_same_everywhere() -> None:
    one, other = Secret.of(TEXT, source="x"), Secret.of(TEXT[::-1], source="x")
    labels = ["curve server", "curve client", "http orders"]
    derived = [secret.derive(label) for secret in (one, other) for label in labels]
    assert len(set(derived)) == 6
    assert all(len(key) == 32 for key in derived)
    assert one.derive("a") == Secret.of(TEXT + b"\n", source="y").derive("a")
    assert CurveKeys.of(one).name == CurveKeys.of(Secret.of(TEXT, source="z")).name != CurveKeys.of(other).name


def test_the_keys_are_hkdf_of_the_secret() -> None:
    """Against the construction of RFC 5869 as the library `cryptography` has it."""
    hkdf = pytest.importorskip("cryptography.hazmat.primitives.kdf.hkdf")
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    salt = b"kvferry shared secret, version 1"
    known = hkdf.HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=b"curve server").derive(TEXT)
    assert Secret.of(TEXT, source="x").derive("curve server") == known


def test_a_file_may_have_further_secrets_for_a_change(tmp_path: Path) -> None:
    new = TEXT[::-1]
    path = written(tmp_path / "s", b"\n" + TEXT + b"\r\n\n " + new + b"\n")
    both = Secret.read(path)
    assert both.known == (both, Secret.of(new, source="x"))
    assert both.derive("a") == Secret.of(TEXT, source="x").derive("a")
    assert both != Secret.of(TEXT, source="x")
    assert find_secret(None, {"KVFERRY_SECRET": (TEXT + b"\n" + new).decode()}) == both
    shown = f"{both!r} {both.known!r} {both}"
    assert TEXT.decode() not in shown
    assert new.decode() not in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT + b"\n" + b"short", "line 2 of here has 5 bytes"),
        (TEXT + b"\n" + TEXT + b"\n", "the same secret on two lines"),
        (b"\n".join(TEXT + bytes([65 + n]) for n in range(5)), "has 5 lines"),
    ],
)
def test_lines_that_are_no_secrets_are_refused(text: bytes, said: str) -> None:
    assert said in refusal(lambda: Secret.of(text, source="here"))


def test_a_file_that_is_too_long_is_not_cut(tmp_path: Path) -> None:
    assert "longer than" in refusal(Secret.read, written(tmp_path / "s", TEXT + b"\n" * 20_000 + TEXT[::-1]))


def test_nothing_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = Secret.of(TEXT, source="x")
    keys = CurveKeys.of(secret)
    shown = [f"{one!r} {one} {one!a}" for one in (secret, keys, keys.server, keys.client)]
    logging.getLogger("kvferry.test").info("%s %r", secret, keys)
    hidden = [TEXT.decode(), keys.server.hidden.decode(), keys.client.hidden.decode()]
    hidden += [secret.derive(label).hex() for label in ("curve server", "curve client", "http orders")]
    for text in [*shown, caplog.text]:
        assert not [one for one in hidden if one in text]
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_a_libzmq_without_curve_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        require_curve(libzmq_has=False)
    assert caught.value.reason is ConfigReason.MISSING_DEPENDENCY
    assert "pip install" in caught.value.message
    require_curve()
