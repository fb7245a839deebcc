"""The habits of the real engine that the conformance suite does not show."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.testing.transport_benches import ProcessBench, mooncake_bench
from kvferry.testing.transport_conformance import PAGE, SPARE, Link, done, pages
from kvferry.transport import MooncakeTransport, SubmissionState, wait
from kvferry.transport.mooncake import import_fault

MIB = 1 << 20


def test_a_missing_package_or_library_is_named() -> None:
    library = import_fault(ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory"))
    assert library.reason is TransportReason.UNAVAILABLE
    assert "libibverbs1" in library.message
    other = import_fault(ImportError("libnuma.so.1: cannot open shared object file"))
    assert "libnuma.so.1" in other.message
    code = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from kvferry.transport import MooncakeTransport\n"
        "MooncakeTransport('127.0.0.1')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "TransportError: unavailable" in result.stderr
    assert "pip install mooncake-transfer-engine-non-cuda" in result.stderr


@pytest.mark.mooncake
class TestEngine:
    @pytest.fixture(autouse=True)
    def _engine(self) -> None:
        pytest.importorskip("mooncake")

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[ProcessBench]:
        bench = mooncake_bench(tmp_path, stall_s=1.0)
        yield bench
        bench.end()

    def test_says_tcp_only_when_told_tcp(self) -> None:
        transport = MooncakeTransport("127.0.0.1")
        assert transport.protocol_in_use() == "tcp"
        assert "MC_FORCE_TCP" not in os.environ
        transport.close()

    @pytest.mark.skipif(os.path.exists("/sys/class/infiniband"), reason="this host has RDMA devices")
    @pytest.mark.parametrize("protocol", ["rdma", "shm", "cxl", "nvlink"])
    def test_a_protocol_that_would_silently_be_tcp_is_an_error(self, protocol: str) -> None:
        with pytest.raises(TransportError) as refusal:
            MooncakeTransport("127.0.0.1", protocol=protocol)
        assert refusal.value.reason is TransportReason.WRONG_PROTOCOL

    def test_the_threads_device_is_chosen_before_and_after_the_engine_starts_and_in_its_lanes(
        self, bench: ProcessBench
    ) -> None:
        entered: list[str] = []
        link = Link(bench, MIB)
        writer = MooncakeTransport("127.0.0.1", enter_thread=lambda: entered.append(threading.current_thread().name))
        here = threading.current_thread().name
        assert entered == [here, here]
        writer.register([Region(link.source.ctypes.data, MIB)])
        peer = writer.open_peer(link.receiver.address, link.receiver.regions)
        assert done(writer.submit(peer, link.rows(*pages(4))))
        assert [name.startswith("kvferry-lane-") for name in entered] == [False, False, True]
        writer.close()

    def test_a_devices_memory_is_refused_by_an_engine_that_does_not_know_devices(self) -> None:
        import mooncake.engine

        if mooncake.engine.SUPPORT_CUDA:
            pytest.skip("this engine is built for CUDA")
        transport = MooncakeTransport("127.0.0.1")
        with pytest.raises(TransportError, match="built without CUDA") as refusal:
            transport.register([Region(1 << 40, PAGE, "cuda:0")])
        assert refusal.value.reason is TransportReason.UNAVAILABLE
        transport.close()

    def test_two_engines_receive_into_the_same_memory(self, bench: ProcessBench) -> None:
        """One receive engine for each producer: closing one leaves the other, and their addresses differ."""
        sink = np.zeros(PAGE, np.uint8)
        link = Link(bench, MIB)
        receivers = [MooncakeTransport("127.0.0.1") for _ in range(2)]
        assert len({receiver.address() for receiver in receivers}) == 2
        region = link.receiver.regions[0].__class__(address=sink.ctypes.data, nbytes=PAGE)
        for receiver in receivers:
            receiver.register([region])
        peers = [bench.writer.open_peer(receiver.address(), [region]) for receiver in receivers]
        rows = link.rows(np.array([0]), np.array([0]), np.array([PAGE]))
        rows = type(rows).of(rows.src, [sink.ctypes.data], [PAGE])
        for peer in peers:
            sink[:] = SPARE
            assert done(bench.writer.submit(peer, rows))
            assert np.array_equal(sink, link.source[:PAGE])
        receivers[0].close()
        sink[:] = SPARE
        assert wait(bench.writer.submit(peers[0], rows), timeout_s=10) is SubmissionState.FAILED
        assert (sink == SPARE).all()
        assert done(bench.writer.submit(peers[1], rows))
        receivers[1].close()

    def test_a_stopped_peer_fails_in_time_and_late_completion_makes_it_quiet(self, bench: ProcessBench) -> None:
        link = Link(bench, 64 * MIB)
        receiver = bench.receivers[0]
        assert done(link.writer.submit(link.peer, link.rows(*pages(4))))
        receiver.stop()
        begun = time.monotonic()
        submission = link.writer.submit(link.peer, link.rows(*pages(16_384)))
        assert wait(submission, timeout_s=10) is SubmissionState.FAILED
        assert time.monotonic() - begun < 5
        assert submission.error is not None
        assert submission.error.reason is TransportReason.TIMED_OUT
        assert not submission.quiet
        receiver.resume()
        deadline = time.monotonic() + 10
        while not submission.destination_quiet and time.monotonic() < deadline:
            time.sleep(0.005)
        assert submission.destination_quiet
        assert done(link.writer.submit(link.peer, link.rows(*pages(16_384))))
        assert np.array_equal(link.receiver.memory, link.expected(*pages(16_384)))

    def test_closing_while_a_peer_is_stopped_fences_the_sources_and_says_no_more(self, bench: ProcessBench) -> None:
        link = Link(bench, 64 * MIB)
        receiver = bench.receivers[0]
        assert done(link.writer.submit(link.peer, link.rows(*pages(4))))
        receiver.stop()
        places = np.arange(64) * MIB
        submission = link.writer.submit(link.peer, link.rows(places, places, np.full(64, MIB)))
        assert wait(submission, timeout_s=10) is SubmissionState.FAILED
        begun = time.monotonic()
        link.writer.close()
        assert time.monotonic() - begun < 10
        assert submission.quiet
        assert not submission.destination_quiet
        link.source[:] = SPARE ^ 1
        receiver.resume()
        receiver.close()
        assert not (link.receiver.memory.reshape(-1, PAGE) == SPARE ^ 1).all(axis=1).any()

    def test_a_port_that_says_nothing_does_not_hold_the_submitter(self, bench: ProcessBench) -> None:
        link = Link(bench, MIB)
        with socket.create_server(("127.0.0.1", 0)) as mute:
            peer = link.writer.open_peer(f"127.0.0.1:{mute.getsockname()[1]}", link.receiver.regions)
            submission = link.writer.submit(peer, link.rows(*pages(4)))
            assert wait(submission, timeout_s=10) is SubmissionState.FAILED
            assert submission.error is not None
            assert submission.error.reason is TransportReason.TIMED_OUT
            assert not submission.quiet
            # Other peers are served meanwhile, and close() says that it cannot fence as long as a call is out.
            assert done(link.writer.submit(link.peer, link.rows(*pages(4))))
            assert isinstance(link.writer, MooncakeTransport)
            with pytest.raises(TransportError) as refusal:
                link.writer.close(timeout_s=0.1)
            assert refusal.value.reason is TransportReason.TIMED_OUT
            assert not submission.quiet
            mute.setblocking(False)
            for connection in iter(lambda: _accept(mute), None):
                connection.close()
        link.writer.close()
        assert submission.quiet


def _accept(server: socket.socket) -> socket.socket | None:
    try:
        return server.accept()[0]
    except BlockingIOError:
        return None
