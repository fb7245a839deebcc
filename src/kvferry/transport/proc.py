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
        prefix, *fields = address.split(":")
        if prefix == _PREFIX and len(fields) == 4 and all(field.isascii() and field.isdigit() for field in fields[:3]):
            pid, start, namespace = (int(field) for field in fields[:3])
            return cls(pid, start, namespace, fields[3])
        raise TransportError(
            TransportReason.PEER_UNREACHABLE,
            f"{address[:120]!r} is not a cma address (cma:<pid>:<start>:<pid namespace>:<boot id>)",
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


def _here() -> tuple[int, str]:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.stat("/proc/self/ns/pid").st_ino, boot_id
