"""What the kernel allows this process: memory it may lock, files it may open, processes it may write to."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvferry.runtime.checkup.deployment import Deployment
from kvferry.runtime.checkup.records import Finding, Verdict

FILES_WANTED: Final = 4096
"""An engine costs five descriptors for each producer that a consumer knows, a connection a few more."""
_SYS_PTRACE: Final = 1 << 19
_SCOPES: Final = {
    0: "any process of this user",
    1: "a process that the receiver admits (kvferry does, one writer at a time)",
    2: "processes with CAP_SYS_PTRACE only",
    3: "no process at all",
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The kernel's word, as it was read; each limit is the soft and the hard one."""

    locked: tuple[int, int]
    """Bytes of memory that may be locked."""
    files: tuple[int, int]
    ptrace_scope: int | None
    """Of Yama; ``None`` for a kernel without it."""
    sys_ptrace: bool
    """Whether this process has CAP_SYS_PTRACE."""

    @classmethod
    def read(cls, proc: Path = Path("/proc")) -> Self:
        """That of this process; ``proc`` that tells nothing is a kernel without Yama, and no capability."""
        return cls(
            resource.getrlimit(resource.RLIMIT_MEMLOCK),
            resource.getrlimit(resource.RLIMIT_NOFILE),
            _ptrace_scope(proc / "sys/kernel/yama/ptrace_scope"),
            _has_sys_ptrace(proc / "self/status"),
        )


def check_limits(deployment: Deployment, allowed: Allowed | None = None) -> tuple[Finding, ...]:
    """Locked memory and open files."""
    known = Allowed.read() if allowed is None else allowed
    return _locked_memory(deployment, *known.locked), _open_files(*known.files)


def check_ptrace(deployment: Deployment, allowed: Allowed | None = None) -> Finding:
    """Whether the kernel's rules let ``cma`` write; the marker page is the proof of it."""
    known = Allowed.read() if allowed is None else allowed
    scope, capable = known.ptrace_scope, known.sys_ptrace
    has = "has" if capable else "has not"
    facts = {"ptrace_scope": scope, "cap_sys_ptrace": capable}
    if scope is None:
        said = f"this kernel does not restrict tracing (no Yama); this process {has} CAP_SYS_PTRACE"
        return Finding("ptrace", Verdict.OK, said, facts=facts)
    said = f"ptrace_scope {scope} lets in {_SCOPES.get(scope, 'nobody knows whom')}; this process {has} CAP_SYS_PTRACE"
    if scope < 2 or (scope == 2 and capable):
        return Finding("ptrace", Verdict.OK, said, facts=facts)
    verdict = Verdict.FAILED if deployment.transport == "cma" else Verdict.NOTE
    advice = "set kernel.yama.ptrace_scope to 1, or give the container SYS_PTRACE, for the cma transport"
    return Finding("ptrace", verdict, said, advice, facts)


def _locked_memory(deployment: Deployment, soft: int, hard: int) -> Finding:
    needs = deployment.transport == "mooncake" and deployment.protocol not in ("tcp",)
    facts = {"soft": _number(soft), "hard": _number(hard), "needed": needs}
    if not needs:
        return Finding(
            "locked memory", Verdict.OK, f"limit {_spelled(soft)}; not needed over this transport", facts=facts
        )
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", Verdict.OK, "no limit", facts=facts)
    said = f"limit {_spelled(soft)} (hard: {_spelled(hard)}); {deployment.protocol} locks all of the cache's memory"
    return Finding("locked memory", Verdict.WARNING, said, "ulimit -l unlimited, or --ulimit memlock=-1", facts)


def _open_files(soft: int, hard: int) -> Finding:
    facts = {"soft": _number(soft), "hard": _number(hard)}
    if soft == resource.RLIM_INFINITY or soft >= FILES_WANTED:
        return Finding("open files", Verdict.OK, f"limit {_spelled(soft)}", facts=facts)
    said = f"limit {soft} (hard: {_spelled(hard)}); with many peers a consumer needs more"
    return Finding("open files", Verdict.WARNING, said, f"ulimit -n {FILES_WANTED} or more", facts)


def _ptrace_scope(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _has_sys_ptrace(path: Path) -> bool:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & _SYS_PTRACE)


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _spelled(limit: int) -> str:
    return "none" if limit == resource.RLIM_INFINITY else f"{limit:,}"
