"""Addresses: which this machine has, what a host name comes to, and how far each can be seen.

A rank binds one address and tells it to its peers, so the address must be one of this machine and must mean the same
elsewhere. A name is resolved once, here, and the address it gives is what is bound and told: two machines that resolve
a name differently would else miss each other silently.
"""

import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvferry.errors import ConfigError, ConfigReason

Scope = Literal["loopback", "link-local", "private", "public"]
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

_CARRIER = ipaddress.ip_network("100.64.0.0/10")
"""Shared between customers of one carrier, and what overlay networks use: not on the public internet."""


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """An address of an interface of this machine."""

    interface: str
    ip: str

    @property
    def scope(self) -> Scope:
        """How far it can be seen."""
        return scope_of(self.ip)


@dataclass(frozen=True, slots=True)
class HostAddress:
    """What a host setting comes to."""

    given: str
    ip: str
    interface: str
    others: tuple[str, ...] = ()
    """Further addresses of the name, not used."""

    @property
    def scope(self) -> Scope:
        """How far it can be seen."""
        return scope_of(self.ip)


def scope_of(ip: str) -> Scope:
    """How far an address can be seen.

    >>> [scope_of(ip) for ip in ("127.0.0.1", "::1", "169.254.1.1", "10.1.2.3", "100.64.0.9", "fd00::2", "8.8.8.8")]
    ['loopback', 'loopback', 'link-local', 'private', 'private', 'private', 'public']
    """
    address = ipaddress.ip_address(ip)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    return "private" if address.is_private or address in _CARRIER else "public"


def resolve_host(given: str, here: Sequence[LocalAddress]) -> HostAddress:
    """The address to bind and to tell; raises :class:`ConfigError` for what peers could not use.

    Of several addresses of a name the first IPv4 one that this machine has is taken, else the first IPv6 one.
    """
    found = _addresses_of(given)
    interfaces = {one.ip: one.interface for one in here}
    if any(ip.is_unspecified for ip in found):
        raise _refused(given, "stands for every address, and peers need one of them; set option host or VLLM_HOST_IP")
    if any(isinstance(ip, ipaddress.IPv6Address) and ip.is_link_local for ip in found) and len(found) == 1:
        raise _refused(given, "is an IPv6 link-local address, which means another interface on every machine")
    # All of 127.0.0.0/8 can be bound and one of it is listed; ::1 is listed, or IPv6 is off.
    ours = [ip for ip in found if not here or str(ip) in interfaces or (ip.version == 4 and ip.is_loopback)]
    if not ours:
        spelled = ", ".join(sorted(interfaces))
        if any(ip.version == 6 for ip in found) and not any(":" in ip for ip in interfaces):
            spelled += " and no IPv6 address: IPv6 is off here"
        what = given if len(found) == 1 and str(found[0]) == given else f"{given} ({', '.join(map(str, found))})"
        raise _refused(what, f"is no address of this machine, so it cannot be bound; this machine has {spelled}")
    chosen = min(ours, key=lambda ip: ip.version)
    others = tuple(str(ip) for ip in found if ip != chosen)
    fallback = "lo" if chosen.is_loopback else "unknown"
    return HostAddress(given, str(chosen), interfaces.get(str(chosen), fallback), others)


def local_addresses() -> tuple[LocalAddress, ...]:
    """All addresses of all interfaces; empty where the system cannot be asked (anything but Linux)."""
    if sys.platform != "linux":
        return ()
    names = dict(socket.if_nameindex())
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
            netlink.settimeout(2.0)
            netlink.sendto(_QUESTION, (0, 0))
            found = [LocalAddress(names.get(index, str(index)), ip) for index, ip in _answers(netlink)]
    except OSError:
        return ()
    return tuple(sorted(set(found), key=lambda one: (one.interface, ":" in one.ip, one.ip)))


def route_address() -> str | None:
    """The address from which this machine would reach the outside; nothing is sent."""
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((outside, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _addresses_of(given: str) -> list[_Ip]:
    try:
        return [ipaddress.ip_address(given.removeprefix("[").removesuffix("]"))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(given, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _refused(given, f"is neither an IP address nor a name that resolves here ({error})") from error
    return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))


def _refused(given: str, why: str) -> ConfigError:
    return ConfigError(ConfigReason.INVALID_VALUE, f"host {given} {why}")


# -- the kernel's list of addresses (rtnetlink) ------------------------------------------------------------------

_RTM_GETADDR: Final = 22
_RTM_NEWADDR: Final = 20
_NLMSG_DONE: Final = 3
_NLM_F_REQUEST_DUMP: Final = 0x301
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_HEADER: Final = struct.Struct("=IHHII")
_IFADDR: Final = struct.Struct("=BBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")
_QUESTION: Final = (
    _HEADER.pack(_HEADER.size + _IFADDR.size, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0)
    + _IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
)  # fmt: skip


def _answers(netlink: socket.socket) -> Iterator[tuple[int, str]]:
    """Interface number and address, for each address."""
    while True:
        data = netlink.recv(1 << 16)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, *_ = _HEADER.unpack_from(data, at)
            if kind == _NLMSG_DONE or length < _HEADER.size:
                return
            if kind == _RTM_NEWADDR:
                yield from _one(data[at + _HEADER.size : at + length])
            at += _aligned(length)


def _one(body: bytes) -> Iterator[tuple[int, str]]:
    family, _, _, _, index = _IFADDR.unpack_from(body)
    found: dict[int, bytes] = {}
    at = _IFADDR.size
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = body[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)
    # On a point-to-point link ADDRESS is the other end's.
    raw = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
    if raw is not None and family in (socket.AF_INET, socket.AF_INET6):
        yield index, socket.inet_ntop(family, raw)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
