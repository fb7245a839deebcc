"""The Mooncake transfer engine as a transport: between hosts, over what the engine has.

The engine's own habits decide how it is driven (each was measured on version 0.3.13):

* Rows go in one by one (``transfer_submit_write``) and are polled one by one (``transfer_check_status``): of its calls
  only this pair neither spins nor hides which row failed. With a window of rows in flight it is as fast as its batch
  calls, at half their processor time. Each peer has one :class:`~kvferry.transport.window.Lane`.
* A failure does not stop what is in flight, so a failed submission is not quiet until this engine, or the receiver's,
  is destroyed: ``close()``. Destroying takes 0.2 to 1 s and holds the interpreter lock. It takes up to a minute when
  the operator has set ``MC_TE_METADATA_REFRESH_INTERVAL_SECONDS`` and a known peer is mute; without that variable an
  engine never again finds a peer that restarts on the same port, so a writer is renewed with its peer.
* Success is the receiver's acknowledgement. The engine gives that up when told to speak its old protocol, which is
  refused here, and with a peer whose engine knows only that one, which it does not tell.
* It crashes the process when used uninitialised, after destruction, with a handle that it did not give, or in a fork.
  Every call here passes one door that checks, and after a fork the child never destroys what it has inherited.
* It listens on every interface and lets anyone who connects write registered memory: that is for the network to stop.
* It takes two free ports of its range at random: its address, and one that bytes are sent to. A writer remembers the
  second, and connects to it again: what it sends then is taken by whatever engine has that port, whichever process it
  is in. So where a writer is in doubt, no later engine on this host takes either (``retire()``), as long as this
  process lives.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors
from kvferry.transport.awake import AwakeClock
from kvferry.transport.base import Peer
from kvferry.transport.engine_settings import (
    DEVICE_PROTOCOLS,
    Build,
    check_devices,
    check_family,
    devices_of,
    family_settings,
    missing_settings,
    outstanding_limit,
    settings_for,
)
from kvferry.transport.listening import Kept, listening_ports, taken
from kvferry.transport.progress import Progress
from kvferry.transport.ranges import RegionTable, check_descriptors, describe, split_rows
from kvferry.transport.window import Lane, Pace, RowState

MAX_SUBMISSION = 512
"""Rows handed to the engine between two looks at what has finished."""
MAX_ROW_BYTES = 1 << 20
"""Longer descriptors are cut: the engine is at its best from 256 KiB to 1 MiB a row, and rows use its lanes
in parallel."""

_MAX_HANDLE = 1 << 63
"""Handles are addresses inside the engine; a refusal comes as 0 or as -1 taken for an unsigned number."""
MUTE_S = 5.0
"""A peer that takes longer than this to answer a probe is not opened."""
_EXIT_TIMEOUT_S = 5.0

_ENVIRONMENT = threading.Lock()
"""Held while the environment is changed for an engine that is being built: it is one for the whole process."""
_BUILDING = threading.Lock()
"""Held while an engine takes its ports, so that none is taken for another engine's."""
_RETIRED: set[int] = set()
"""Ports that writers in doubt know; never let go, for such a writer may be stopped, and go on at any time."""
_KEPT = Kept()
"""Those of them whose engines are destroyed: other processes of this host are kept from them too."""
_LIVE: "weakref.WeakSet[MooncakeTransport]" = weakref.WeakSet()


class MooncakeTransport:
    """One engine (:class:`kvferry.transport.base.Transport`)."""

    name = "mooncake"
    close_stops_peers = True

    def __init__(
        self,
        host: str,
        *,
        protocol: str = "tcp",
        device: str = "",
        enter_thread: Callable[[], None] | None = None,
        stall_s: float = 20.0,
        close_timeout_s: float = 90.0,
    ) -> None:
        """``host``: the name or IP by which peers reach this process; the engine picks the port.

        ``device``: a comma-separated filter of network devices, empty for all. ``enter_thread``: called first in each
        thread that hands rows to the engine, and here before and after the engine starts, for while it does an engine
        may make another device the current one. ``stall_s``: how long a peer may take no row before its submissions
        fail; the engine itself gives a row up after 30 s without progress. ``close_timeout_s`` outlasts the 61 s that
        the engine may spend on a port that accepts and says nothing.
        """
        if not host:
            raise TransportError(TransportReason.UNAVAILABLE, "host is empty: peers need an address to write to")
        enter = enter_thread or _do_nothing
        enter()
        self._engine = _build_engine(host, protocol, device)
        enter()
        self._protocol = protocol
        bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self._address = f"{bracketed}:{self._engine.native().get_rpc_port()}"
        self._close_timeout_s = close_timeout_s
        self._closed = False
        self._lock = threading.Lock()
        self._lanes: dict[str, Lane] = {}
        self._table = RegionTable(())
        self._pace = Pace(
            max_outstanding=outstanding_limit(os.environ),
            max_slice=MAX_SUBMISSION,
            stall_s=stall_s,
            clock=AwakeClock(),
            sleep=time.sleep,
            enter_thread=enter_thread,
        )
        _LIVE.add(self)

    def address(self) -> str:
        """``host:port`` of the engine's handshake."""
        self._check_open()
        return self._address

    def protocol_in_use(self) -> str:
        """The protocol that was asked for: construction fails when the engine would use another."""
        self._check_open()
        return self._protocol

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory with the engine; all of it or none."""
        with self._lock:
            self._check_open()
            table = self._table.with_regions(regions)
            self._engine.build.check_memory(region.memory for region in regions)
            if regions:
                self._engine.register(regions)
            self._table = table

    def unregister(self, regions: Sequence[Region]) -> None:
        """Take memory back from the engine. Writes that are on their way still land."""
        with self._lock:
            self._check_open()
            table = self._table.without(regions)
            if regions:
                self._engine.unregister(regions)
            self._table = table

    def admit(self, address: str) -> None:
        """The engine admits everyone."""
        self._check_open()

    def peer_is_gone(self, address: str) -> bool:
        """Never known: a peer that does not answer may be stopped, or cut off."""
        self._check_open()
        return False

    def retire(self) -> None:
        """Keep the ports of this engine from all later ones, in whatever process of this host, once it is closed."""
        with _BUILDING:
            _RETIRED.update(self._engine.ports)

    def open_peer(self, address: str, regions: Sequence[Region]) -> Peer:
        """Name a peer's engine; the connection is made by the first write."""
        self._check_open()
        host, _, port = address.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise TransportError(TransportReason.PEER_UNREACHABLE, f"{address[:120]!r} is not host:port")
        check_family(address, os.environ)
        return Peer(address, RegionTable.of(regions))

    def submit(self, peer: Peer, descriptors: Descriptors) -> Progress:
        """Check, cut long rows, and queue them in the peer's lane."""
        self._check_open()
        check_descriptors(descriptors, self._table, peer.regions)
        if not descriptors.count:
            return Progress(0, 0)
        rows = split_rows(descriptors, MAX_ROW_BYTES)
        with self._lock:
            self._check_open()
            if peer.address not in self._lanes:
                self._lanes[peer.address] = Lane(self._engine, peer.address, self._pace)
            return self._lanes[peer.address].submit(rows, descriptors=descriptors.count)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Stop the lanes, destroy the engine, and so fence: here as a writer, and for every peer that writes here."""
        if self._engine.pid != os.getpid():
            return
        self._closed = True
        limit = self._close_timeout_s if timeout_s is None else timeout_s
        error = TransportError(TransportReason.CLOSED, f"the transport {self._address} was closed")
        with self._lock:
            for lane in self._lanes.values():
                lane.stop(error)
            deadline = time.monotonic() + limit
            left = all(lane.join(deadline - time.monotonic()) for lane in self._lanes.values())
            if not (left and self._engine.destroy()):
                raise TransportError(
                    TransportReason.TIMED_OUT,
                    f"an engine call of {self._address} has not returned within {limit} s of close(): the engine "
                    f"is not destroyed and memory that it may touch is not quiet; close() can be called again",
                )
            with _BUILDING:
                _KEPT.keep(self._engine.ports & _RETIRED)
            for lane in self._lanes.values():
                lane.fence(error)
            self._lanes.clear()

    def abandon(self) -> None:
        """In a child made by fork: never destroy what belongs to the parent."""
        self._engine.abandon()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(TransportReason.CLOSED, f"the transport {self._address} is closed")
        self._engine.check_process()


class _Engine:
    """The only reference to one native engine, and the door that every call to it passes."""

    def __init__(self, native: Any, build: Build) -> None:
        self.pid = os.getpid()
        self.build = build
        self.ports: frozenset[int] = frozenset()
        """Where peers reach it."""
        self._native = native
        self._watch = weakref.ref(native)
        self._answered: set[str] = set()

    def native(self) -> Any:
        """The engine, for one call; raises when it must not be called."""
        self.check_process()
        if self._native is None:
            raise TransportError(TransportReason.CLOSED, "the engine is destroyed")
        return self._native

    def check_process(self) -> None:
        """Raise in a fork of the process that built the engine."""
        if self.pid != os.getpid():
            raise TransportError(
                TransportReason.CLOSED,
                f"the engine belongs to process {self.pid} and cannot be used in its fork {os.getpid()}: "
                f"build a transport after the fork",
            )

    def register(self, regions: Sequence[Region]) -> None:
        """Register all regions, or none."""
        addresses, sizes = [region.address for region in regions], [region.nbytes for region in regions]
        code = self.native().batch_register_memory(addresses, sizes)
        if code != 0:
            self.native().batch_unregister_memory(addresses)
            raise TransportError(
                TransportReason.ENGINE_FAULT,
                f"the engine refused to register {len(regions)} regions (code {code}), "
                f"the first {describe(regions[0])}",
            )

    def unregister(self, regions: Sequence[Region]) -> None:
        """Unregister all regions."""
        code = self.native().batch_unregister_memory([region.address for region in regions])
        if code != 0:
            raise TransportError(TransportReason.ENGINE_FAULT, f"the engine refused to unregister (code {code})")

    def start(self, address: str, src: int, dst: int, nbytes: int) -> int | None:
        """Hand over one row, to a peer that answers."""
        if address not in self._answered and not self._answers(address):
            return None
        handle: int = self.native().transfer_submit_write(address, src, dst, nbytes)
        return handle if 0 < handle < _MAX_HANDLE else None

    def _answers(self, address: str) -> bool:
        # The engine opens a peer while it holds a lock that every other peer's rows need, and a mute peer makes that
        # last a minute. The probe holds no lock. Only its duration counts: old engines do not know the question.
        begun = time.monotonic()
        self.native().send_probe(address)
        if time.monotonic() - begun > MUTE_S:
            return False
        self._answered.add(address)
        return True

    def state(self, handle: int) -> RowState:
        """Ask about one row; the engine frees the handle when it answers success or failure."""
        match self.native().transfer_check_status(handle):
            case 1:
                return RowState.LANDED
            case 0:
                return RowState.PENDING
            case _:
                return RowState.FAILED

    def destroy(self) -> bool:
        """Drop the engine; whether its destructor has run, in this thread, to its end."""
        self._native = None
        if self._watch() is not None:
            gc.collect()
        return self._watch() is None

    def abandon(self) -> None:
        """Make the engine immortal in this process: its destructor would join threads that a fork does not have."""
        if self._native is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._native))


def _do_nothing() -> None:
    """For a thread that need not enter anywhere."""


def installed_build(host: str) -> Build:
    """With what the installed engine was built; loads its library, and builds no engine."""
    return _build_of(_load_module(host))


def _build_of(module: Any) -> Build:
    return Build(frozenset(name for name in dir(module) if name.startswith("SUPPORT_") and getattr(module, name)))


def _build_engine(host: str, protocol: str, device: str) -> _Engine:
    """An engine on ports that no writer in doubt knows: it finds those taken."""
    module = _load_module(host)
    with _BUILDING, taken(_RETIRED):
        before = listening_ports()
        try:
            engine = _start_engine(module, host, protocol, device)
        except TransportError as error:
            if _RETIRED:
                raise TransportError(error.reason, f"{error.message}; {_kept_away()}") from error
            raise
        engine.ports = (listening_ports() - before) | {engine.native().get_rpc_port()}
    if engine.ports & _RETIRED:
        engine.destroy()
        raise TransportError(TransportReason.ENGINE_FAULT, f"the engine took a port that was taken; {_kept_away()}")
    return engine


def _kept_away() -> str:
    return (
        f"{len(_RETIRED)} ports are not used again in this process, since writers that were given up know them and may "
        "still live: a wider range for MC_MIN_RPC_PORT and MC_MAX_RPC_PORT, or a restart of this process, makes room"
    )


def _start_engine(module: Any, host: str, protocol: str, device: str) -> _Engine:
    build = _build_of(module)
    with _environment(lambda environ: settings_for(protocol, build, environ)):
        engine = _Engine(module.TransferEngine(), build)
        code = engine.native().initialize(host, "P2PHANDSHAKE", protocol, device)
    try:
        if code != 0:
            raise TransportError(
                TransportReason.ENGINE_FAULT, f"the engine refused to start on {host!r} with {protocol!r} (code {code})"
            )
        if protocol in DEVICE_PROTOCOLS:
            check_devices(protocol, devices_of(engine.native().get_local_topology(device)), device)
    except TransportError:
        engine.destroy()
        raise
    return engine


def _load_module(host: str) -> Any:
    loaded = "mooncake.engine" in sys.modules
    os.environ.update(missing_settings(os.environ) | family_settings(host, os.environ, loaded=loaded))
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise import_fault(error) from error


def import_fault(error: ImportError) -> TransportError:
    """What to install, from the loader's complaint."""
    if "libibverbs" in str(error):
        advice = "the Mooncake engine needs libibverbs.so.1, also for TCP: install the Debian package libibverbs1"
    elif isinstance(error, ModuleNotFoundError):
        advice = (
            "the Mooncake engine is not installed: pip install mooncake-transfer-engine-non-cuda "
            "(on CUDA hosts, mooncake-transfer-engine)"
        )
    else:
        advice = "the Mooncake engine cannot be loaded; a shared library that it needs is missing or does not fit"
    return TransportError(TransportReason.UNAVAILABLE, f"{advice} ({error})")


@contextlib.contextmanager
def _environment(choose: Callable[[Mapping[str, str]], dict[str, str]]) -> Iterator[None]:
    """Set variables for the time in which an engine reads them, then put back what was there."""
    with _ENVIRONMENT:
        settings = choose(os.environ)
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _abandon_all() -> None:
    for transport in list(_LIVE):
        transport.abandon()


def _close_all() -> None:
    # A lane's thread that returns from the engine while the interpreter is being taken apart ends the process.
    for transport in list(_LIVE):
        with contextlib.suppress(TransportError):
            transport.close(timeout_s=_EXIT_TIMEOUT_S)


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_close_all)
