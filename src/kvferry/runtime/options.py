"""What the runtimes are told when they are built: names, addresses and times, as frozen values."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from kvferry.control import Networks, Secret, ServerTls, SocketOptions
from kvferry.protocol import ConsumerLimits, ProducerLimits
from kvferry.transport import Transport

PRIVATE_NETWORKS: Final = Networks.parse(
    (
        *("127.0.0.0/8", "::1"),
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
        *("169.254.0.0/16", "fe80::/10"),
    ),
    option="write_targets",
)
"""Loopback, private and link-local networks."""

TransportFactory = Callable[[], Transport]
"""Makes a fresh engine, with nothing registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Deadlines, in seconds."""

    publish: float = 480.0
    """A published cache that nobody pulls is given up after this."""
    announced: float = 86_400.0
    """A transfer that was announced, and of which no more is heard, is forgotten after this. No block is held for it,
    and whoever waits for it has a deadline; how long a prompt waits for its turn is not known here."""
    pull: float = 480.0
    """A consumer waits this long for a cache."""
    orphan: float = 60.0
    """A pull for a transfer that was never announced is answered after this."""
    silence: float = 4.0
    """A peer without a sign of life for this long is taken as lost."""
    retry_quiet: float = 20.0
    """A failed fetch waits so long at most for its blocks to be quiet, when another producer could be tried."""
    resolve: float = 5.0
    """How long a consumer goes on asking a bootstrap service that does not answer, or does not list the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """Where producers make themselves known."""

    url: str
    """Of the service that this rank registers with."""
    serve: tuple[str, int] | None = None
    """Host and port, when this rank runs the service."""
    tls: ServerTls | None = None
    """Certificate and key, when it runs the service over TLS."""


@dataclass(frozen=True, slots=True)
class UpstreamPeers:
    """Which of vLLM's own MooncakeConnectors may be peers: all, none, or those in listed networks."""

    everywhere: bool = False
    networks: Networks = field(default_factory=Networks)

    @classmethod
    def parse(cls, value: "Literal['allow', 'refuse'] | tuple[str, ...]") -> Self:
        """From the option ``upstream_peers``; raises ``ConfigError``."""
        if isinstance(value, str):
            return cls(everywhere=value == "allow")
        return cls(networks=Networks.parse(value, option="upstream_peers"))

    @property
    def any(self) -> bool:
        """Whether any such peer may be one at all."""
        return self.everywhere or bool(self.networks.members)

    def admits(self, address: str) -> bool:
        """Whether such a peer at this IP address may be one."""
        return self.everywhere or self.networks.holds(address)

    def beside_a_secret(self) -> Self:
        """What is left of it where a secret is set: only networks that were listed by hand."""
        return type(self)(networks=self.networks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How one rank is reached, how it moves bytes, how long it waits."""

    host: str
    """Address that is bound and told to peers."""
    make_transport: TransportFactory
    enter_thread: Callable[[], None] | None = None
    """Called first in every thread that touches the memory: makes its device the current one. ``None``: no device."""
    port: int = 0
    """Of the message socket; 0 takes a free one."""
    bootstrap: Bootstrap | None = None
    """``None``: this rank is found by other means (or only consumes)."""
    dp_rank: int = 0
    """Data parallel rank of the engine: the key of its entry in the bootstrap service."""
    timing: Timing = field(default_factory=Timing)
    max_layouts: int = 4096
    """Layouts of peers that are remembered at once; the one least recently used is asked for again."""
    sockets: SocketOptions = field(default_factory=SocketOptions)
    """Queues and sizes of the message sockets. ``silence`` is taken from ``timing``."""
    max_descriptors: int = 16_000_000
    report: str | None = None
    """File of the transfer report."""
    debug_dir: str | None = None
    """Directory in which each runtime answers ``kvferry story`` on a Unix socket; ``None``: nothing listens."""
    producer_limits: ProducerLimits = field(default_factory=ProducerLimits)
    """Bounds of a producer's machine. ``stranger_wait`` is taken from ``timing``."""
    consumer_limits: ConsumerLimits = field(default_factory=ConsumerLimits)
    """Bounds of a consumer's machine."""
    retries: int = 0
    """How many other producers, of those that a fetch names, a consumer tries when the first one fails."""
    verify: Literal["off", "sample", "full"] = "off"
    """What a consumer compares with the producer before a fetch is done: nothing, some pages, or all that moved."""
    quarantine_max_fraction: float = 0.25
    """Part of a consumer's blocks that may be held for fetches that are over before doubt is fenced at once."""
    upstream_peers: UpstreamPeers = field(default_factory=UpstreamPeers)
    """Which of vLLM's own connectors are served and pulled from."""
    secret: Secret | None = None
    """Shared by the engines of a deployment and their router; with it kvferry peers speak CURVE and sign orders."""
    secure_port: int = 0
    """Of the secure door; 0 takes ``port`` where that is the only door, else a free one."""
    bootstrap_ca: str | None = None
    """File of the authorities that bootstrap services are believed by; with it they are asked over TLS only."""
    write_targets: Networks = field(default_factory=lambda: PRIVATE_NETWORKS)
    """Where a producer may write to."""
