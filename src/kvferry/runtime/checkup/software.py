"""Which Mooncake is installed, whether it loads, and what it is known to be limited to."""

import ctypes
from importlib import metadata
from typing import Final

from kvferry.errors import TransportError
from kvferry.runtime.checkup.deployment import Deployment
from kvferry.runtime.checkup.records import Finding, Verdict
from kvferry.transport import MooncakeTransport
from kvferry.transport.engine_settings import MAX_OUTSTANDING
from kvferry.transport.mooncake import MAX_ROW_BYTES, installed_build

DISTRIBUTIONS: Final = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-npu",
)
MEASURED: Final = "0.3.13"
"""The version on which the transport's limits and fences were measured."""


INSTALL = "pip install mooncake-transfer-engine-non-cuda (CUDA hosts: mooncake-transfer-engine)"


def mooncake_version() -> str | None:
    """``distribution version``, of the one that is installed; loads nothing."""
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def check_mooncake(deployment: Deployment, host: str) -> tuple[Finding, ...]:
    """Build the engine that would be used, and destroy it."""
    bad = Verdict.FAILED if deployment.transport == "mooncake" else Verdict.NOTE
    return (_check_version(bad), _check_verbs(bad), _check_engine(deployment, host, bad))


def _check_version(bad: Verdict) -> Finding:
    found = mooncake_version()
    if found is None:
        return Finding("mooncake version", bad, "no distribution of it is installed", INSTALL)
    if MEASURED not in found:
        said = f"{found}; kvferry's limits were measured on {MEASURED}"
        return Finding("mooncake version", Verdict.NOTE, said, facts={"version": found})
    return Finding("mooncake version", Verdict.OK, found, facts={"version": found})


def _check_verbs(bad: Verdict) -> Finding:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        said = "libibverbs.so.1 is not found; the Mooncake engine needs it, also for TCP"
        return Finding("libibverbs", bad, said, "install the Debian package libibverbs1")
    return Finding("libibverbs", Verdict.OK, "libibverbs.so.1 loads")


def _check_engine(deployment: Deployment, host: str, bad: Verdict) -> Finding:
    protocol = deployment.protocol if deployment.transport == "mooncake" else "tcp"
    try:
        engine = MooncakeTransport(host, protocol=protocol, device=deployment.device)
        try:
            said = f"it loads, starts on {engine.address()} and uses {engine.protocol_in_use()}"
            built = installed_build(host)
        finally:
            engine.close()
    except TransportError as error:
        return Finding.of_error("mooncake engine", error, verdict=bad)
    kinds = f"built with {', '.join(built.words)}" if built.words else "built for CPU memory alone"
    limits = f"at most {MAX_OUTSTANDING:,} rows of at most {MAX_ROW_BYTES:,} bytes for one peer at a time"
    said += f"; {kinds}; kvferry hands it {limits}"
    facts = {"protocol": protocol, "built_with": built.words, "rows": MAX_OUTSTANDING, "row_bytes": MAX_ROW_BYTES}
    return Finding("mooncake engine", Verdict.OK, said, facts=facts)
