"""Who a process is on this machine: the identity behind a ``cma`` address.

A pid alone may be reused by a stranger. The address therefore also carries the start time of the process (in clock
ticks since boot), the boot id of the machine and the pid namespace, so that it names one process of one boot, seen from
where the number means the same: ``cma:<pid>:<start>:<pid namespace>:<boot id>``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvferry.errors import TransportError, TransportReason

_PREFIX = "cma"
_LONGEST = 256
_DIGITS = 20
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, for as long as it lives."""

    pid: int
    start_ticks: int
    """Field 22 of ``/proc/<pid>/stat``."""
    pid_namespace: int
    boot_id: str

    def __str__(self) -> str:
        return f"{_PREFIX}:{self.pid}:{self.start_ticks}:{self.pid_namespace}:{self.boot_id}"

    @classmethod
    def of_self(cls) -> Self:
        """This process."""
        pid = os.getpid()
        status = _status(pid)
        if status is None:
            raise TransportError(TransportReason.UNAVAILABLE, f"/proc/{pid}/stat cannot be read: is /proc mounted?")
        return cls(pid, status.start_ticks, *_here())

    @classmethod
    def parse(cls, address: str) -> Self:
        """The process that an address names; refuses what is not such an address."""
        prefix, *fields = address[:_LONGEST].split(":")
        if prefix == _PREFIX and len(fields) == 4 and all(map(_is_number, fields[:3])):
            pid, start, namespace = (int(field) for field in fields[:3])
            return cls(pid, start, namespace, fields[3])
        raise TransportError(
            TransportReason.PEER_UNREACHABLE,
            f"{address[:120]!r} is not a cma address (cma:<pid>:<start>:<pid namespace>:<boot id>)",
        )

    def check_same_user(self) -> None:
        """Raise unless that process belongs to the user of this one, whatever else the kernel would allow."""
        try:
            owner = os.stat(f"/proc/{self.pid}").st_uid
        except FileNotFoundError:
            raise TransportError(TransportReason.PEER_UNREACHABLE, f"process {self.pid} is gone") from None
        if owner != os.geteuid():
            raise TransportError(
                TransportReason.PERMISSION,
                f"process {self.pid} belongs to user {owner}, this one to {os.geteuid()}: both processes must belong "
                "to one user, and the peer must be traceable: let the receiver admit this writer",
            )

    def check_alive(self) -> None:
        """Raise unless this very process lives, on this machine, under this number."""
        here = _here()
        if (self.pid_namespace, self.boot_id) != here:
            raise TransportError(
                TransportReason.PEER_UNREACHABLE,
                f"{self} lives on another machine or in another pid namespace (here: {here[0]}:{here[1]}); "
                f"cma needs one host and a shared pid namespace",
            )
        status = _status(self.pid)
        if status is None or status.ended:
            raise TransportError(TransportReason.PEER_UNREACHABLE, f"process {self.pid} is gone")
        if status.start_ticks != self.start_ticks:
            raise TransportError(
                TransportReason.PEER_UNREACHABLE,
                f"process {self.pid} is gone; the number now belongs to one that started at {status.start_ticks}",
            )

    def is_gone(self) -> bool:
        """Proven that no thread of this process runs any more; ``False`` also means "cannot tell"."""
        if (self.pid_namespace, self.boot_id) != _here():
            return False
        status = _status(self.pid)
        # A leader may have ended while other threads are still inside the kernel, copying.
        return status is None or status.start_ticks != self.start_ticks or (status.ended and status.threads <= 1)


@dataclass(frozen=True, slots=True)
class CmaAddress:
    """A process, and where in it the record of what it has registered is."""

    process: ProcessIdentity
    record: int

    def __str__(self) -> str:
        return f"{self.process}:{self.record:x}"

    @classmethod
    def parse(cls, address: str) -> Self:
        """What ``str`` gave; refuses what is not such an address."""
        process, _, record = address[:_LONGEST].rpartition(":")
        if not 0 < len(record) <= 16 or not _HEX.issuperset(record):
            raise TransportError(
                TransportReason.PEER_UNREACHABLE,
                f"{address[:120]!r} is not a cma address (cma:<pid>:<start>:<pid namespace>:<boot id>:<record>)",
            )
        return cls(ProcessIdentity.parse(process), int(record, 16))


@dataclass(frozen=True, slots=True)
class _Status:
    """What ``/proc/<pid>/stat`` says."""

    ended: bool
    threads: int
    start_ticks: int


def _status(pid: int) -> _Status | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in field 2 may hold spaces and brackets; what follows its last bracket is regular.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return _Status(ended=fields[0] in (b"Z", b"X"), threads=int(fields[17]), start_ticks=int(fields[19]))


def _is_number(field: str) -> bool:
    return 0 < len(field) <= _DIGITS and field.isascii() and field.isdigit()


def _here() -> tuple[int, str]:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.stat("/proc/self/ns/pid").st_ino, boot_id
