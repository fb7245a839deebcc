"""One host, CPU memory: the kernel copies straight into the peer's process (``process_vm_writev``).

The descriptor columns become the kernel's iovec arrays without a loop: an array of (address, length) pairs in int64 has
the same bytes as ``struct iovec``. A worker thread makes calls of up to 1,024 rows; ctypes drops the interpreter lock
during each.

The copy happens inside the call, by this very thread, so a call that has returned, for whatever reason, is over: failed
submissions become quiet as soon as the worker has left the kernel. Before each call and after the last one the peer's
identity is checked, so done means that the peer lived to see every byte. A pid can be reused in the instant between
check and call only if the whole pid space wraps around in it.

A peer names the process and the addresses that are to be written, so neither is believed: the process must belong to
our user, and its own record (:mod:`kvferry.transport.receiver`) must list the regions.

The kernel allows the copy to a process of the same user that may trace the peer. Where Yama restricts that
(``ptrace_scope`` 1) the receiver admits one writer, by pid, with ``PR_SET_PTRACER``; never everybody.
"""

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors, Int64Array
from kvferry.transport.base import Peer
from kvferry.transport.proc import CmaAddress, ProcessIdentity
from kvferry.transport.progress import Progress
from kvferry.transport.ranges import RegionTable, check_descriptors, describe
from kvferry.transport.receiver import ReceiverRecord, check_receiver

IOV_MAX = 1024
"""Rows that the kernel takes in one call."""

_PR_SET_PTRACER = 0x59616D61
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"

_Call = Literal["process_vm_readv", "process_vm_writev"]


class CmaTransport:
    """Writes to other processes of this host (:class:`kvferry.transport.base.Transport`)."""

    name = "cma"
    close_stops_peers = False

    def __init__(self, *, close_timeout_s: float = 30.0) -> None:
        if sys.platform != "linux":
            raise TransportError(TransportReason.UNAVAILABLE, f"cma needs Linux, this is {sys.platform}")
        self._self = ProcessIdentity.of_self()
        self._table = RegionTable(())
        self._record = ReceiverRecord()
        self._lock = threading.Lock()
        self._closed = False
        self._close_timeout_s = close_timeout_s
        self._active: set[Progress] = set()
        self._idle = threading.Condition(self._lock)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-cma")

    def address(self) -> str:
        """This process, in a form that a later process of the same number does not match, and its record."""
        self._check_open()
        return str(CmaAddress(self._self, self._record.address))

    def protocol_in_use(self) -> str:
        """The system call."""
        self._check_open()
        return "process_vm_writev"

    def register(self, regions: Sequence[Region]) -> None:
        """Note the regions; the kernel needs no registration."""
        self._check_open()
        for region in regions:
            if region.memory != "cpu":
                raise TransportError(
                    TransportReason.INVALID_REGIONS,
                    f"cma moves CPU memory only, {describe(region)} is not; use the mooncake transport",
                )
        with self._lock:
            self._table = self._table.with_regions(regions)
            self._record.show(self._table)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Forget the regions."""
        self._check_open()
        with self._lock:
            self._table = self._table.without(regions)
            self._record.show(self._table)

    def admit(self, address: str) -> None:
        """Let one writer trace this process where Yama forbids it; the last one admitted counts."""
        self._check_open()
        writer = CmaAddress.parse(address).process
        writer.check_alive()
        if not os.path.exists(_YAMA):
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(writer.pid), 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise TransportError(
                TransportReason.PERMISSION, f"PR_SET_PTRACER for writer {writer.pid} failed: {os.strerror(code)}"
            )

    def retire(self) -> None:
        """An address is one of this process, whose memory it is: there is no other to take."""

    def peer_is_gone(self, address: str) -> bool:
        """Whether that process has ended, which is the proof that it writes no more."""
        self._check_open()
        return CmaAddress.parse(address).process.is_gone()

    def open_peer(self, address: str, regions: Sequence[Region]) -> Peer:
        """Check that the peer lives, belongs to our user and has itself registered ``regions``: by its own record."""
        self._check_open()
        named = CmaAddress.parse(address)
        named.process.check_alive()
        table = RegionTable.of(regions)
        if table.regions:
            named.process.check_same_user()
            check_receiver(lambda at, words: _read_words(named.process, at, count=words), named.record, table.regions)
        return Peer(address, table)

    def submit(self, peer: Peer, descriptors: Descriptors) -> Progress:
        """Check, then leave the copying to the worker."""
        self._check_open()
        identity = CmaAddress.parse(peer.address).process
        check_descriptors(descriptors, self._table, peer.regions)
        progress = Progress(descriptors.count, descriptors.total_bytes)
        if not descriptors.count:
            return progress
        with self._lock:
            self._check_open()
            self._active.add(progress)
            self._worker.submit(self._work, identity, descriptors, progress)
        return progress

    def close(self) -> None:
        """Finish the call in progress, drop the rest, and so fence this writer.

        It stops no peer from writing here: that takes the peer's word, or ``peer_is_gone``.
        """
        with self._lock:
            self._closed = True
            if self._self.pid == os.getpid():
                self._record.show(RegionTable(()))
            error = TransportError(TransportReason.CLOSED, "the cma transport was closed")
            if self._self.pid != os.getpid():
                return
            for progress in self._active:
                progress.fail(error)
            if not self._idle.wait_for(lambda: not self._active, self._close_timeout_s):
                raise TransportError(
                    TransportReason.TIMED_OUT, f"a copy has not returned within {self._close_timeout_s} s of close()"
                )
        self._worker.shutdown()

    def _work(self, peer: ProcessIdentity, descriptors: Descriptors, progress: Progress) -> None:
        try:
            _write(peer, descriptors, progress)
        except TransportError as error:
            progress.fail(error)
        finally:
            with self._lock:
                self._active.discard(progress)
                self._idle.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(TransportReason.CLOSED, "the cma transport is closed")
        if self._self.pid != os.getpid():
            raise TransportError(
                TransportReason.CLOSED,
                f"the cma transport belongs to process {self._self.pid} and cannot be used in its fork {os.getpid()}",
            )


def _read_words(peer: ProcessIdentity, address: int, *, count: int) -> Int64Array:
    """So many words of the peer's memory; raises when they are not all there."""
    words = np.zeros(count, np.int64)
    here, there = (np.array([[at, words.nbytes]], np.uint64) for at in (words.ctypes.data, address % (1 << 64)))
    moved = _vm_call("process_vm_readv", peer, here=here.view(np.int64), there=there.view(np.int64))
    if moved != words.nbytes:
        raise TransportError(
            TransportReason.NOT_REGISTERED, f"process {peer.pid} has no {words.nbytes} bytes at {address:#x}"
        )
    return words


def _write(peer: ProcessIdentity, descriptors: Descriptors, progress: Progress) -> None:
    here = np.stack((descriptors.src, descriptors.nbytes), axis=1)
    there = np.stack((descriptors.dst, descriptors.nbytes), axis=1)
    for start in range(0, len(here), IOV_MAX):
        if not progress.wanted:
            return
        rows = slice(start, start + IOV_MAX)
        count = len(here[rows])
        progress.handed(count)
        landed = False
        try:
            _write_rows(peer, here[rows], there=there[rows])
            # The last rows count only when the peer was there to receive them.
            if start + count == len(here):
                peer.check_alive()
            landed = True
        finally:
            progress.landed(count) if landed else progress.over(count)


def _write_rows(peer: ProcessIdentity, here: Int64Array, *, there: Int64Array) -> None:
    """Write all rows, going on where a call stopped short (the kernel moves at most 2 GiB a call)."""
    while len(here):
        written = _vm_call("process_vm_writev", peer, here=here, there=there)
        ends = np.cumsum(here[:, 1])
        full = int(np.searchsorted(ends, written, side="right"))
        if full == len(here):
            return
        part = written - (int(ends[full - 1]) if full else 0)
        here, there = here[full:].copy(), there[full:].copy()
        here[0] += (part, -part)
        there[0] += (part, -part)


def _vm_call(call: _Call, peer: ProcessIdentity, *, here: Int64Array, there: Int64Array) -> int:
    """One system call; returns the bytes moved, at least one."""
    peer.check_alive()
    here, there = np.ascontiguousarray(here), np.ascontiguousarray(there)
    moved: int = _system_call(call)(peer.pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if moved > 0:
        return moved
    raise _system_error(peer, ctypes.get_errno() if moved < 0 else errno.EFAULT, call)


def _system_call(call: _Call) -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True)[call]
    size, pointer = ctypes.c_ulong, ctypes.c_void_p
    function.argtypes = (ctypes.c_int, pointer, size, pointer, size, size)
    function.restype = ctypes.c_ssize_t
    return function


def _system_error(peer: ProcessIdentity, code: int, call: _Call) -> TransportError:
    what = f"{call} to process {peer.pid}: {os.strerror(code)}"
    match code:
        case errno.ESRCH:
            return TransportError(TransportReason.PEER_UNREACHABLE, f"{what}; the peer is gone")
        case errno.EPERM:
            return TransportError(
                TransportReason.PERMISSION,
                f"{what}; both processes must belong to one user and the peer must be traceable: let the receiver "
                f"admit this writer (kernel.yama.ptrace_scope 1), or run the container with --cap-add=SYS_PTRACE",
            )
        case errno.EFAULT:
            return TransportError(
                TransportReason.OUT_OF_RANGE, f"{what}; memory that was registered is no longer mapped on one side"
            )
        case errno.ENOSYS:
            return TransportError(TransportReason.UNAVAILABLE, f"{what}; this kernel or sandbox has no such call")
        case _:
            return TransportError(TransportReason.ENGINE_FAULT, what)
