"""What the kernel allows this process: memory it may lock, files it may open, processes it may write to."""

import resource
from pathlib import Path
from typing import Final

from kvferry.runtime.checkup.deployment import Deployment
from kvferry.runtime.checkup.records import Finding, Verdict

FILES_WANTED: Final = 4096
"""An engine costs five descriptors for each producer that a consumer knows, a connection a few more."""
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_SYS_PTRACE: Final = 1 << 19
_SCOPES: Final = {
    0: "any process of this user",
    1: "a process that the receiver admits (kvferry does, one writer at a time)",
    2: "processes with CAP_SYS_PTRACE only",
    3: "no process at all",
}


def check_limits(deployment: Deployment) -> tuple[Finding, ...]:
    """Locked memory and open files."""
    return _locked_memory(deployment), _open_files()


def check_ptrace(deployment: Deployment) -> Finding:
    """Whether the kernel's rules let ``cma`` write; the marker page is the proof of it."""
    scope = _ptrace_scope()
    capable = _has_sys_ptrace()
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


def _locked_memory(deployment: Deployment) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
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


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": _number(soft), "hard": _number(hard)}
    if soft == resource.RLIM_INFINITY or soft >= FILES_WANTED:
        return Finding("open files", Verdict.OK, f"limit {_spelled(soft)}", facts=facts)
    said = f"limit {soft} (hard: {_spelled(hard)}); with many peers a consumer needs more"
    return Finding("open files", Verdict.WARNING, said, f"ulimit -n {FILES_WANTED} or more", facts)


def _ptrace_scope() -> int | None:
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return None


def _has_sys_ptrace() -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & _SYS_PTRACE)


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _spelled(limit: int) -> str:
    return "none" if limit == resource.RLIM_INFINITY else f"{limit:,}"
