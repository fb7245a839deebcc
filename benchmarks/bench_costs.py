"""What descriptors and bytes cost on this machine, for each transport: ``make bench-costs``.

Writes of many (number of rows, bytes a row) are timed, the least of some rounds each, since noise only ever adds; then

    seconds = once + alpha * descriptors + beta * bytes      what the transport carries, to another process
    seconds = once + delta * runs        + gamma * bytes     copies inside one process, by the cma transport

are fitted by least squares of the *relative* error, so that short and long rows weigh alike. ``once`` (waking a thread,
polling) is what a submission costs whatever it holds: inside one process it is the ``step`` of the cost model. Each fit
comes with its median error. The printed constants are those of ``kvferry.transport.costs``.
"""

import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from kvferry.layout import Region
from kvferry.plan import Descriptors
from kvferry.testing.transport_benches import MemoryBench, ProcessBench, cma_bench, mooncake_bench
from kvferry.transport import CmaTransport, SubmissionState, Transport, wait

MEMORY = 64 << 20
SIZES = (128, 512, 2048, 8192, 32768, 131072, 524288)
MOST_BYTES = 24 << 20
ROUNDS = 5

Timed = Callable[[int, int], float]
"""(rows, bytes a row) -> seconds."""


@dataclass(frozen=True)
class Line:
    """seconds = each * rows + per_byte * bytes + once."""

    each: float
    per_byte: float
    once: float
    error: float
    """Median relative error of the fit."""


def fit(points: Sequence[tuple[int, int, float]]) -> Line:
    """Least squares of relative errors; a constant that would be negative is 0."""
    rows, nbytes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    matrix = np.stack([rows, nbytes, np.ones(len(points))], axis=1) / seconds[:, None]
    used = [0, 1, 2]
    found = np.full(3, -1.0)
    while (found < 0).any():
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(matrix[:, used], np.ones(len(points)), rcond=None)[0]
        used = [column for column in used if found[column] > 0]
    return Line(*found.tolist(), float(np.median(np.abs(matrix @ found - 1))))


def scattered(rows: int, nbytes: int, src: int, dst: int) -> Descriptors:
    """Rows that follow each other on neither side."""
    places = MEMORY // (2 * nbytes)
    rng = np.random.default_rng(rows)
    starts = [rng.permutation(places)[:rows] * 2 * nbytes for _ in range(2)]
    return Descriptors.of(starts[0] + src, starts[1] + dst, np.full(rows, nbytes))


def timed(writer: Transport, address: str, regions: Sequence[Region], source: np.ndarray) -> Timed:
    """Times a write through ``writer`` into the first ``MEMORY`` bytes of a peer."""
    writer.register([Region(source.ctypes.data, MEMORY)])
    peer = writer.open_peer(address, regions)

    def once(rows: int, nbytes: int) -> float:
        descriptors = scattered(rows, nbytes, source.ctypes.data, regions[0].address)
        start = time.perf_counter()
        submission = writer.submit(peer, descriptors)
        state = wait(submission, timeout_s=120, sleep=lambda _: time.sleep(20e-6))
        assert state is SubmissionState.DONE, submission.error
        return time.perf_counter() - start

    return once


def measure(once: Timed, most_rows: int) -> Line:
    points = []
    for nbytes in SIZES:
        for rows in (16, 64, 256, 1024, 4096):
            if rows <= most_rows and rows * nbytes <= MOST_BYTES:
                points.append((rows, rows * nbytes, min(once(rows, nbytes) for _ in range(ROUNDS))))
    return fit(points)


def in_process_bench(bench: ProcessBench | MemoryBench, most_rows: int) -> Line:
    source = np.ones(MEMORY, np.uint8)
    receiver = bench.start_receiver(2 * MEMORY)
    receiver.admit(bench.writer.address())
    return measure(timed(bench.writer, receiver.address, receiver.regions, source), most_rows)


def inside() -> Line:
    """Copies inside one process: what gather and scatter cost."""
    source, target = np.ones(MEMORY, np.uint8), np.ones(MEMORY, np.uint8)
    transport = CmaTransport()
    region = Region(target.ctypes.data, MEMORY)
    transport.register([region])
    line = measure(timed(transport, transport.address(), [region], source), 4096)
    transport.close()
    return line


def show(name: str, line: Line, each: str, per_byte: str) -> None:
    print(
        f"{name:<24} {each} = {line.each * 1e6:8.3f} us   {per_byte} = {line.per_byte * 1e9:7.4f} ns   "
        f"once = {line.once * 1e6:6.1f} us   median error {line.error:.0%}",
        flush=True,
    )


def machine() -> str:
    info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    kernel = platform.release().split("-")[0]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, Linux {kernel}"


def engine_version() -> str:
    for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "no Mooncake engine"


def main() -> int:
    load = os.getloadavg()[0]
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine()}, load {load:.1f}")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {engine_version()}")
    show("inside one process", inside(), "delta", "gamma")
    show("memory", in_process_bench(MemoryBench(), 4096), "alpha", " beta")
    with tempfile.TemporaryDirectory() as folder:
        bench = cma_bench(Path(folder))
        show("cma", in_process_bench(bench, 4096), "alpha", " beta")
        bench.end()
    if importlib.util.find_spec("mooncake") is not None:
        with tempfile.TemporaryDirectory() as folder:
            bench = mooncake_bench(Path(folder))
            show("mooncake, tcp, loopback", in_process_bench(bench, 4096), "alpha", " beta")
            bench.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
