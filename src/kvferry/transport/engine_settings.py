"""What surrounds a Mooncake engine: its environment variables, and which protocol it will really use.

The engine reads its settings from the environment when it is built, and takes the *name* of a protocol without looking
at it: what it installs follows from the build, the devices that it finds and a few variables. So a wrong name, or
``rdma`` on a host without a device, silently means TCP. These functions decide beforehand what an engine must be told,
and judge afterwards, from the devices that the engine itself found, whether it uses what was asked for.
"""

import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvferry.errors import ConfigError, ConfigReason, TransportError, TransportReason

MAX_OUTSTANDING = 1000
"""Rows in flight to one peer: the engine's queue holds 1,024 and an overflow can break the pair for good."""

DEFAULTS: Mapping[str, str] = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "1024",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "1024",
    # Else every engine writes a dozen lines to standard error.
    "MC_LOG_LEVEL": "WARNING",
}
"""Settings that are made unless the operator has made them."""

_BUILDS: Mapping[str, str | None] = {
    "tcp": None,
    "rdma": None,
    "efa": "SUPPORT_EFA",
    "nvlink": "SUPPORT_MNNVL",
    "nvlink_intra": "SUPPORT_INTRA_NVLINK",
}
"""Protocols that kvferry can tell apart, and the flag of the engine's module that says it was built with it."""

_DECIDED: Mapping[str, str] = {
    "MC_FORCE_TCP": "mooncake_protocol says it",
    "MC_FORCE_HCA": "mooncake_protocol says it",
    "MC_FORCE_MNNVL": "mooncake_protocol says it",
    "MC_INTRANODE_NVLINK": "mooncake_protocol says it",
    "MC_INTRA_NVLINK": "mooncake_protocol says it",
    "MC_TE_FILTERS": "device_name says it",
    "MC_USE_IPV6": "the family of host says it",
    "MC_TCP_PROTO": "it makes the engine report success before the bytes have arrived",
    "MC_USE_TENT": "kvferry's fences were measured on the implementation that the engine takes by itself",
    "MC_USE_TEV1": "kvferry's fences were measured on the implementation that the engine takes by itself",
}
"""Variables that are not the operator's to pass through ``mooncake_env``, and why."""

_NAME = re.compile(r"MC_[A-Z0-9_]+|WITH_NVIDIA_PEERMEM")
FIRST_PORT, LAST_PORT = 15_000, 17_000
"""Between these an engine takes two free ports, unless ``MC_MIN_RPC_PORT`` and ``MC_MAX_RPC_PORT`` say otherwise."""

DEVICE_PROTOCOLS = frozenset({"rdma", "efa"})
"""Protocols in whose place the engine silently uses TCP when it finds no network device."""


@dataclass(frozen=True, slots=True)
class Build:
    """With which optional protocols the installed engine was built."""

    flags: frozenset[str]
    """Names ``SUPPORT_*`` that are true."""

    @property
    def nvlink(self) -> bool:
        """Built for NVLink, which then is preferred over TCP."""
        return bool(self.flags & {"SUPPORT_MNNVL", "SUPPORT_INTRA_NVLINK"})

    @property
    def words(self) -> tuple[str, ...]:
        """The flags, as people say them.

        >>> Build(frozenset({"SUPPORT_CUDA", "SUPPORT_MNNVL"})).words
        ('CUDA', 'MNNVL')
        """
        return tuple(sorted(flag.removeprefix("SUPPORT_") for flag in self.flags))

    def check_memory(self, memories: Iterable[str]) -> None:
        """Refuse a device's memory that this engine does not know as such: it would end the process on touching it."""
        devices = sorted({one for one in memories if one.startswith("cuda")})
        if devices and "SUPPORT_CUDA" not in self.flags:
            raise TransportError(
                TransportReason.UNAVAILABLE,
                f"the installed Mooncake engine is built without CUDA and cannot take {devices[0]} memory: "
                "pip uninstall mooncake-transfer-engine-non-cuda, then pip install mooncake-transfer-engine",
            )


def parse_variables(pairs: Iterable[str]) -> dict[str, str]:
    """``NAME=value`` texts as a mapping; raises :class:`ConfigError` for what the engine does not read or may not have.

    >>> parse_variables(["MC_GID_INDEX=3"])
    {'MC_GID_INDEX': '3'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _NAME.fullmatch(name) or "\0" in value:
            raise _refused(pair, "NAME=value, with a name that the engine reads: MC_... or WITH_NVIDIA_PEERMEM")
        if name in _DECIDED:
            raise _refused(pair, f"without {name}: {_DECIDED[name]}")
        if name in found:
            raise _refused(pair, f"given once: {name} was {found[name]!r} already")
        found[name] = value
    return found


def engine_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What an engine of this process is told by its environment."""
    return {name: environ[name] for name in sorted(environ) if _NAME.fullmatch(name)}


def engine_ports(environ: Mapping[str, str]) -> tuple[int, int]:
    """First and last port that an engine of this process may listen on."""

    def port(name: str, otherwise: int) -> int:
        text = environ.get(name, "")
        return int(text) if text.isascii() and text.isdigit() else otherwise

    return port("MC_MIN_RPC_PORT", FIRST_PORT), port("MC_MAX_RPC_PORT", LAST_PORT)


def missing_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The defaults that the operator has left open."""
    return {name: value for name, value in DEFAULTS.items() if name not in environ}


def outstanding_limit(environ: Mapping[str, str]) -> int:
    """How many rows may be in flight to one peer under the operator's queue length."""
    text = environ.get("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "")
    queue = int(text) if text.isascii() and text.isdigit() else MAX_OUTSTANDING
    return max(1, min(MAX_OUTSTANDING, queue))


def settings_for(protocol: str, build: Build, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set while the engine is built, so that it installs ``protocol``; refuses what cannot be had."""
    if protocol not in _BUILDS:
        raise _wrong(f"unknown protocol {protocol!r}; known: {', '.join(_BUILDS)}")
    if environ.get("MC_TCP_PROTO") == "1":
        raise _wrong("MC_TCP_PROTO=1 makes the engine report success before the bytes have arrived; unset it")
    flag = _BUILDS[protocol]
    if flag is not None and flag not in build.flags:
        raise _wrong(f"protocol {protocol!r} needs a Mooncake engine built with it ({flag}); this one would use TCP")
    if protocol != "tcp" and "MC_FORCE_TCP" in environ:
        raise _wrong(f"protocol {protocol!r} was asked for, but MC_FORCE_TCP is set and forces TCP")
    if protocol == "rdma" and "SUPPORT_EFA" in build.flags:
        raise _wrong("an engine built for EFA installs TCP when asked for 'rdma'; ask for 'efa'")
    for forcing in ("MC_INTRANODE_NVLINK", "MC_FORCE_MNNVL"):
        if protocol == "rdma" and forcing in environ and build.nvlink:
            raise _wrong(f"protocol 'rdma' was asked for, but {forcing} is set and forces NVLink")
    if protocol == "nvlink" and "MC_INTRANODE_NVLINK" in environ:
        raise _wrong("protocol 'nvlink' was asked for, but MC_INTRANODE_NVLINK is set and forces 'nvlink_intra'")
    match protocol:
        case "tcp":
            return {"MC_FORCE_TCP": "1"}
        case "nvlink":
            return {"MC_FORCE_MNNVL": "1"}
        case "nvlink_intra":
            return {"MC_INTRANODE_NVLINK": "1"}
        case _:
            return {}


def family_settings(host: str, environ: Mapping[str, str], *, loaded: bool) -> dict[str, str]:
    """Variables for the address family of ``host``; refuses a host of the family that the engine does not speak.

    One process speaks one family: the engine's library reads the variable when it is loaded, and then neither finds
    peers of the other family nor says why.

    >>> family_settings("10.0.0.3", {}, loaded=False), family_settings("fd00::3", {}, loaded=False)
    ({}, {'MC_USE_IPV6': '1'})
    """
    if ":" in host and "MC_USE_IPV6" not in environ:
        if loaded:
            raise _wrong(f"host {host!r} is IPv6, but the Mooncake engine of this process was loaded for IPv4")
        return {"MC_USE_IPV6": "1"}
    if _is_ipv4(host) and "MC_USE_IPV6" in environ:
        raise _wrong(f"host {host!r} is IPv4, but MC_USE_IPV6 is set and makes the engine speak IPv6 alone; unset it")
    return {}


def check_family(address: str, environ: Mapping[str, str]) -> None:
    """Refuse a peer's ``host:port`` of the family that the engine of this process does not speak."""
    host = address.rpartition(":")[0]
    speaks_v6 = "MC_USE_IPV6" in environ
    if (_is_ipv4(host) and speaks_v6) or (":" in host and not speaks_v6):
        here, there = ("IPv6", "IPv4") if speaks_v6 else ("IPv4", "IPv6")
        raise TransportError(
            TransportReason.PEER_UNREACHABLE,
            f"peer {address} is {there}, the Mooncake engine of this process speaks {here}: give both sides a host of "
            "one family",
        )


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def devices_of(topology: str) -> tuple[str, ...]:
    """The network devices in the engine's own report of what it found."""
    try:
        table = json.loads(topology)
        names = {name for preferred, others in table.values() for name in (*preferred, *others)}
    except (ValueError, AttributeError, TypeError) as error:
        raise TransportError(
            TransportReason.ENGINE_FAULT, "the engine's topology report is not the JSON that was expected"
        ) from error
    return tuple(sorted(str(name) for name in names))


def check_devices(protocol: str, devices: tuple[str, ...], device_filter: str) -> None:
    """Refuse a protocol that needs a network device when the engine has found none: it uses TCP instead."""
    if protocol in DEVICE_PROTOCOLS and not devices:
        chosen = f" matching {device_filter!r}" if device_filter else ""
        raise _wrong(
            f"protocol {protocol!r} was asked for, but the engine finds no such device{chosen} on this host and would "
            f"silently use TCP; ask for 'tcp', or make the device visible (/sys/class/infiniband, /dev/infiniband)"
        )


def _refused(pair: str, want: str) -> ConfigError:
    return ConfigError(ConfigReason.INVALID_VALUE, f"option mooncake_env has {pair[:120]!r}, must be {want}")


def _wrong(message: str) -> TransportError:
    return TransportError(TransportReason.WRONG_PROTOCOL, message)
