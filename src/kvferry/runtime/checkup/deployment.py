"""The settings that decide how a rank is reached and how its bytes move, and why each has its value.

An explicit setting always wins: the order is option, then environment variable, then what was detected, then the
default. What a setting makes irrelevant is said too, so that nobody waits for an effect of it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from kvferry.control import ALL, every_interface
from kvferry.runtime.checkup.addresses import HostAddress, LocalAddress, resolve_host, route_address
from kvferry.runtime.checkup.records import Choice, Finding, Verdict
from kvferry.runtime.upstream_caches import Declared
from kvferry.transport.engine_settings import DEVICE_PROTOCOLS, engine_ports, engine_variables, parse_variables

VARIABLES: Final = ("VLLM_HOST_IP", "VLLM_MOONCAKE_BOOTSTRAP_PORT")
DEFAULT_BOOTSTRAP_PORT: Final = 8998
UNREAD: Final = {
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "options publish_timeout and pull_timeout",
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "nothing: a rank tries for 30 s to register",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "option host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "option side_channel_port",
}
"""Variables of vLLM's own connectors that are not read here, and what stands in their place."""
_INFINIBAND: Final = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Settings of one rank, as they were given."""

    transport: Literal["mooncake", "cma"] = "mooncake"
    protocol: str = "tcp"
    """Of the Mooncake engine."""
    device: str = ""
    variables: tuple[str, ...] = ()
    """Settings of the engine, as ``NAME=value``."""
    host: str | None = None
    host_why: str = "option host"
    side_channel_port: int = 0
    bootstrap_port: int | None = None
    bootstrap_address: str | None = None
    """Of a bootstrap service that runs elsewhere."""
    register_host: str = "127.0.0.1"
    """Where the ranks of this engine register, if it serves a bootstrap service."""
    produces: bool = True
    """Whether it may serve the bootstrap service."""
    private_only: bool = False
    upstream_peers: str = "refuse"
    """Which engines of vLLM's own MooncakeConnector may be peers, in words."""
    upstream_assumed: tuple[str, ...] = ()
    """What such a peer has as this engine has it, since nothing else is declared."""
    upstream_declared: Declared = field(default_factory=Declared)
    """What is declared of such a peer."""
    upstream_networks: tuple[str, ...] = ()
    """Networks of such peers that are listed by hand."""
    secret_file: str | None = None
    tls: bool = False
    """Whether it serves its bootstrap service over TLS."""
    explicit: frozenset[str] = frozenset()
    """Names of the options that were set."""

    @property
    def serves_bootstrap(self) -> bool:
        """Whether rank 0 of it listens for producers to register."""
        return self.produces and self.bootstrap_address is None

    @property
    def open_ports(self) -> tuple[str, ...]:
        """What of it listens on every interface, whatever ``host`` is."""
        engine = ("the Mooncake engine's ports",) if self.transport == "mooncake" else ()
        return (*engine, *(("the bootstrap service's port",) if self.serves_bootstrap else ()))


def choose_host(deployment: Deployment, environ: Mapping[str, str]) -> tuple[str, str]:
    """The host setting that counts, and whose it is."""
    if deployment.host is not None:
        return deployment.host, deployment.host_why
    if environ.get("VLLM_HOST_IP"):
        return environ["VLLM_HOST_IP"], "VLLM_HOST_IP"
    if (found := route_address()) is not None:
        return found, "detected: the address towards the default route"
    return "127.0.0.1", "detected: this machine has no route to the outside"


def choose_bootstrap_port(deployment: Deployment, environ: Mapping[str, str]) -> tuple[int, str]:
    """The port of the bootstrap service, and whose setting it is."""
    if deployment.bootstrap_port is not None:
        return deployment.bootstrap_port, "option bootstrap_port"
    text = environ.get("VLLM_MOONCAKE_BOOTSTRAP_PORT", "")
    if text.isascii() and text.isdigit():
        return int(text), "VLLM_MOONCAKE_BOOTSTRAP_PORT"
    return DEFAULT_BOOTSTRAP_PORT, "default"


def bootstrap_interfaces(deployment: Deployment, host: HostAddress) -> str:
    """The address on which rank 0 serves the bootstrap service: all of IPv4, or of both families."""
    return every_interface(host.ip, deployment.register_host)


def choices_of(
    deployment: Deployment, here: Sequence[LocalAddress], environ: Mapping[str, str] = os.environ
) -> tuple[tuple[Choice, ...], HostAddress]:
    """Every setting with its reason, and the address that comes out; raises ``ConfigError`` where there is none."""
    given, why = choose_host(deployment, environ)
    host = resolve_host(given, here)
    if host.given != host.ip:
        also = f", also {', '.join(host.others)}" if host.others else ""
        why = f"{why}: name {host.given} resolves to it here{also}"
    return (
        Choice("transport", deployment.transport, _whose(deployment, "transport")),
        *_engine_choices(deployment, environ),
        Choice("address", host.ip, why),
        Choice("interface", host.interface, f"it has that address, which is {host.scope}"),
        _side_channel(deployment),
        *_bootstrap(deployment, host, environ),
        _upstream(deployment),
    ), host


def skipped(deployment: Deployment, environ: Mapping[str, str] = os.environ) -> tuple[Finding, ...]:
    """Settings that have no effect beside others."""
    found = []
    if deployment.host is not None and environ.get("VLLM_HOST_IP") not in (None, "", deployment.host):
        found.append(f"VLLM_HOST_IP={environ['VLLM_HOST_IP']}: {deployment.host_why} wins")
    if deployment.transport == "cma":
        found += [
            f"option {name}: the cma transport has none"
            for name in ("mooncake_protocol", "device_name", "mooncake_env")
            if name in deployment.explicit
        ]
    else:
        found += [
            f"{name}={environ[name]}: option mooncake_env wins"
            for name, value in parse_variables(deployment.variables).items()
            if environ.get(name, value) != value
        ]
    if deployment.bootstrap_address is not None:
        if "bootstrap_port" in deployment.explicit:
            found.append("option bootstrap_port: the service runs elsewhere (bootstrap_server_address)")
    elif deployment.bootstrap_port is not None and environ.get("VLLM_MOONCAKE_BOOTSTRAP_PORT"):
        found.append("VLLM_MOONCAKE_BOOTSTRAP_PORT: option bootstrap_port wins")
    found += [f"{name}: not read here; in its place: {instead}" for name, instead in UNREAD.items() if name in environ]
    return tuple(Finding("settings", Verdict.SKIPPED, one) for one in found)


def rdma_devices() -> tuple[str, ...]:
    """Network devices that could do RDMA."""
    return tuple(sorted(path.name for path in _INFINIBAND.iterdir())) if _INFINIBAND.is_dir() else ()


def _engine_choices(deployment: Deployment, environ: Mapping[str, str]) -> tuple[Choice, ...]:
    if deployment.transport == "cma":
        return (Choice("protocol", "process_vm_writev", "what the cma transport is; CPU memory of one host"),)
    devices = rdma_devices()
    seen = f"this machine has {', '.join(devices)}" if devices else "this machine has no RDMA device"
    needed = deployment.protocol in DEVICE_PROTOCOLS
    device = deployment.device or ("all that it finds" if needed else "none needed")
    why = "option device_name" if deployment.device else f"{seen}; device_name is not set"
    return (
        Choice("protocol", deployment.protocol, f"{_whose(deployment, 'mooncake_protocol')}; {seen}"),
        Choice("device", device, why),
        *_engine_variables(deployment, environ),
    )


def _upstream(deployment: Deployment) -> Choice:
    """Whether vLLM's own connector may be at the other end, and what is taken for granted about it then."""
    if deployment.transport != "mooncake":
        return Choice("upstream peers", "refuse", f"vLLM's own connector does not speak {deployment.transport}")
    why = _whose(deployment, "upstream_peers")
    if deployment.upstream_peers != "refuse":
        assumed = ", ".join(deployment.upstream_assumed)
        why += f"; assumed to be as here: {assumed}" if assumed else "; all that they cannot show is declared"
    return Choice("upstream peers", deployment.upstream_peers, why)


def _engine_variables(deployment: Deployment, environ: Mapping[str, str]) -> tuple[Choice, ...]:
    """What the engine is told besides, and on which ports it will listen."""
    chosen = parse_variables(deployment.variables)
    told = engine_variables({**environ, **chosen})
    first, last = engine_ports(told)
    given = [name for name in ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT") if name in told]
    ports = Choice(
        "engine ports",
        f"two free ones from {first} to {last} for each engine",
        f"{' and '.join(given)}: {_who_told(given[0], chosen)}" if given else "the engine's default",
    )
    if not told:
        return (ports,)
    why = "; ".join(f"{name}: {_who_told(name, chosen)}" for name in told)
    return (ports, Choice("engine variables", ", ".join(f"{name}={value}" for name, value in told.items()), why))


def _who_told(name: str, chosen: Mapping[str, str]) -> str:
    return "option mooncake_env" if name in chosen else "environment"


def _side_channel(deployment: Deployment) -> Choice:
    if deployment.side_channel_port == 0:
        return Choice("side channel port", "any free", _whose(deployment, "side_channel_port"))
    return Choice("side channel port", f"{deployment.side_channel_port} plus the rank", "option side_channel_port")


def _bootstrap(deployment: Deployment, host: HostAddress, environ: Mapping[str, str]) -> tuple[Choice, ...]:
    if deployment.bootstrap_address is not None:
        return (Choice("bootstrap", deployment.bootstrap_address, "option bootstrap_server_address"),)
    if not deployment.produces:
        return (Choice("bootstrap", "none served", "this engine only consumes; requests name their producer's"),)
    port, why = choose_bootstrap_port(deployment, environ)
    address = bootstrap_interfaces(deployment, host)
    where = f"[{ALL}], every interface in IPv6 and IPv4" if address == ALL else f"{address}, every interface in IPv4"
    return (Choice("bootstrap", f"port {port}, served by rank 0 on {where}", why),)


def _whose(deployment: Deployment, option: str) -> str:
    return f"option {option}" if option in deployment.explicit else "default"
