"""Identity and errors of cross-memory copies, on real processes."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors
from kvferry.transport import CmaTransport, SubmissionState, wait
from kvferry.transport.proc import ProcessIdentity

NOBODY = 65534


def start_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


@pytest.fixture
def transport() -> Iterator[CmaTransport]:
    transport = CmaTransport()
    yield transport
    transport.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_an_address_names_one_life_of_one_process(transport: CmaTransport) -> None:
    identity = ProcessIdentity.parse(transport.address())
    identity.check_alive()
    assert identity.pid == os.getpid()
    assert str(identity) == transport.address()


@pytest.mark.parametrize(
    ("field", "said"), [("start_ticks", "the number now belongs"), ("pid_namespace", "another"), ("boot_id", "another")]
)
def test_another_life_machine_or_namespace_is_refused(transport: CmaTransport, field: str, said: str) -> None:
    fields = transport.address().split(":")
    place = {"start_ticks": 2, "pid_namespace": 3, "boot_id": 4}[field]
    fields[place] = "1" + fields[place]
    with pytest.raises(TransportError, match=said) as refusal:
        transport.open_peer(":".join(fields), [])
    assert refusal.value.reason is TransportReason.PEER_UNREACHABLE


def test_a_peer_is_gone_only_when_it_has_ended(transport: CmaTransport, child: subprocess.Popen[bytes]) -> None:
    own = ProcessIdentity.of_self()
    start = start_ticks(child.pid)
    address = f"cma:{child.pid}:{start}:{own.pid_namespace}:{own.boot_id}"
    assert not transport.peer_is_gone(address)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert transport.peer_is_gone(address)  # a zombie: no thread of it runs
    child.wait()
    assert transport.peer_is_gone(address)
    assert not transport.peer_is_gone(f"cma:{child.pid}:{start}:{own.pid_namespace}:another-boot")


def test_device_memory_is_refused(transport: CmaTransport) -> None:
    with pytest.raises(TransportError, match="cuda:0") as refusal:
        transport.register([Region(address=4096, nbytes=4096, memory="cuda:0")])
    assert refusal.value.reason is TransportReason.INVALID_REGIONS


def test_memory_that_was_unmapped_fails_and_is_quiet(transport: CmaTransport) -> None:
    source = np.arange(3 * mmap.PAGESIZE, dtype=np.uint8)
    transport.register([Region(address=source.ctypes.data, nbytes=source.nbytes)])
    sink = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    view = np.frombuffer(sink, np.uint8)
    region = Region(address=view.ctypes.data, nbytes=view.nbytes)
    peer = transport.open_peer(transport.address(), [region])
    rows = Descriptors.of(
        source.ctypes.data + np.arange(3) * mmap.PAGESIZE,
        region.address + np.arange(3) * mmap.PAGESIZE,
        np.full(3, mmap.PAGESIZE),
    )
    assert wait(transport.submit(peer, rows), timeout_s=10) is SubmissionState.DONE
    assert np.array_equal(view, source)
    del view
    sink.close()
    submission = transport.submit(peer, rows)
    assert wait(submission, timeout_s=10) is SubmissionState.FAILED
    assert submission.error is not None
    assert submission.error.reason is TransportReason.OUT_OF_RANGE
    assert submission.destination_quiet


def test_a_row_that_runs_into_unmapped_memory_fails_after_its_first_part(transport: CmaTransport) -> None:
    source = np.arange(4 * mmap.PAGESIZE, dtype=np.uint8)
    transport.register([Region(address=source.ctypes.data, nbytes=source.nbytes)])
    sink = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    view = np.frombuffer(sink, np.uint8)
    base = view.ctypes.data
    region = Region(address=base, nbytes=view.nbytes)
    peer = transport.open_peer(transport.address(), [region])
    libc = ctypes.CDLL(None, use_errno=True)
    hole = ctypes.c_void_p(base + 2 * mmap.PAGESIZE)
    assert libc.mprotect(hole, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    rows = Descriptors.of([source.ctypes.data], [base + 100], [3 * mmap.PAGESIZE])
    submission = transport.submit(peer, rows)
    assert wait(submission, timeout_s=10) is SubmissionState.FAILED
    assert submission.error is not None
    assert submission.error.reason is TransportReason.OUT_OF_RANGE
    assert libc.mprotect(hole, ctypes.c_size_t(mmap.PAGESIZE), 3) == 0
    landed = 2 * mmap.PAGESIZE - 100
    assert np.array_equal(view[100 : 100 + landed], source[:landed])
    assert not view[:100].any()
    assert not view[100 + landed :].any()


def test_a_process_of_another_user_is_refused(transport: CmaTransport) -> None:
    """As root, by a child that is nobody; else by asking for the first process."""
    memory = np.zeros(1, np.uint8)
    own = ProcessIdentity.of_self()
    address = str(own) if os.getuid() == 0 else f"cma:1:{start_ticks(1)}:{own.pid_namespace}:{own.boot_id}"
    code = (
        "import os, sys\n"
        "from kvferry.layout import Region\n"
        "from kvferry.transport import CmaTransport\n"
        "os.setuid(int(sys.argv[3]))\n"
        "CmaTransport().open_peer(sys.argv[1], [Region(address=int(sys.argv[2]), nbytes=1)])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, address, str(memory.ctypes.data), str(os.getuid() or NOBODY)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TransportError: permission" in result.stderr
    assert "admit this writer" in result.stderr
