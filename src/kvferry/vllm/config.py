"""The options of ``FerryConnector``: one frozen value, read once from ``kv_connector_extra_config``.

Idea: everything that an operator may set is a field of :class:`Config`, with its meaning under it. A key that is no
field is refused with the nearest name, so that a misspelt option never silently means its default. Options that
deployments of vLLM's own MooncakeConnector carry are taken under their own names, so that only the connector's name
changes when a deployment moves; those that mean nothing here are named in :data:`IGNORED` and said in the log.

Roles, ranks and ``kv_load_failure_policy`` are vLLM's own and are read from its configuration, not from here.
"""

import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from kvferry.errors import ConfigError, ConfigReason

IGNORED: Final = {
    "num_workers": "kvferry drives its engine from one thread and needs no pool of senders",
}
"""Options of vLLM's MooncakeConnector that are accepted and do nothing here, with the reason."""


@dataclass(frozen=True, slots=True)
class Config:
    """The options of one engine. Times are seconds."""

    transport: Literal["mooncake", "cma"] = "mooncake"
    """How bytes move: ``mooncake`` between hosts, ``cma`` between two processes of one host (CPU memory)."""

    mooncake_protocol: str = "tcp"
    """Protocol of the Mooncake engine (``tcp``, ``rdma``, ...). A protocol that the host cannot speak is an error."""

    device_name: str = ""
    """Network devices for the Mooncake engine, comma separated; empty lets the engine choose."""

    host: str | None = None
    """Address that this engine binds and tells its peers; default: ``VLLM_HOST_IP``, else vLLM's own choice."""

    side_channel_port: int = 0
    """First port of the message socket; rank r takes this plus r. 0 takes a free port."""

    bootstrap_port: int | None = None
    """Port of the bootstrap service that rank 0 of a producer serves; default: ``VLLM_MOONCAKE_BOOTSTRAP_PORT``."""

    bootstrap_server_address: str | None = None
    """``host:port`` of a bootstrap service that runs elsewhere: ranks register there and none is served here."""

    publish_timeout: float = 480.0
    """How long a producer keeps a published cache for its consumer before the blocks go back."""

    pull_timeout: float = 480.0
    """How long a consumer waits for a cache that its producer has not finished; then the load has failed."""

    orphan_timeout: float = 60.0
    """How long a producer keeps a pull for a transfer that it was never told of."""

    silence_timeout: float = 4.0
    """A peer that has shown no sign of life for this long is taken as lost."""

    max_descriptors: int = 16_000_000
    """Most copies that one request may be cut into; a request that needs more is refused."""

    max_transfers: int = 16_384
    """Most transfers that one rank knows at once; a fetch beyond it fails, a cache published beyond it is not kept."""

    max_pulls: int = 8_192
    """Most pulls that one producer rank has open; one more is answered with an error."""

    max_unknown_transfers: int = 1_024
    """Most transfers that only peers have spoken of; a pull for one more is answered with an error."""

    quarantine_max_fraction: float = 0.25
    """Part of a consumer's blocks that failed transfers may hold until they are proven quiet. Above it the receive
    engines in doubt are renewed at once; blocks never go back unproven."""

    debug_socket_dir: str | None = None
    """Directory (mode 0700) in which each rank answers `kvferry story` on a Unix socket; unset: nothing listens."""

    require_private_network: bool = False
    """Refuse to start where strangers may reach this engine's memory: when the address told to peers is public, or when
    any interface of this machine has a public address while something listens on all of them (the Mooncake engine
    always does, whatever ``host`` is; so does the bootstrap service). A firewall cannot be seen from here: behind one,
    leave this off."""

    transfer_report: str | None = None
    """File to which one JSON line per transfer and side is added, with a digest of the moved pages. For tests: it
    reads every moved byte once more."""

    layout_dump: str | None = None
    """Path to which each worker writes its layout file; ``{rank}`` in it stands for the worker's number (needed with
    more than one), ``{engine}`` for the engine's id. See ``kvferry inspect`` and ``kvferry check``."""

    upstream_peers: Literal["refuse"] = "refuse"
    """Whether vLLM's own MooncakeConnector may be a peer. This version refuses such peers by name."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in _POSITIVE and not value > 0:
                raise _invalid(option.name, value, "a number above 0")
            if option.name in _FRACTIONS and not value <= 1:
                raise _invalid(option.name, value, "at most 1")
            if option.name in _PORTS and value is not None and not 0 <= value <= 65_535:
                raise _invalid(option.name, value, "a port, 0 to 65535")
        if self.bootstrap_server_address is not None:
            split_address(self.bootstrap_server_address)


_POSITIVE: Final = frozenset(
    {
        "publish_timeout",
        "pull_timeout",
        "orphan_timeout",
        "silence_timeout",
        "max_descriptors",
        "max_transfers",
        "max_pulls",
        "max_unknown_transfers",
        "quarantine_max_fraction",
    }
)
_FRACTIONS: Final = frozenset({"quarantine_max_fraction"})
_PORTS: Final = frozenset({"side_channel_port", "bootstrap_port"})


def parse_config(extra: Mapping[str, Any]) -> Config:
    """The options of ``kv_connector_extra_config``, checked; raises :class:`ConfigError`."""
    known = get_type_hints(Config)
    chosen: dict[str, Any] = {}
    for key, value in extra.items():
        if key in IGNORED:
            continue
        if key not in known:
            raise ConfigError(ConfigReason.UNKNOWN_OPTION, _unknown(key, [*known, *IGNORED]))
        chosen[key] = _checked(key, value, known[key])
    return Config(**chosen)


def ignored_options(extra: Mapping[str, Any]) -> dict[str, str]:
    """The given options that do nothing here, each with the reason; the connector logs them."""
    return {key: IGNORED[key] for key in extra if key in IGNORED}


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as host and port."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise _invalid("bootstrap_server_address", address, "host:port with a port from 1 to 65535")
    return host, int(port)


def _checked(key: str, value: object, hint: object) -> object:
    """``value`` if it has the type of the option; whole numbers are taken where a float is meant."""
    allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for one in allowed:
        if get_origin(one) is Literal:
            if value in get_args(one):
                return value
        elif one is float and type(value) in (int, float):
            return float(value)  # type: ignore[arg-type]
        elif isinstance(one, type) and type(value) is one:
            return value
    raise _invalid(key, value, " or ".join(_spell(one) for one in allowed))


def _spell(hint: object) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(value) for value in get_args(hint))
    return getattr(hint, "__name__", str(hint)).replace("NoneType", "null")


def _unknown(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return f"kv_connector_extra_config has no option {key!r}; the nearest is {near[0]!r}"


def _invalid(name: str, value: object, want: str) -> ConfigError:
    return ConfigError(ConfigReason.INVALID_VALUE, f"option {name} is {value!r}, must be {want}")
