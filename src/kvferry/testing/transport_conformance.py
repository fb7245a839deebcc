"""What every transport must do, as tests that ship: subclass, provide a bench, and run them with pytest.

    class TestMine(TransportConformance):
        @pytest.fixture
        def bench(self, tmp_path):
            with MyBench(tmp_path) as bench:
                yield bench

A bench has a writer and starts receivers; where it can, each receiver is a process of its own, so that killing it is
real. Memory is compared whole: the bytes that had to arrive, and every byte around them.
"""

import os
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors
from kvferry.testing.transport_peer import two_regions
from kvferry.transport import Peer, Submission, SubmissionState, Transport, wait

DEAD_PEER_S = 10.0
"""A write to a killed peer has failed within this."""
DONE_S = 60.0
SPARE = 0xEE
"""What the receiver's memory holds where nothing may be written."""
PAGE = 4096


class Receiver(Protocol):
    """A peer of the writer, under the test's control."""

    address: str
    regions: tuple[Region, ...]
    """Two that touch and cover ``memory``."""
    memory: np.ndarray
    """Its registered bytes, also after it was killed."""

    def admit(self, address: str) -> None:
        """Let that writer write here."""

    def close(self) -> None:
        """Close its transport, and let the process live."""

    def kill(self) -> None:
        """End it at once."""


class Bench(Protocol):
    """One transport under test."""

    writer: Transport
    failure_is_quiet: bool
    """Whether a write that has failed is over by the time that ``poll`` says so, or soon after."""

    def start_receiver(self, nbytes: int) -> Receiver:
        """A fresh peer, whose memory is all zero."""


class Link:
    """A writer with registered source memory, and a peer opened by it."""

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self.bench = bench
        self.writer = bench.writer
        self.source = np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)
        self.writer.register(two_regions(self.source.ctypes.data, nbytes))
        self.receiver, self.peer = self.add_receiver(nbytes)

    def add_receiver(self, nbytes: int) -> tuple[Receiver, Peer]:
        """One more peer."""
        receiver = self.bench.start_receiver(nbytes)
        receiver.memory[:] = SPARE
        receiver.admit(self.writer.address())
        return receiver, self.writer.open_peer(receiver.address, receiver.regions)

    def rows(self, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray) -> Descriptors:
        """Descriptors from offsets into the two memories."""
        return Descriptors.of(src + self.source.ctypes.data, dst + self.receiver.regions[0].address, nbytes)

    def expected(self, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """The receiver's memory after these rows alone: the plain loop that transports are compared with."""
        memory = np.full_like(self.receiver.memory, SPARE)
        for s, d, n in zip(src.tolist(), dst.tolist(), nbytes.tolist(), strict=True):
            memory[d : d + n] = self.source[s : s + n]
        return memory

    def untouched(self) -> bool:
        """Whether nothing was written to the receiver."""
        return bool((self.receiver.memory == SPARE).all())


def pages(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets of ``count`` pages from anywhere to anywhere."""
    rng = np.random.default_rng(11)
    return rng.permutation(count) * PAGE, rng.permutation(count) * PAGE, np.full(count, PAGE)


def done(submission: Submission) -> bool:
    """Whether it gets done, and is quiet then."""
    state = wait(submission, timeout_s=DONE_S)
    assert submission.error is None, submission.error
    return state is SubmissionState.DONE and submission.quiet and submission.destination_quiet


class TransportConformance:
    """The suite. ``bench`` is the one fixture that a subclass provides."""

    @pytest.fixture
    def link(self, bench: Bench) -> Link:
        """A mebibyte on both sides."""
        return Link(bench, 1 << 20)

    def test_writes_exact_bytes(self, link: Link) -> None:
        """Rows of all sizes and alignments, in any order, and not one byte beside them."""
        rng = np.random.default_rng(3)
        cuts = np.sort(rng.choice(link.source.size // 2 - 1, 401, replace=False))
        # Every second piece on each half of the memory, so that gaps lie between and no row crosses the seam.
        starts = np.concatenate((cuts[:-1:2], cuts[:-1:2] + link.source.size // 2))
        nbytes = np.tile(cuts[1::2] - cuts[:-1:2], 2)
        order = rng.permutation(starts.size)
        src, dst, nbytes = starts[order], starts[::-1][order], np.minimum(nbytes, nbytes[::-1])[order]
        submission = link.writer.submit(link.peer, link.rows(src, dst, nbytes))
        assert done(submission)
        assert (submission.descriptors, submission.total_bytes) == (starts.size, int(nbytes.sum()))
        assert np.array_equal(link.receiver.memory, link.expected(src, dst, nbytes))

    def test_writes_one_row_of_the_largest_size(self, bench: Bench) -> None:
        """A row may be as long as its region."""
        link = Link(bench, 2 * ((5 << 20) + 3))
        rows = (np.array([0]), np.array([0]), np.array([(5 << 20) + 3]))
        submission = link.writer.submit(link.peer, link.rows(*rows))
        assert done(submission)
        assert submission.descriptors == 1
        assert np.array_equal(link.receiver.memory, link.expected(*rows))

    def test_an_empty_submission_is_done(self, link: Link) -> None:
        """Nothing to do is done at once."""
        submission = link.writer.submit(link.peer, Descriptors.empty())
        assert submission.poll() is SubmissionState.DONE
        assert submission.quiet
        assert link.untouched()

    def test_writes_65536_rows_of_a_page(self, bench: Bench) -> None:
        """Far more rows than any engine takes at once."""
        link = Link(bench, 65_536 * PAGE)
        src, dst, nbytes = pages(65_536)
        assert done(link.writer.submit(link.peer, link.rows(src, dst, nbytes)))
        landed, sent = link.receiver.memory.reshape(-1, PAGE), link.source.reshape(-1, PAGE)
        assert np.array_equal(landed[dst // PAGE], sent[src // PAGE])

    def test_many_threads_share_a_peer(self, link: Link) -> None:
        """Submissions of several threads to one peer all arrive."""
        src, dst, nbytes = pages(256)
        submissions: list[Submission] = []

        def submit(part: slice) -> None:
            submissions.append(link.writer.submit(link.peer, link.rows(src[part], dst[part], nbytes[part])))

        threads = [threading.Thread(target=submit, args=(slice(start, start + 32),)) for start in range(0, 256, 32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(submissions) == len(threads)
        assert all(done(submission) for submission in submissions)
        assert np.array_equal(link.receiver.memory, link.expected(src, dst, nbytes))

    @pytest.mark.parametrize(
        ("src", "dst", "nbytes"),
        [
            pytest.param(-1, 0, 16, id="src-before"),
            pytest.param((1 << 20) - 15, 0, 16, id="src-past-end"),
            pytest.param(1 << 21, 0, 16, id="src-far"),
            pytest.param((1 << 19) - 8, 0, 16, id="src-over-seam"),
            pytest.param(0, -1, 16, id="dst-before"),
            pytest.param(0, (1 << 20) - 15, 16, id="dst-past-end"),
            pytest.param(0, 1 << 21, 16, id="dst-far"),
            pytest.param(0, (1 << 19) - 8, 16, id="dst-over-seam"),
        ],
    )
    def test_one_row_out_of_range_refuses_all(self, link: Link, src: int, dst: int, nbytes: int) -> None:
        """Nothing is written, not even the good row before the bad one; and the link still works."""
        good = (np.array([4096]), np.array([8192]), np.array([100]))
        bad = tuple(np.append(column, value) for column, value in zip(good, (src, dst, nbytes), strict=True))
        with pytest.raises(TransportError) as refusal:
            link.writer.submit(link.peer, link.rows(*bad))
        assert refusal.value.reason is TransportReason.OUT_OF_RANGE
        assert link.untouched()
        assert done(link.writer.submit(link.peer, link.rows(*good)))
        assert np.array_equal(link.receiver.memory, link.expected(*good))

    def test_writing_a_byte_twice_is_refused(self, link: Link) -> None:
        """Engines write overlapping rows in any order."""
        with pytest.raises(TransportError) as refusal:
            link.writer.submit(link.peer, link.rows(np.array([0, 500]), np.array([1000, 999]), np.array([10, 2])))
        assert refusal.value.reason is TransportReason.INVALID_DESCRIPTORS
        assert link.untouched()

    def test_unregistered_memory_is_not_sent(self, link: Link) -> None:
        """What was registered once and is no more."""
        link.writer.unregister(two_regions(link.source.ctypes.data, link.source.nbytes)[:1])
        with pytest.raises(TransportError) as refusal:
            link.writer.submit(link.peer, link.rows(np.array([0]), np.array([0]), np.array([16])))
        assert refusal.value.reason is TransportReason.OUT_OF_RANGE
        assert link.untouched()

    def test_overlapping_registrations_are_refused(self, link: Link) -> None:
        """And what was registered before stays."""
        with pytest.raises(TransportError) as refusal:
            link.writer.register([Region(address=link.source.ctypes.data + 4096, nbytes=4096)])
        assert refusal.value.reason is TransportReason.INVALID_REGIONS
        assert done(link.writer.submit(link.peer, link.rows(np.array([0]), np.array([0]), np.array([8192]))))

    def test_a_malformed_address_is_refused(self, link: Link) -> None:
        """An address comes from a peer: anything may stand in it."""
        for address in ("", "nowhere", "a:b:c:d:e", "127.0.0.1:", ":1", "cma:1:x:2:y", "127.0.0.1:99999"):
            with pytest.raises(TransportError) as refusal:
                link.writer.open_peer(address, link.receiver.regions)
            assert refusal.value.reason is TransportReason.PEER_UNREACHABLE

    def test_a_peer_killed_before_the_write(self, link: Link) -> None:
        """The write fails within the deadline, or is refused; it is never done."""
        assert done(link.writer.submit(link.peer, link.rows(*pages(4))))
        link.receiver.kill()
        self._expect_failure(link, lambda: link.writer.submit(link.peer, link.rows(*pages(256))))

    def test_a_peer_killed_during_the_write(self, bench: Bench) -> None:
        """The write fails within the deadline, some bytes written, and is never done."""
        link = Link(bench, 32_768 * PAGE)
        for _ in range(5):
            submission = link.writer.submit(link.peer, link.rows(*pages(32_768)))
            under_way = submission.poll() is SubmissionState.PENDING
            link.receiver.kill()
            if under_way and submission.poll() is not SubmissionState.DONE:
                break
            # The write was faster than the kill, which shows nothing: again, with a new peer.
            link.receiver, link.peer = link.add_receiver(link.source.nbytes)
        else:
            pytest.fail("five writes of 128 MiB were done before their peer could be killed")
        self._expect_failure(link, lambda: submission)

    def test_closing_ends_pending_writes_and_is_a_fence(self, bench: Bench) -> None:
        """After ``close`` a write is final and quiet: what is put in its source afterwards never arrives."""
        link = Link(bench, 32_768 * PAGE)
        submission = link.writer.submit(link.peer, link.rows(*pages(32_768)))
        link.writer.close()
        assert submission.poll() is not SubmissionState.PENDING
        assert submission.quiet
        assert submission.error is None or submission.error.reason is TransportReason.CLOSED
        link.source[:] = 1
        settled = _settled(link.receiver.memory)
        assert not (settled.reshape(-1, PAGE) == 1).all(axis=1).any()

    def test_a_cancelled_write_fails_and_becomes_quiet(self, bench: Bench) -> None:
        """What was handed over lands, the rest does not start, and then the memory is free."""
        link = Link(bench, 32_768 * PAGE)
        submission = link.writer.submit(link.peer, link.rows(*pages(32_768)))
        submission.cancel()
        state = submission.poll()
        if state is SubmissionState.FAILED:
            assert submission.error is not None
            assert submission.error.reason is TransportReason.CANCELLED
        else:
            assert state is SubmissionState.DONE
        _until(lambda: submission.quiet)
        assert done(link.writer.submit(link.peer, link.rows(*pages(16))))

    def test_a_closed_receiver_is_not_written_to(self, link: Link) -> None:
        """The receiver's fence, where the transport has one."""
        if not link.writer.close_stops_peers:
            pytest.skip("closing a receiver of this transport is no fence, and it says so")
        assert done(link.writer.submit(link.peer, link.rows(*pages(4))))
        link.receiver.memory[:] = SPARE
        link.receiver.close()
        self._expect_failure(link, lambda: link.writer.submit(link.peer, link.rows(*pages(256))))
        assert link.untouched()

    def test_a_closed_transport_refuses_everything(self, link: Link) -> None:
        """With one typed error; and it can be closed again."""
        rows = link.rows(*pages(4))
        link.writer.close()
        link.writer.close()
        calls: list[Callable[[], object]] = [
            link.writer.address,
            link.writer.protocol_in_use,
            lambda: link.writer.register([]),
            lambda: link.writer.unregister([]),
            lambda: link.writer.admit(link.peer.address),
            lambda: link.writer.peer_is_gone(link.peer.address),
            lambda: link.writer.open_peer(link.receiver.address, link.receiver.regions),
            lambda: link.writer.submit(link.peer, rows),
            lambda: link.writer.submit(link.peer, Descriptors.empty()),
        ]
        for call in calls:
            with pytest.raises(TransportError) as refusal:
                call()
            assert refusal.value.reason is TransportReason.CLOSED
        assert link.untouched()

    def test_a_fork_cannot_use_it(self, link: Link) -> None:
        """The child gets a typed error, can end normally, and the parent's transport goes on."""
        rows = link.rows(*pages(4))
        child = os.fork()
        if child == 0:
            os._exit(_status_in_fork(link.writer, link.peer, rows))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert link.untouched()
        assert done(link.writer.submit(link.peer, rows))

    def _expect_failure(self, link: Link, write: Callable[[], Submission]) -> None:
        submission = write()
        assert wait(submission, timeout_s=DEAD_PEER_S) is SubmissionState.FAILED
        assert isinstance(submission.error, TransportError)
        if link.bench.failure_is_quiet:
            _until(lambda: submission.destination_quiet)
        else:
            assert not submission.quiet
            assert not submission.destination_quiet
        link.writer.close()
        assert submission.quiet
        assert submission.poll() is SubmissionState.FAILED


def _until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(2000):
        if condition():
            return
        waited.wait(0.005)
    pytest.fail("not within 10 s")


def _settled(memory: np.ndarray) -> np.ndarray:
    """The memory once it has not changed for a tenth of a second."""
    snapshot = memory.copy()
    waited = threading.Event()
    for _ in range(100):
        waited.wait(0.1)
        if np.array_equal(snapshot, memory):
            return snapshot
        snapshot = memory.copy()
    pytest.fail("the receiver's memory still changes after 10 s")


def _status_in_fork(writer: Transport, peer: Peer, rows: Descriptors) -> int:
    calls: list[Callable[[], object]] = [writer.address, lambda: writer.submit(peer, rows)]
    refused = 0
    for call in calls:
        try:
            call()
        except TransportError as error:
            refused += error.reason is TransportReason.CLOSED
    writer.close()
    return 0 if refused == len(calls) else 1
