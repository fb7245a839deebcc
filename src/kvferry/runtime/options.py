"""What the runtimes are told when they are built: names, addresses and times, as frozen values."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.protocol import ConsumerLimits, ProducerLimits
from kvferry.transport import Transport

TransportFactory = Callable[[], Transport]
"""Makes a fresh engine, with nothing registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Deadlines, in seconds."""

    publish: float = 480.0
    """A published cache that nobody pulls is given up after this."""
    pull: float = 480.0
    """A consumer waits this long for a cache."""
    orphan: float = 60.0
    """A pull for a transfer that was never announced is answered after this."""
    silence: float = 4.0
    """A peer without a sign of life for this long is taken as lost."""
    resolve: float = 5.0
    """How long a consumer goes on asking a bootstrap service that does not answer, or does not list the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """Where producers make themselves known."""

    url: str
    """Of the service that this rank registers with."""
    serve: tuple[str, int] | None = None
    """Host and port, when this rank runs the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How one rank is reached, how it moves bytes, how long it waits."""

    host: str
    """Address that is bound and told to peers."""
    make_transport: TransportFactory
    port: int = 0
    """Of the message socket; 0 takes a free one."""
    bootstrap: Bootstrap | None = None
    """``None``: this rank is found by other means (or only consumes)."""
    dp_rank: int = 0
    """Data parallel rank of the engine: the key of its entry in the bootstrap service."""
    timing: Timing = field(default_factory=Timing)
    max_descriptors: int = 16_000_000
    report: str | None = None
    """File of the transfer report."""
    debug_dir: str | None = None
    """Directory in which each runtime answers ``kvferry story`` on a Unix socket; ``None``: nothing listens."""
    producer_limits: ProducerLimits = field(default_factory=ProducerLimits)
    """Bounds of a producer's machine. ``stranger_wait`` is taken from ``timing``."""
    consumer_limits: ConsumerLimits = field(default_factory=ConsumerLimits)
    """Bounds of a consumer's machine."""
    quarantine_max_fraction: float = 0.25
    """Part of a consumer's blocks that may be held for fetches that are over before fences come at once."""
