"""What the kernel allows, and what that means for a transport: a verdict, the words, and what to do."""

import resource
from pathlib import Path
from typing import Literal

import pytest

from kvferry.runtime.checkup import Deployment, Finding, Verdict, check_limits, check_ptrace
from kvferry.runtime.checkup.limits import FILES_WANTED, Allowed

NO_LIMIT = resource.RLIM_INFINITY
MANY = (FILES_WANTED, FILES_WANTED)
TCP = Deployment(transport="mooncake", protocol="tcp")
RDMA = Deployment(transport="mooncake", protocol="rdma")
CMA = Deployment(transport="cma")


def allowed(
    *,
    locked: tuple[int, int] = (NO_LIMIT, NO_LIMIT),
    files: tuple[int, int] = MANY,
    scope: int | None = None,
    capable: bool = False,
) -> Allowed:
    return Allowed(locked, files, scope, capable)


def locked_memory(deployment: Deployment, *limits: int) -> Finding:
    soft, hard = limits
    finding, _ = check_limits(deployment, allowed(locked=(soft, hard)))
    assert finding.name == "locked memory"
    return finding


def open_files(*limits: int) -> Finding:
    soft, hard = limits
    _, finding = check_limits(TCP, allowed(files=(soft, hard)))
    assert finding.name == "open files"
    return finding


# ------------------------------------------------------------------------------------------------- locked memory


@pytest.mark.parametrize("protocol", ["rdma", "efa", "nvlink", "nvlink_intra"])
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((8_388_608, 8_388_608), "limit 8,388,608 (hard: 8,388,608)"),
        ((65_536, NO_LIMIT), "limit 65,536 (hard: none)"),
        ((0, 0), "limit 0 (hard: 0)"),
    ],
)
def test_a_protocol_that_locks_the_cache_is_warned_of_a_limit(
    protocol: str, limits: tuple[int, int], said: str
) -> None:
    finding = locked_memory(Deployment(protocol=protocol), *limits)
    assert finding.verdict is Verdict.WARNING
    assert finding.said == f"{said}; {protocol} locks all of the cache's memory"
    assert finding.advice == "ulimit -l unlimited, or --ulimit memlock=-1"
    soft, hard = limits
    assert finding.facts == {"soft": soft, "hard": None if hard == NO_LIMIT else hard, "needed": True}


def test_without_a_limit_nothing_is_to_be_done() -> None:
    finding = locked_memory(RDMA, NO_LIMIT, NO_LIMIT)
    assert (finding.verdict, finding.said, finding.advice) == (Verdict.OK, "no limit", "")
    assert finding.facts == {"soft": None, "hard": None, "needed": True}


@pytest.mark.parametrize(
    "deployment", [TCP, CMA, Deployment(transport="cma", protocol="rdma")], ids=["tcp", "cma", "cma beside rdma"]
)
@pytest.mark.parametrize(("soft", "spelled"), [(65_536, "65,536"), (NO_LIMIT, "none")])
def test_a_transport_that_locks_nothing_needs_no_limit(deployment: Deployment, soft: int, spelled: str) -> None:
    finding = locked_memory(deployment, soft, NO_LIMIT)
    assert (finding.verdict, finding.advice) == (Verdict.OK, "")
    assert finding.said == f"limit {spelled}; not needed over this transport"
    assert finding.facts["needed"] is False


# ---------------------------------------------------------------------------------------------------- open files


@pytest.mark.parametrize(("soft", "spelled"), [(FILES_WANTED, "4,096"), (1_048_576, "1,048,576"), (NO_LIMIT, "none")])
def test_enough_files_are_enough(soft: int, spelled: str) -> None:
    finding = open_files(soft, NO_LIMIT)
    assert (finding.verdict, finding.said, finding.advice) == (Verdict.OK, f"limit {spelled}", "")


@pytest.mark.parametrize(
    ("soft", "hard", "spelled"), [(1024, 524_288, "524,288"), (FILES_WANTED - 1, NO_LIMIT, "none"), (0, 0, "0")]
)
def test_too_few_files_are_warned_of(soft: int, hard: int, spelled: str) -> None:
    finding = open_files(soft, hard)
    assert finding.verdict is Verdict.WARNING
    assert finding.said == f"limit {soft} (hard: {spelled}); with many peers a consumer needs more"
    assert finding.advice == "ulimit -n 4096 or more"
    assert finding.facts == {"soft": soft, "hard": None if hard == NO_LIMIT else hard}


# -------------------------------------------------------------------------------------------------------- ptrace

ADVICE = "set kernel.yama.ptrace_scope to 1, or give the container SYS_PTRACE, for the cma transport"


@pytest.mark.parametrize("deployment", [CMA, TCP], ids=["cma", "mooncake"])
@pytest.mark.parametrize(
    ("scope", "capable", "said"),
    [
        (None, False, "this kernel does not restrict tracing (no Yama); this process has not CAP_SYS_PTRACE"),
        (None, True, "this kernel does not restrict tracing (no Yama); this process has CAP_SYS_PTRACE"),
        (0, False, "ptrace_scope 0 lets in any process of this user; this process has not CAP_SYS_PTRACE"),
        (
            1,
            False,
            "ptrace_scope 1 lets in a process that the receiver admits (kvferry does, one writer at a time); "
            "this process has not CAP_SYS_PTRACE",
        ),
        (2, True, "ptrace_scope 2 lets in processes with CAP_SYS_PTRACE only; this process has CAP_SYS_PTRACE"),
    ],
)
def test_a_kernel_that_lets_writers_in(deployment: Deployment, scope: int | None, said: str, *, capable: bool) -> None:
    finding = check_ptrace(deployment, allowed(scope=scope, capable=capable))
    assert (finding.verdict, finding.said, finding.advice) == (Verdict.OK, said, "")
    assert finding.facts == {"ptrace_scope": scope, "cap_sys_ptrace": capable}


@pytest.mark.parametrize(("transport", "verdict"), [("cma", Verdict.FAILED), ("mooncake", Verdict.NOTE)])
@pytest.mark.parametrize(
    ("scope", "capable", "said"),
    [
        (2, False, "ptrace_scope 2 lets in processes with CAP_SYS_PTRACE only; this process has not CAP_SYS_PTRACE"),
        (3, False, "ptrace_scope 3 lets in no process at all; this process has not CAP_SYS_PTRACE"),
        (3, True, "ptrace_scope 3 lets in no process at all; this process has CAP_SYS_PTRACE"),
        (4, True, "ptrace_scope 4 lets in nobody knows whom; this process has CAP_SYS_PTRACE"),
    ],
)
def test_a_kernel_that_lets_none_in_fails_the_transport_that_needs_it(
    transport: Literal["cma", "mooncake"], verdict: Verdict, scope: int, said: str, *, capable: bool
) -> None:
    finding = check_ptrace(Deployment(transport=transport), allowed(scope=scope, capable=capable))
    assert (finding.verdict, finding.said, finding.advice) == (verdict, said, ADVICE)
    assert finding.facts == {"ptrace_scope": scope, "cap_sys_ptrace": capable}


# ------------------------------------------------------------------------------------------- how it is read


def kernel_says(name: str) -> tuple[int, int]:
    """Soft and hard limit, as the kernel lists those of this process."""
    for line in Path("/proc/self/limits").read_text().splitlines():
        if line.startswith(name):
            soft, hard = (NO_LIMIT if word == "unlimited" else int(word) for word in line[len(name) :].split()[:2])
            return soft, hard
    raise AssertionError(f"no {name} in the kernel's list")


def test_the_limits_are_those_that_the_kernel_lists() -> None:
    read = Allowed.read()
    assert read.locked == kernel_says("Max locked memory")
    assert read.files == kernel_says("Max open files")


@pytest.mark.parametrize(
    ("yama", "scope"), [(None, None), ("0\n", 0), ("1\n", 1), ("2\n", 2), ("3\n", 3), ("", None), ("what\n", None)]
)
def test_the_scope_is_read_from_yama(yama: str | None, scope: int | None, tmp_path: Path) -> None:
    if yama is not None:
        file = tmp_path / "sys/kernel/yama/ptrace_scope"
        file.parent.mkdir(parents=True)
        file.write_text(yama)
    assert Allowed.read(tmp_path).ptrace_scope == scope


@pytest.mark.parametrize(
    ("status", "capable"),
    [
        ("CapPrm:\t0000000000000000\nCapEff:\t0000000000080000\nCapBnd:\t0000000000000000\n", True),
        ("CapPrm:\t0000000000080000\nCapEff:\t00000000a80425fb\nCapBnd:\t0000000000080000\n", False),
        ("CapEff:\t000001ffffffffff\n", True),
        ("Name:\tpython\n", False),
        (None, False),
    ],
    ids=["that one alone", "permitted, not effective", "all", "no line", "no file"],
)
def test_the_capability_counts_where_it_is_effective(status: str | None, tmp_path: Path, *, capable: bool) -> None:
    if status is not None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self/status").write_text(status)
    assert Allowed.read(tmp_path).sys_ptrace is capable
