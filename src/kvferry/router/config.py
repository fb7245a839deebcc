"""What the router is told once, at its start: where the engines are and how patient to be with them.

Addresses are checked here and nowhere else. A prefill engine has two: its OpenAI server and its bootstrap
service, which says the engine id that decode must name. ``http://H:P,8998`` gives the bootstrap port on the
same host; a full URL after the comma gives another host.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.control import Secret
from kvferry.errors import ConfigError, ConfigReason

DEFAULT_BOOTSTRAP_PORT = 8998
"""vLLM's own default (``VLLM_MOONCAKE_BOOTSTRAP_PORT``)."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prefill engine."""

    url: str
    """Base of its OpenAI server, without a trailing slash."""
    bootstrap: str
    """Base of its bootstrap service; decode engines are given this very string, so it must be reachable from them."""

    @classmethod
    def parse(cls, text: str) -> "Prefill":
        """Read ``URL[,BOOTSTRAP_PORT or BOOTSTRAP_URL]``.

        >>> Prefill.parse("http://10.0.0.1:8100,9000")
        Prefill(url='http://10.0.0.1:8100', bootstrap='http://10.0.0.1:9000')
        """
        address, comma, bootstrap = text.partition(",")
        url = _base_url(address, option="--prefill")
        bootstrap = bootstrap.strip() if comma else str(DEFAULT_BOOTSTRAP_PORT)
        if "://" in bootstrap:
            return cls(url, _base_url(bootstrap, option="--prefill"))
        if not (bootstrap.isascii() and bootstrap.isdigit() and 0 < int(bootstrap) < 65536):
            raise _invalid(f"--prefill {text!r}: bootstrap port {bootstrap!r} is neither 1..65535 nor a URL")
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        return cls(url, _base_url(f"http://{host}:{bootstrap}", option="--prefill"))


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode engine."""

    url: str

    @classmethod
    def parse(cls, text: str) -> "Decode":
        """Read ``URL``."""
        return cls(_base_url(text, option="--decode"))


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait before an engine counts as failed."""

    connect: float = 2.0
    prefill: float = 600.0
    """Silence of a prefill engine: it answers only when the whole prompt is computed."""
    decode: float = 600.0
    """Silence of a decode engine, before its first byte and between two."""
    control: float = 2.0
    """The whole of a bootstrap query or of a release."""

    def __post_init__(self) -> None:
        for name in ("connect", "prefill", "decode", "control"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise _invalid(f"{name} timeout must be a positive number of seconds, got {value}")


@dataclass(frozen=True, slots=True)
class Cooldown:
    """How long a failed engine is left alone: ``first`` seconds, doubled with each failure in a row up to
    ``longest``."""

    first: float = 1.0
    longest: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.longest < float("inf"):
            raise _invalid(f"cool-down needs 0 <= first <= longest, got {self.first} and {self.longest}")

    def seconds(self, failures: int) -> float:
        """The pause after that many failures in a row."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 30))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything that the router is told."""

    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    patience: Patience = Patience()
    cooldown: Cooldown = Cooldown()
    rounds: int = 3
    """How often one prompt may be prefilled, when decode fails before its first byte."""
    copies: int = 1
    """At how many prefill engines each prompt is computed. The decode engine is told of all, and tries the others when
    the first one fails, as far as its option ``retries`` allows."""
    directory_ttl: float = 5.0
    """Seconds for which an engine id is believed. No engine restarts faster than this, so a stale id is not used."""
    max_batch: int = 1024
    """Most choices (prompts times ``n``) of one request; each becomes a pair of engine requests."""
    max_body: int = 256_000_000
    """Bytes of a client's request at most: it is held as a whole, and once more for each piece while it is written."""
    decode_alone: bool = False
    """Let a decode engine compute the prompt itself when every prefill engine failed, instead of an error."""

    secret: Secret | None = None
    """Shared with the engines; releases are signed with it."""
    bootstrap_ca: str | None = None
    """File of the authorities by which https addresses are believed."""

    def __post_init__(self) -> None:
        if not self.prefills or not self.decodes:
            raise _invalid("at least one --prefill and one --decode are needed")
        for urls in ([p.url for p in self.prefills], [d.url for d in self.decodes]):
            if len(set(urls)) != len(urls):
                raise _invalid(f"the same engine is given twice: {', '.join(urls)}")
        if not 0 <= self.port <= 65535:
            raise _invalid(f"port must be 0..65535, got {self.port}")
        for name, least in (("rounds", 1), ("max_batch", 1), ("max_body", 1), ("directory_ttl", 0)):
            if getattr(self, name) < least:
                raise _invalid(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 1 <= self.copies <= len(self.prefills):
            raise _invalid(f"copies must be 1 to the {len(self.prefills)} prefill engines given, got {self.copies}")


def _base_url(text: str, *, option: str) -> str:
    text = text.strip()
    try:
        parts = urlsplit(text)
        port = parts.port
        (parts.hostname or "").encode("idna")  # a label may be empty or too long for any resolver
    except ValueError as error:
        raise _invalid(f"{option} {text!r} is not a URL with a valid host and port") from error
    whole = text.isprintable() and not set("?# ") & set(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not whole:
        raise _invalid(f"{option} {text!r} must look like http://HOST:PORT")
    if port == 0:
        raise _invalid(f"{option} {text!r} has port 0")
    if parts.path.rstrip("/").endswith("/v1"):
        raise _invalid(f"{option} {text!r}: give the engine's address without /v1, which the router puts behind it")
    return text.rstrip("/")


def _invalid(message: str) -> ConfigError:
    return ConfigError(ConfigReason.INVALID_VALUE, message)
