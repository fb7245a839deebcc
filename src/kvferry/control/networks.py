"""Lists of networks, and whether an address lies in one.

An option lists networks as ``10.0.0.0/8`` or ``fd00::/8``; a bare address is a network of one. An IPv4 address that a
dual-stack socket shows as ``::ffff:10.0.0.1`` counts as IPv4. Names are not addresses: whoever has a name resolves it
first and asks about what came out, so that a name cannot mean one address here and another one later.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from kvferry.errors import ConfigError, ConfigReason

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_NETWORKS: Final = 1024


@dataclass(frozen=True, slots=True)
class Networks:
    """A set of networks; an empty one holds no address."""

    members: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str], *, option: str) -> Self:
        """From the texts of an option; raises ``ConfigError`` naming the text that is no network."""
        members: list[Network] = []
        for text in texts:
            try:
                members.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise ConfigError(
                    ConfigReason.INVALID_VALUE,
                    f"option {option} lists {text!r}, must be a network such as 10.0.0.0/8 with no bits set right of "
                    "the prefix, or one address",
                ) from error
        if len(members) > MAX_NETWORKS:
            raise ConfigError(ConfigReason.INVALID_VALUE, f"option {option} lists more than {MAX_NETWORKS} networks")
        return cls(tuple(members))

    def holds(self, address: str) -> bool:
        """Whether this IP address lies in one of them; anything that is no IP address does not."""
        found = plain_address(address)
        return found is not None and any(found.version == one.version and found in one for one in self.members)

    def __str__(self) -> str:
        return ", ".join(map(str, self.members)) or "no network"


def plain_address(text: str) -> Address | None:
    """The IP address that a text spells, without scope and without the IPv6 spelling of IPv4; ``None`` if none."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found
