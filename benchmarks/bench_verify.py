"""What ``verify`` costs: time of one transfer between two processes, off, sample and full: ``make bench-verify``.

A prompt of 2,000 tokens over 32 layers with keys and values apart, 8 heads of 256 bytes each, in scattered 16-token
blocks: 8,000 pages, 262 MB. A round is one fetch in each mode, so that all modes meet the same noise; shown are the
least and the median of the rounds, from the order to the reported end, with everything warm. Digests are made at the
producer while it writes, and at the consumer when all has come, so what is added is the consumer's part and what the
two ends take from each other's processors.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, get_args

import msgspec
import numpy as np

from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout import bind_layout
from kvferry.protocol import Fate, Source, Span, Table, Ticket
from kvferry.runtime import Bootstrap, ConsumerRuntime, Fetch, Local, ProducerRuntime, Publication, RuntimeOptions
from kvferry.runtime.checking import VerifyMode
from kvferry.testing.layouts import page, side_by_side, worker
from kvferry.testing.ports import free_port
from kvferry.transport import CmaTransport, MooncakeTransport, Transport

LAYERS, BLOCK, BLOCKS, TOKENS = 32, 16, 128, 2000
ROUNDS: Final = 7
TRANSPORTS: Final = ("cma", "mooncake")
MODES: Final[tuple[VerifyMode, ...]] = get_args(VerifyMode)


def table(seed: int) -> Table:
    """Scattered blocks for the prompt."""
    order = np.random.default_rng(seed).permutation(BLOCKS)[: -(-TOKENS // BLOCK)]
    return Table(0, tuple(order.tolist()))


def side(engine: str, *, filled: bool) -> tuple[Local, np.ndarray]:
    """One rank, and its memory, which must outlive it."""
    parts = [
        page(f"l{layer}", heads=(0, 8, 8), tokens=BLOCK, nbytes=256, num_blocks=BLOCKS, component=name)
        for layer in range(LAYERS)
        for name in "kv"
    ]
    layout = worker(side_by_side(parts, base=0))
    size = layout.regions[0].nbytes
    memory = np.random.default_rng(1).integers(0, 256, size, np.uint8) if filled else np.zeros(size, np.uint8)
    base = memory.ctypes.data
    region = msgspec.structs.replace(layout.regions[0], address=base)
    components = tuple(msgspec.structs.replace(one, address=one.address + base) for one in layout.components)
    bound = bind_layout(msgspec.structs.replace(layout, regions=(region,), components=components))
    return Local(Incarnation(EngineId(engine), engine), "bench", 0, bound.binding, (bound.placement,), 1, 1), memory


def options(transport: str, **more: Any) -> RuntimeOptions:
    def make() -> Transport:
        return CmaTransport() if transport == "cma" else MooncakeTransport("127.0.0.1")

    return RuntimeOptions(host="127.0.0.1", make_transport=make, **more)


def produce(transport: str, port: int) -> None:
    """The other process: publishes under every name that it reads."""
    local, memory = side("p", filled=True)
    bootstrap = Bootstrap(url=f"http://127.0.0.1:{port}", serve=("127.0.0.1", port))
    runtime = ProducerRuntime(local, options(transport, bootstrap=bootstrap))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for number, line in enumerate(sys.stdin, 1):
        transfer = TransferId(line.strip())
        runtime.publish(Publication(Ticket(number), RequestId(transfer), transfer, TOKENS, (table(1),)))
        sys.stdout.write("published\n")
        sys.stdout.flush()
    runtime.close()
    del memory


@contextmanager
def producer(transport: str, port: int) -> Iterator["subprocess.Popen[str]"]:
    """The other process, from here."""
    process = subprocess.Popen(
        [sys.executable, __file__, transport, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    wait_for(process, "ready")
    yield process
    process.stdin.close()
    process.wait(20)


def wait_for(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()) != f"{word}\n":
        assert line, "the producer has ended"


def fetch(runtime: ConsumerRuntime, process: "subprocess.Popen[str]", name: str, source: Source) -> float:
    """Seconds from the order to the end."""
    assert process.stdin is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    wait_for(process, "published")
    began = time.perf_counter()
    runtime.fetch(Fetch(Ticket(1), RequestId(name), TransferId(name), source, Span(0, TOKENS), (table(2),)))
    while not (ended := runtime.take_ended()):
        time.sleep(200e-6)
    took = time.perf_counter() - began
    assert ended[0].outcome.fate is Fate.DONE, ended
    while not runtime.take_quiet():
        time.sleep(200e-6)
    return took


def measure(transport: str) -> None:
    """Print the rows of one transport."""
    port = free_port()
    source = Source(EngineId("p"), f"http://127.0.0.1:{port}")
    local, memory = side("d", filled=False)
    seconds: dict[VerifyMode, list[float]] = {mode: [] for mode in MODES}
    with producer(transport, port) as process:
        runtimes = {mode: ConsumerRuntime(local, options(transport, verify=mode)) for mode in MODES}
        for turn in range(ROUNDS + 1):
            for mode, runtime in runtimes.items():
                took = fetch(runtime, process, f"{mode}-{turn}", source)
                seconds[mode] += [took] if turn else []  # the first of each makes plans and connections
        counts = {mode: runtime.take_interval().counts for mode, runtime in runtimes.items()}
        for runtime in runtimes.values():
            runtime.close()
    assert memory.any()
    for mode, times in seconds.items():
        least, median = min(times) * 1e3, statistics.median(times) * 1e3
        pages = counts[mode]["verified_pages"] // (ROUNDS + 1)
        nbytes = counts[mode]["verified_bytes"] // (ROUNDS + 1)
        print(f"| {transport} | {mode} | {pages:,} | {nbytes / 1e6:.0f} | {least:.0f} | {median:.0f} |")


def main() -> None:
    if len(sys.argv) == 3:
        produce(sys.argv[1], int(sys.argv[2]))
        return
    moved = sum(1 for _ in table(1).blocks) * BLOCK * 8 * 256 * 2 * LAYERS
    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} CPUs, Python "
          f"{platform.python_version()}, load {os.getloadavg()[0]:.1f}; {TOKENS:,} tokens x {LAYERS} layers, "
          f"{moved / 1e6:.0f} MB, {ROUNDS} rounds\n")  # fmt: skip
    print("| transport | verify | pages compared | MB hashed at each end | least ms | median ms |")
    print("|---|---|---|---|---|---|")
    for transport in TRANSPORTS:
        measure(transport)


if __name__ == "__main__":
    main()
