"""The whole checkup, in the order in which things depend on each other."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Final

from kvferry.errors import ConfigError, TransportError
from kvferry.runtime.checkup.addresses import HostAddress, local_addresses
from kvferry.runtime.checkup.deployment import Deployment, choices_of, skipped
from kvferry.runtime.checkup.doors import check_doors
from kvferry.runtime.checkup.exposure import check_address, check_exposure, check_ports
from kvferry.runtime.checkup.limits import check_limits, check_ptrace
from kvferry.runtime.checkup.marker import Delivery, Way, deliver_to_peer, deliver_to_self
from kvferry.runtime.checkup.records import Checkup, Finding, Verdict
from kvferry.runtime.checkup.software import check_mooncake
from kvferry.runtime.checkup.upstream import check_upstream
from kvferry.transport.engine_settings import parse_variables

TRANSPORTS: Final = ("mooncake", "cma")


def examine(
    deployment: Deployment,
    *,
    peer: tuple[str, int] | None = None,
    upstream: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Checkup:
    """Look at everything; moves marker pages within this machine, and to ``peer`` where one is named.

    ``upstream``: URL of an engine under vLLM's own connector, which is asked what it should be declared as.
    """
    here = local_addresses()
    try:
        choices, host = choices_of(deployment, here, environ)
    except ConfigError as error:
        return Checkup((), (Finding.of_error("address", error),))
    void = skipped(deployment, environ)
    tell_engine(deployment)
    software = check_mooncake(deployment, host.ip)
    missing = frozenset() if software[-1].verdict is Verdict.OK else frozenset({"mooncake"})
    findings = (
        *void,
        check_address(host),
        *check_limits(deployment),
        check_ptrace(deployment),
        *check_ports(deployment, host, environ),
        check_exposure(deployment, host, here),
        check_doors(deployment, host),
        *software,
        *(_to_self(deployment, host, transport=transport, missing=missing) for transport in TRANSPORTS),
        *((_to_peer(deployment, host, peer),) if peer else ()),
        *((check_upstream(upstream, deployment.upstream_declared),) if upstream else ()),
    )
    return Checkup(choices, findings)


def tell_engine(deployment: Deployment) -> None:
    """Set the engine's variables, for this process and its children; before an engine is loaded."""
    os.environ.update(parse_variables(deployment.variables))


def way_of(deployment: Deployment, host: HostAddress) -> Way:
    """How this deployment moves bytes."""
    return Way(deployment.transport, host.ip, deployment.protocol, deployment.device)


def _to_self(deployment: Deployment, host: HostAddress, *, transport: str, missing: frozenset[str]) -> Finding:
    name = f"marker page over {transport}"
    if transport in missing:
        return Finding(name, Verdict.SKIPPED, f"not sent: there is no {transport} engine, see above")
    chosen = transport == deployment.transport
    way = way_of(deployment, host) if chosen else Way(transport, host.ip)
    bad = Verdict.FAILED if chosen else Verdict.NOTE
    return _delivered(name, lambda: deliver_to_self(way), bad)


def _to_peer(deployment: Deployment, host: HostAddress, peer: tuple[str, int]) -> Finding:
    name = f"marker page to {peer[0]}:{peer[1]}"
    return _delivered(name, lambda: deliver_to_peer(peer, way_of(deployment, host)), Verdict.FAILED)


def _delivered(name: str, deliver: Callable[[], Delivery], bad: Verdict) -> Finding:
    try:
        delivery = deliver()
    except TransportError as error:
        return Finding.of_error(name, error, verdict=bad)
    return Finding(name, Verdict.OK, str(delivery), facts=asdict(delivery))
