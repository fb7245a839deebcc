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

from kvferry.control import Networks
from kvferry.errors import ConfigError, ConfigReason
from kvferry.protocol import MAX_MESSAGE_BYTES
from kvferry.runtime.options import UpstreamPeers
from kvferry.runtime.upstream_caches import Declared
from kvferry.transport.engine_settings import parse_variables

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
    """Protocol of the Mooncake engine: ``tcp``, ``rdma``, ``efa``, ``nvlink`` (between hosts) or ``nvlink_intra``. One
    that the host or the installed engine cannot speak is an error."""

    device_name: str = ""
    """Network devices for the Mooncake engine, comma separated; empty lets the engine choose."""

    mooncake_env: tuple[str, ...] = ()
    """Settings for the Mooncake engine, as `["MC_GID_INDEX=3", "MC_IB_TC=96"]`; they win over the environment. Names:
    `MC_...` and `WITH_NVIDIA_PEERMEM`, without those that other options decide."""

    host: str | None = None
    """Address that this engine binds and tells its peers; default: ``VLLM_HOST_IP``, else vLLM's own choice."""

    side_channel_port: int = 0
    """First port of the message socket; rank r takes this plus r, rank r of data parallel rank d this plus d times the
    ranks of an engine plus r. 0 takes a free port."""

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

    write_timeout: float = 120.0
    """A write that takes longer than this is stopped, and has failed."""

    lost_consumer_grace: float = 5.0
    """How long a producer still keeps a cache once every consumer that came for it is lost or was refused: a router may
    send another."""

    max_descriptors: int = 16_000_000
    """Most copies that one request may be cut into; a request that needs more is refused."""

    max_transfers: int = 16_384
    """Most transfers that one rank knows at once; a fetch beyond it fails, a cache published beyond it is not kept."""

    max_pulls: int = 8_192
    """Most pulls that one producer rank has open; one more is answered with an error."""

    max_unknown_transfers: int = 4_096
    """Most transfers that only peers have spoken of, half of them of one consumer rank; a pull for one more is answered
    with an error."""

    max_layouts: int = 4_096
    """Most layouts of peers' ranks that one rank remembers; one that was forgotten is asked for again."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Largest message of a peer that is read, at most the default; a peer that sends a larger one is cut off."""

    max_queued_messages: int = 10_000
    """Most messages that wait to be sent to one peer; at one more it is taken as lost."""

    max_unread_messages: int = 10_000
    """Most messages of one peer that wait to be read here; then that peer waits, and others do not. One that waits for
    ``silence_timeout`` takes this process as lost, so this stays above the transfers that a peer has under way."""

    quarantine_max_fraction: float = 0.25
    """Part of a consumer's blocks that failed and aborted transfers may hold until they are proven quiet. Above it the
    receive engines in doubt are renewed at once, and those of aborted transfers if these are not quiet in two seconds;
    blocks never go back unproven. Where that is no proof (``cma``, a producer that is stopped or wedged) new loads are
    refused until its process ends or goes on."""

    debug_socket_dir: str | None = None
    """Directory (mode 0700) in which each rank answers `kvferry story` on a Unix socket; unset: nothing listens."""

    require_private_network: bool = False
    """Refuse to start where strangers may reach this engine's memory: when the address told to peers is public, or when
    any interface of this machine has a public address while something listens on all of them (the Mooncake engine
    always does, whatever ``host`` is; so does the bootstrap service). A firewall cannot be seen from here: behind one,
    leave this off."""

    retries: int = 0
    """Of a consumer: how many other producers are tried when a fetch fails, of those that the router has named for the
    request (`remote_alternatives`). The next one is asked when the blocks are proven quiet. See docs/outcomes.md."""

    verify: Literal["off", "sample", "full"] = "off"
    """Of a consumer: compare digests of the pages that came with the producer's before a request goes on; `sample`
    takes about one page in 16, and at least one of each layer. A mismatch is a failed load. A
    producer that cannot take part is refused."""

    transfer_report: str | None = None
    """File to which one JSON line per transfer and side is added, with a digest of the moved pages. For tests: it
    reads every moved byte once more."""

    layout_dump: str | None = None
    """Path to which each worker writes its layout file; ``{rank}`` in it stands for the worker's number (needed with
    more than one), ``{engine}`` for the engine's id (needed with data parallel ranks). See ``kvferry inspect`` and
    ``kvferry check``."""

    secret_file: str | None = None
    """File of a secret that all engines of a deployment and their router share (at least 32 random bytes, mode 0600);
    default: environment variable `KVFERRY_SECRET`, else none. With one, kvferry peers speak CURVE to each other and to
    nobody else, and a rank's registration must be signed. Further lines are known beside the first, for a change of the
    secret without a stop. See docs/security.md."""

    secure_port: int = 0
    """With a secret: first port of the CURVE socket, counted on as `side_channel_port` is. 0 takes that port where no
    plain socket is open beside it, else a free one."""

    bootstrap_tls_cert: str | None = None
    """PEM file of the certificate with which this engine's bootstrap service serves HTTPS."""

    bootstrap_tls_key: str | None = None
    """PEM file of its key."""

    bootstrap_ca: str | None = None
    """PEM file of the authorities by which bootstrap services are believed; with it they are asked over HTTPS only."""

    write_targets: tuple[str, ...] | None = None
    """Networks (`["10.1.0.0/16"]`) into which this engine may write caches; default: loopback, private and link-local
    ones. A consumer elsewhere is refused before a byte moves."""

    upstream_peers: Literal["allow", "refuse"] | tuple[str, ...] = "allow"
    """Whether vLLM's own MooncakeConnector may be a peer: `allow`, `refuse`, or a list of networks (`["10.1.0.0/16"]`)
    in which it may be one. With a secret set, `allow` means `refuse`: such peers cannot know it. See
    docs/upstream.md."""

    upstream_peer: Declared | None = None
    """What vLLM's own MooncakeConnector at the other end has and cannot show, each of it optional:
    `{"block_size": 128, "kernel_block_size": 128, "cache_dtype": "bfloat16", "layout": "LBHNC"}`.
    What is not declared is taken to be as it is here, with a warning for each such peer; the layout, to be the one that
    its connector asks vLLM for. See docs/upstream.md."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in _POSITIVE and not value > 0:
                raise _invalid(option.name, value, "a number above 0")
            if option.name in _COUNTS and not value >= 0:
                raise _invalid(option.name, value, "0 or more")
            if option.name in _MOST and not value <= _MOST[option.name]:
                raise _invalid(option.name, value, f"at most {_MOST[option.name]}")
            if option.name in _PORTS and value is not None and not 0 <= value <= 65_535:
                raise _invalid(option.name, value, "a port, 0 to 65535")
        if self.bootstrap_server_address is not None:
            split_address(self.bootstrap_server_address)
        parse_variables(self.mooncake_env)
        UpstreamPeers.parse(self.upstream_peers)
        if self.write_targets is not None:
            Networks.parse(self.write_targets, option="write_targets")
        if (self.bootstrap_tls_cert is None) != (self.bootstrap_tls_key is None):
            raise ConfigError(ConfigReason.INVALID_VALUE, "bootstrap_tls_cert and bootstrap_tls_key go together")

    @property
    def declared_peer(self) -> Declared:
        """What ``upstream_peer`` declares; nothing where it is not given."""
        return self.upstream_peer or Declared()


_POSITIVE: Final = frozenset(
    {
        "publish_timeout",
        "pull_timeout",
        "orphan_timeout",
        "silence_timeout",
        "write_timeout",
        "lost_consumer_grace",
        "max_layouts",
        "max_message_bytes",
        "max_queued_messages",
        "max_unread_messages",
        "max_descriptors",
        "max_transfers",
        "max_pulls",
        "max_unknown_transfers",
        "quarantine_max_fraction",
    }
)
_COUNTS: Final = frozenset({"retries"})
_MOST: Final = {"quarantine_max_fraction": 1, "max_message_bytes": MAX_MESSAGE_BYTES}
_PORTS: Final = frozenset({"side_channel_port", "bootstrap_port", "secure_port"})


def parse_config(extra: Mapping[str, Any]) -> Config:
    """The options of ``kv_connector_extra_config``, checked; raises :class:`ConfigError`."""
    known = get_type_hints(Config)
    chosen: dict[str, Any] = {}
    for key, value in extra.items():
        if key in IGNORED:
            continue
        if key not in known:
            raise ConfigError(ConfigReason.UNKNOWN_OPTION, _unknown(key, [*known, *IGNORED]))
        chosen[key] = _checked(key, value, hint=known[key])
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


def _checked(key: str, value: object, *, hint: object) -> object:
    """``value`` if it has the type of the option; whole numbers are taken where a float is meant."""
    allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for one in allowed:
        if get_origin(one) is Literal:
            if isinstance(value, str) and value in get_args(one):
                return value
        elif get_origin(one) is tuple:
            if isinstance(value, (list, tuple)) and all(type(part) is str for part in value):
                return tuple(value)
        elif one is Declared:
            if isinstance(value, Mapping):
                return Declared.parse(value)
        elif one is float and type(value) in (int, float):
            return float(value)  # type: ignore[arg-type]
        elif isinstance(one, type) and type(value) is one:
            return value
    raise _invalid(key, value, " or ".join(_spell(one) for one in allowed))


def _spell(hint: object) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(value) for value in get_args(hint))
    if get_origin(hint) is tuple:
        return "a list of texts"
    if hint is Declared:
        return "a table"
    return getattr(hint, "__name__", str(hint)).replace("NoneType", "null")


def _unknown(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return f"kv_connector_extra_config has no option {key!r}; the nearest is {near[0]!r}"


def _invalid(name: str, value: object, want: str) -> ConfigError:
    return ConfigError(ConfigReason.INVALID_VALUE, f"option {name} is {value!r}, must be {want}")
