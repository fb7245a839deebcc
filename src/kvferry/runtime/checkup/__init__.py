"""What this machine and these settings will come to, before a transfer depends on it.

Glossary: a *choice* is a setting with its value and why it has it; a *finding* is something looked at, with a verdict
and, where it is not good, advice; a *checkup* is all of both. ``kvferry doctor`` makes one and prints it; the connector
prints the same choices and the cheap findings when it starts. A *marker page* is written by one process into another
through a transport, timed, and compared.
"""

from kvferry.runtime.checkup.addresses import HostAddress, LocalAddress, local_addresses, resolve_host
from kvferry.runtime.checkup.deployment import Deployment, choices_of, skipped
from kvferry.runtime.checkup.doors import check_doors
from kvferry.runtime.checkup.examine import examine, tell_engine, way_of
from kvferry.runtime.checkup.exposure import check_address, check_exposure, check_ports, require_private_network
from kvferry.runtime.checkup.limits import check_limits, check_ptrace
from kvferry.runtime.checkup.marker import Delivery, Way, deliver_to_peer, deliver_to_self, serve_markers
from kvferry.runtime.checkup.records import Checkup, Choice, Finding, Verdict
from kvferry.runtime.checkup.software import check_mooncake, mooncake_version

__all__ = [
    "Checkup",
    "Choice",
    "Delivery",
    "Deployment",
    "Finding",
    "HostAddress",
    "LocalAddress",
    "Verdict",
    "Way",
    "check_address",
    "check_doors",
    "check_exposure",
    "check_limits",
    "check_mooncake",
    "check_ports",
    "check_ptrace",
    "choices_of",
    "deliver_to_peer",
    "deliver_to_self",
    "examine",
    "local_addresses",
    "mooncake_version",
    "require_private_network",
    "resolve_host",
    "serve_markers",
    "skipped",
    "tell_engine",
    "way_of",
]
