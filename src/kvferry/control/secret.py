"""The shared secret: where it is read, what is derived from it, and that it is never shown.

One secret is shared by the engines of a deployment and its router. Nothing uses it directly: every use has a key of its
own, by HKDF (RFC 5869, SHA-256) with a label, so that no use can stand in for another. The secret should be random, not
a password: a derivation this cheap does not make a guessable text safe, and whoever has recorded an exchange may guess
for as long as they like.

A file has one secret a line. The first is the one in use; further ones are known as well, for a change of the secret
without a stop: :attr:`Secret.known`. A secret comes in as a further line everywhere, then first, then alone.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from kvferry.errors import ConfigError, ConfigReason

VARIABLE: Final = "KVFERRY_SECRET"
"""Environment variable that holds the secret where no file is named."""

MIN_BYTES: Final = 32
MAX_BYTES: Final = 4096

HOW_TO_MAKE: Final = "make one with: (umask 077; openssl rand -hex 32 > kvferry.secret)"

MAX_LINES: Final = 4
"""Secrets of one file; a change needs two."""

_MAX_FILE: Final = MAX_LINES * (MAX_BYTES + 64)
_SALT: Final = b"kvferry shared secret, version 1"
_OPEN_BITS: Final = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
"""What no secret's file may have: anything for others, more than reading for the group."""


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """The secret of one deployment. Shows itself nowhere; two are compared in constant time."""

    _root: bytes = field()
    _others: tuple["Secret", ...] = ()

    @classmethod
    def of(cls, text: bytes, *, source: str) -> Self:
        """From its text, white space at both ends left out; raises ``ConfigError``, which does not repeat it."""
        lines = [line.strip() for line in text.strip().split(b"\n") if line.strip()]
        if len(lines) > MAX_LINES:
            raise _refused(f"{source} has {len(lines)} lines; each is a secret, and there may be {MAX_LINES}")
        if len(set(lines)) < len(lines):
            raise _refused(f"{source} has the same secret on two lines")
        if len(lines) < 2:
            return cls._one(text, source=source)
        first, *others = [cls._one(line, source=f"line {n} of {source}") for n, line in enumerate(lines, 1)]
        return cls(first._root, tuple(others))

    @classmethod
    def _one(cls, text: bytes, *, source: str) -> Self:
        text = text.strip()
        if not MIN_BYTES <= len(text) <= MAX_BYTES:
            raise _refused(
                f"the secret in {source} has {len(text)} bytes, must have {MIN_BYTES} to {MAX_BYTES}; {HOW_TO_MAKE}"
            )
        if len(set(text)) < 8:
            raise _refused(f"the secret in {source} repeats itself: it must be random; {HOW_TO_MAKE}")
        return cls(hmac.digest(_SALT, text, hashlib.sha256))

    @classmethod
    def read(cls, path: str) -> Self:
        """From a file that none but its owner (and group) can read."""
        try:
            # One descriptor for the look and the reading: nobody can put another file between them.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise _refused(f"secret_file {path!r} is no regular file")
                if mode & _OPEN_BITS:
                    raise _refused(
                        f"secret_file {path!r} has mode {stat.S_IMODE(mode):04o}, others can read or change it: "
                        f"chmod 600 {path} (a Kubernetes secret: defaultMode 0400, or 0440 with fsGroup)"
                    )
                text = file.read(_MAX_FILE + 1)
                if len(text) > _MAX_FILE:
                    raise _refused(f"secret_file {path!r} is longer than {_MAX_FILE} bytes")
        except OSError as error:
            raise _refused(f"secret_file {path!r} cannot be read: {error.strerror}") from error
        return cls.of(text, source=f"secret_file {path!r}")

    @property
    def known(self) -> tuple["Secret", ...]:
        """The one in use, and those that are known beside it."""
        return (self, *self._others)

    def derive(self, label: str) -> bytes:
        """A key of 32 bytes for one use (HKDF-Expand, one round)."""
        return hmac.digest(self._root, label.encode() + b"\x01", hashlib.sha256)

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Secret) and hmac.compare_digest(self._root, other._root) and self._others == other._others
        )

    def __hash__(self) -> int:
        return hash(self.derive("hash"))

    def __reduce__(self) -> str:
        raise TypeError("a secret is not written anywhere")


def find_secret(path: str | None, environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret of the file, else of the environment; ``None`` where neither is set."""
    if path is not None:
        return Secret.read(path)
    text = environ.get(VARIABLE)
    return None if text is None else Secret.of(text.encode("utf-8", "surrogateescape"), source=VARIABLE)


def _refused(message: str) -> ConfigError:
    return ConfigError(ConfigReason.INVALID_VALUE, message)
