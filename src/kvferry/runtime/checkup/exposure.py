"""Who can reach what listens here: ports that must be free, and networks that should be private.

A Mooncake engine listens on every interface, whatever address it is given, and lets anyone who reaches its ports read
and write all memory that is registered with it. No setting of the engine changes that, so neither does kvferry; the
network must (a firewall, a machine with private interfaces only, a network namespace). The bootstrap service listens
on every interface too, for the routers, but knows no memory. Beside an IPv4 host it does so in IPv4 alone, where an
engine has a port in both families whatever its host is. ``require_private_network`` refuses to start where something
that listens everywhere is reached at a public address of this machine, on whichever interface, or where the address
that is told to peers is itself public. A firewall cannot be seen from here: whoever has one leaves the option off.
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence

from kvferry.control import ALL, listen_on
from kvferry.errors import ConfigError, ConfigReason
from kvferry.runtime.checkup.addresses import HostAddress, LocalAddress
from kvferry.runtime.checkup.deployment import Deployment, bootstrap_interfaces, choose_bootstrap_port
from kvferry.runtime.checkup.records import Finding, Verdict

CLOSING = (
    "let only the engines of this deployment in: a firewall on these interfaces, private interfaces only, or a "
    "network namespace; require_private_network refuses to start on a machine with a public address"
)


def check_address(host: HostAddress) -> Finding:
    """Whether peers on other machines can mean this machine by it."""
    facts = {"address": host.ip, "scope": host.scope}
    if host.scope != "loopback":
        return Finding("address", Verdict.OK, f"{host.ip} is {host.scope}", facts=facts)
    said = f"{host.ip} is reached from this machine alone"
    if host.given == host.ip:
        return Finding("address", Verdict.NOTE, said, facts=facts)
    advice = f"for peers elsewhere, correct the entry of {host.given} in /etc/hosts or give the address itself"
    return Finding("address", Verdict.WARNING, f"name {host.given}: {said}", advice, facts)


def check_exposure(deployment: Deployment, host: HostAddress, here: Sequence[LocalAddress]) -> Finding:
    """Say what strangers can reach."""
    if (error := _exposed(deployment, host, here)) is not None and deployment.private_only:
        return Finding("exposure", Verdict.FAILED, error, CLOSING)
    seen = sorted({one.ip for one in _open_at(deployment, host, here) if one.scope in ("private", "public")})
    facts = {"listens_everywhere": list(deployment.open_ports), "addresses": seen}
    if not deployment.open_ports:
        return Finding("exposure", Verdict.OK, f"it listens on {host.ip} alone", facts=facts)
    what = " and ".join(deployment.open_ports)
    reads = "; whoever reaches the engine's ports can read and write all registered memory" if "Moon" in what else ""
    where = f": {', '.join(seen)}" if seen else ", of which only loopback is up"
    return Finding(
        "exposure", Verdict.WARNING if seen else Verdict.NOTE, f"open on every interface: {what}{where}{reads}",
        CLOSING if seen else "", facts,
    )  # fmt: skip


def require_private_network(deployment: Deployment, host: HostAddress, here: Sequence[LocalAddress]) -> None:
    """Raise :class:`ConfigError` where strangers may get through, if the operator asked for that."""
    if deployment.private_only and (error := _exposed(deployment, host, here)) is not None:
        raise ConfigError(ConfigReason.INVALID_VALUE, f"require_private_network is set, but {error}; {CLOSING}")


def check_ports(
    deployment: Deployment, host: HostAddress, environ: Mapping[str, str] = os.environ
) -> tuple[Finding, ...]:
    """Whether the ports that are fixed can be had now."""
    found = []
    if deployment.side_channel_port:
        found.append(_check_port("side channel port", host.ip, deployment.side_channel_port))
    if deployment.serves_bootstrap:
        port, _ = choose_bootstrap_port(deployment, environ)
        found.append(_check_port("bootstrap port", bootstrap_interfaces(deployment, host), port))
    return tuple(found)


def _exposed(deployment: Deployment, host: HostAddress, here: Sequence[LocalAddress]) -> str | None:
    """Why strangers may get through; ``None`` when the networks are private."""
    if host.scope == "public":
        return f"the address {host.ip} is public"
    if not deployment.open_ports:
        return None
    what = " and ".join(deployment.open_ports)
    if not here:
        return f"open on every interface: {what}; and the addresses of this machine cannot be listed"
    public = [f"{one.ip} on {one.interface}" for one in _open_at(deployment, host, here) if one.scope == "public"]
    return f"open on every interface: {what}; and {', '.join(public)} is public" if public else None


def _open_at(deployment: Deployment, host: HostAddress, here: Sequence[LocalAddress]) -> Iterator[LocalAddress]:
    """The addresses of this machine at which something that listens everywhere can be reached."""
    both = deployment.transport == "mooncake" or bootstrap_interfaces(deployment, host) == ALL
    return (one for one in here if both or ":" not in one.ip)


def _check_port(name: str, ip: str, port: int) -> Finding:
    where = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
    facts = {"address": ip, "port": port}
    try:
        listen_on(ip, port).close()
    except OSError as error:
        advice = "another process has it; choose another" if error.errno == errno.EADDRINUSE else ""
        return Finding(name, Verdict.FAILED, f"{where} cannot be bound: {error.strerror}", advice, facts)
    families = " in IPv6 and IPv4" if ip == ALL else ""
    return Finding(name, Verdict.OK, f"{where} is free{families}", facts=facts)
