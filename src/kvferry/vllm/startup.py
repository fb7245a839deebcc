"""What the connector says of itself when a rank starts: one block in the log, from the facts of ``kvferry doctor``.

Everything that an operator may ask later is in it: how this rank is reached and why so, which engine moves its bytes,
what its cache looks like, how long it waits. Findings are added where they are not good. What is cheap to know is
looked at; nothing is sent and no engine is built for it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from kvferry import __version__
from kvferry.layout import Group
from kvferry.runtime import Local
from kvferry.runtime.checkup import (
    Choice,
    Deployment,
    Finding,
    HostAddress,
    LocalAddress,
    Verdict,
    check_address,
    check_exposure,
    check_limits,
    check_ptrace,
    choices_of,
    local_addresses,
    mooncake_version,
    require_private_network,
    skipped,
)
from kvferry.vllm.config import Config

_QUIET = (Verdict.OK, Verdict.NOTE)


@dataclass(frozen=True, slots=True)
class StartUp:
    """What is decided before the caches exist."""

    host: HostAddress
    choices: tuple[Choice, ...]
    findings: tuple[Finding, ...]

    @classmethod
    def read(
        cls,
        deployment: Deployment,
        *,
        here: Sequence[LocalAddress] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """Decide, or raise ``ConfigError``: for a host that cannot be used, and for one that must not be."""
        known = local_addresses() if here is None else here
        choices, host = choices_of(deployment, known, environ)
        require_private_network(deployment, host, known)
        findings = (
            *skipped(deployment, environ),
            check_address(host),
            *check_limits(deployment),
            *((check_ptrace(deployment),) if deployment.transport == "cma" else ()),
            check_exposure(deployment, host, known),
        )
        return cls(host, choices, tuple(one for one in findings if one.verdict not in _QUIET))

    def lines(self, local: Local, config: Config, *, listening: str | None) -> Iterator[str]:
        """The block, a fact a line."""
        placement = local.placement
        yield f"kvferry {__version__}: rank {local.index} of {len(local.placements)} of engine {local.incarnation}"
        yield from (f"  {choice}" for choice in self.choices)
        if config.transport == "mooncake":
            yield f"  engine {mooncake_version() or 'of an unknown distribution'}"
        if listening is not None:
            yield f"  listens on {listening}"
        yield (
            f"  layout {placement.fingerprint[:16]}: {len(placement.components)} components of "
            f"{len({component.layer for component in placement.components})} layers in {len(local.regions)} regions, "
            f"{sum(region.nbytes for region in local.regions):,} bytes"
        )
        for index, group in enumerate(placement.groups):
            yield f"  group {index}: {describe_group(group)}"
        yield (
            f"  limits: published caches wait {config.publish_timeout:g} s, pulls {config.pull_timeout:g} s, a silent "
            f"peer is lost after {config.silence_timeout:g} s, {config.max_descriptors:,} copies a request"
        )
        yield from (f"  {finding}" for finding in self.findings)


def describe_group(group: Group) -> str:
    """A group in words.

    >>> describe_group(Group(kind="attention", block_tokens=16, sliding_window=512))
    'attention, 16 tokens a block, window of 512'
    """
    words = [group.kind, f"{group.block_tokens:,} tokens a block"]
    if group.sliding_window is not None:
        words.append(f"window of {group.sliding_window:,}")
    if group.chunk is not None:
        words.append(f"chunks of {group.chunk:,}")
    if group.context_parallel is not None:
        words.append(f"context shard {group.context_parallel.rank} of {group.context_parallel.size}")
    return ", ".join(words)
