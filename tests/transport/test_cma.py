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
from kvferry.transport.proc import CmaAddress, ProcessIdentity

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
    named = CmaAddress.parse(transport.address())
    named.process.check_alive()
    assert named.process.pid == os.getpid()
    assert str(named) == transport.address()


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
    address = f"cma:{child.pid}:{start}:{own.pid_namespace}:{own.boot_id}:0"
    assert not transport.peer_is_gone(address)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert transport.peer_is_gone(address)  # a zombie: no thread of it runs
    child.wait()
    assert transport.peer_is_gone(address)
    assert not transport.peer_is_gone(f"cma:{child.pid}:{start}:{own.pid_namespace}:another-boot:0")


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
    transport.register([region])
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
    transport.register([region])
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
    address = f"{own}:0" if os.getuid() == 0 else f"cma:1:{start_ticks(1)}:{own.pid_namespace}:{own.boot_id}:0"
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


RECEIVER = """
import sys
import numpy as np
from kvferry.layout import Region
from kvferry.transport import CmaTransport
mine, other = np.zeros(8192, np.uint8), np.zeros(8192, np.uint8)
transport = CmaTransport()
transport.register([Region(mine.ctypes.data, 8192)])
print(transport.address(), mine.ctypes.data, other.ctypes.data, flush=True)
for line in sys.stdin:
    if line == "close\\n":
        transport.close()
    print(int(mine.sum()), int(other.sum()), flush=True)
"""


class Receiver:
    """A process that has registered one of two pieces of memory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address, *places = self.process.stdout.readline().split()
        self.mine, self.other = map(int, places)

    def sums(self, word: str = "") -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return [int(one) for one in self.process.stdout.readline().split()]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.process.kill()
    one.process.communicate()


def refused_regions(transport: CmaTransport, address: str, *regions: Region) -> TransportError:
    with pytest.raises(TransportError) as refusal:
        transport.open_peer(address, regions)
    return refusal.value


def test_only_what_the_receiving_process_itself_has_registered_is_written(
    transport: CmaTransport, receiver: Receiver
) -> None:
    """A pull may name any address of it: a region is believed only when that very process lists it."""
    for region in (
        Region(receiver.other, 8192),
        Region(receiver.mine - 8, 8192),
        Region(receiver.mine, 8193),
        Region(receiver.mine + 8184, 16),
        Region(4096, 8),
        Region((1 << 63) - 4096, 8),
    ):
        error = refused_regions(transport, receiver.address, region)
        assert error.reason is TransportReason.NOT_REGISTERED
        assert "not inside a region that the receiving process has registered" in error.message
    source = np.ones(8192, np.uint8)
    transport.register([Region(source.ctypes.data, 8192)])
    peer = transport.open_peer(receiver.address, [Region(receiver.mine + 100, 200)])
    rows = Descriptors.of([source.ctypes.data], [receiver.mine + 100], [200])
    assert wait(transport.submit(peer, rows), timeout_s=10) is SubmissionState.DONE
    assert receiver.sums() == [200, 0]


def test_a_process_without_a_record_is_never_written_to(
    transport: CmaTransport, child: subprocess.Popen[bytes], receiver: Receiver
) -> None:
    """Whatever address of it is said to be its record, and also when it is a receiver that says so of other memory."""
    own = ProcessIdentity.of_self()
    stranger = f"cma:{child.pid}:{start_ticks(child.pid)}:{own.pid_namespace}:{own.boot_id}"
    executable = int(Path(f"/proc/{child.pid}/maps").read_text().partition("-")[0], 16)
    for record in (0, executable, (1 << 64) - 8, int(receiver.address.rpartition(":")[2], 16)):
        error = refused_regions(transport, f"{stranger}:{record:x}", Region(executable, 64))
        assert error.reason in (TransportReason.NOT_REGISTERED, TransportReason.OUT_OF_RANGE)
    moved = f"{receiver.address.rpartition(':')[0]}:{receiver.other:x}"
    assert refused_regions(transport, moved, Region(receiver.mine, 64)).reason is TransportReason.NOT_REGISTERED


def test_a_closed_receiver_lists_nothing(transport: CmaTransport, receiver: Receiver) -> None:
    transport.open_peer(receiver.address, [Region(receiver.mine, 64)])
    receiver.sums("close")
    error = refused_regions(transport, receiver.address, Region(receiver.mine, 64))
    assert error.reason is TransportReason.NOT_REGISTERED


@pytest.mark.parametrize("tail", ["", ":", ":xyz", ":-1", ":0x10", ":" + "f" * 17, ":F", ":1:2", ":" + "1" * 5000])
def test_other_forms_of_an_address_are_refused(transport: CmaTransport, tail: str) -> None:
    address = transport.address().rpartition(":")[0] + tail
    assert refused_regions(transport, address).reason is TransportReason.PEER_UNREACHABLE


def test_a_number_without_end_is_no_address() -> None:
    with pytest.raises(TransportError):
        ProcessIdentity.parse("cma:" + "1" * 5000 + ":1:1:x")
