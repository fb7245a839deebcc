"""A consumer here, a producer in another process: real sockets, real engines, and a producer that dies or stops."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import Fate, FetchEnded, Source, Span, Table, Ticket
from kvferry.runtime import ConsumerRuntime, Fetch
from kvferry.testing.ports import free_port

from .worlds import BLOCK, LAYERS, World, local_side, options_for

TRANSPORTS = [pytest.param("cma"), pytest.param("mooncake", marks=pytest.mark.mooncake)]
SEED = 5


class Producer:
    """The other process."""

    def __init__(self, transport: str, kind: str, port: int, epoch: str) -> None:
        spec = {"transport": transport, "kind": kind, "seed": SEED, "port": port, "epoch": epoch}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "producer_process.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def tell(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def publish(self, ticket: int, transfer: str, tokens: int, tables: Sequence[tuple[int, Sequence[int]]]) -> None:
        self.tell(do="publish", ticket=ticket, transfer=transfer, tokens=tokens, tables=tables)

    def quiet(self) -> list[int]:
        assert self.process.stdout is not None
        self.tell(do="quiet")
        answer: list[int] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue


class Side:
    """The consumer of this process, and the producers that a test started."""

    def __init__(self, transport: str, kind: str) -> None:
        self.transport, self.kind = transport, kind
        self.world = World.build(kind)
        self.port = free_port()
        self.source = Source(EngineId("p"), f"http://127.0.0.1:{self.port}")
        self.runtime = ConsumerRuntime(local_side(self.world, engine="d", epoch="e"), options_for(transport))
        self.producers: list[Producer] = []
        self._ended: list[FetchEnded] = []
        self._quiet: list[int] = []

    def start_producer(self, epoch: str = "e1") -> Producer:
        self.producers.append(Producer(self.transport, self.kind, self.port, epoch))
        return self.producers[-1]

    def fetch(self, ticket: int, transfer: str, span: Span, *tables: Table) -> None:
        self.runtime.fetch(
            Fetch(Ticket(ticket), RequestId(f"d{ticket}"), TransferId(transfer), self.source, span, tables)
        )

    def end_of(self, ticket: int, *, seconds: float = 20.0) -> FetchEnded:
        def found() -> FetchEnded | None:
            self._ended += self.runtime.take_ended()
            return next((end for end in self._ended if end.ticket == ticket), None)

        return wait_for(found, seconds=seconds)

    def is_quiet(self, ticket: int) -> bool:
        self._quiet += self.runtime.take_quiet()
        return ticket in self._quiet

    def close(self) -> None:
        self.runtime.close()
        for producer in self.producers:
            producer.end()


def wait_for(found: Callable[[], object], *, seconds: float) -> object:
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
    return result


def stays(holds: Callable[[], object], *, seconds: float) -> None:
    """For as long, asked again and again: what must not happen would be seen when it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert holds()
        time.sleep(0.005)


@pytest.fixture(params=TRANSPORTS)
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    one = Side(request.param, getattr(request.cls, "kind", "small"))
    yield one
    one.close()


def test_twenty_transfers_at_once_move_their_bytes_and_no_others(side: Side) -> None:
    producer = side.start_producer()
    source = World.build("small", seed=SEED)
    chance = np.random.default_rng(3)
    theirs, ours = chance.permutation(60), chance.permutation(60)
    expected = np.zeros_like(side.world.bytes)
    want = World(side.world.layout, expected, source.blocks, source.row)
    for index in range(20):
        (s0, s1, s2), (d0, d1, d2) = theirs[3 * index : 3 * index + 3], ours[3 * index : 3 * index + 3]
        tables = [(0, [int(s0), int(s1)]), (0, [int(s2)])]
        pull = (Table(0, (int(d0), int(d1))), Table(0, (int(d2),)))
        if index % 2:
            producer.publish(index + 1, f"t{index}", 2 * BLOCK, tables)
            side.fetch(100 + index, f"t{index}", Span(0, 2 * BLOCK), *pull)
        else:
            side.fetch(100 + index, f"t{index}", Span(0, 2 * BLOCK), *pull)
            producer.publish(index + 1, f"t{index}", 2 * BLOCK, tables)
        for layer in range(LAYERS):
            want.page(layer, d0)[:] = source.page(layer, s0)
            want.page(layer, d1)[:] = source.page(layer, s1)
        want.state(d2)[:] = source.state(s2)
    for index in range(20):
        assert side.end_of(100 + index).outcome.fate is Fate.DONE
    assert (side.world.bytes == expected).all()
    for index in range(20):
        wait_for(lambda ticket=100 + index: side.is_quiet(ticket), seconds=5)
    released: set[int] = set()
    wait_for(lambda: released.update(producer.quiet()) or len(released) == 20, seconds=5)


def test_an_unknown_engine_fails_with_its_reason(side: Side) -> None:
    side.fetch(1, "t", Span(0, BLOCK), Table(0, (1,)), Table(0, (2,)))
    end = side.end_of(1, seconds=8)
    assert (end.outcome.fate, end.outcome.reason) == (Fate.FAILED, ProtocolReason.PEER_LOST)
    wait_for(lambda: side.is_quiet(1), seconds=2)


def test_a_killed_producer_is_noticed_and_its_successor_is_found(side: Side) -> None:
    first = side.start_producer("e1")
    first.tell(do="expect", transfer="t1")
    side.fetch(1, "t1", Span(0, BLOCK), Table(0, (1,)), Table(0, (2,)))
    first.publish(9, "t0", BLOCK, [(0, [1]), (0, [2])])
    side.fetch(2, "t0", Span(0, BLOCK), Table(0, (3,)), Table(0, (4,)))
    assert side.end_of(2).outcome.fate is Fate.DONE
    killed = time.monotonic()
    first.end()
    assert side.end_of(1, seconds=6).outcome.reason is ProtocolReason.PEER_LOST
    wait_for(lambda: side.is_quiet(1), seconds=15 - (time.monotonic() - killed))
    second = side.start_producer("e2")
    second.publish(1, "t2", BLOCK, [(0, [7]), (0, [8])])
    side.fetch(3, "t2", Span(0, BLOCK), Table(0, (5,)), Table(0, (6,)))
    assert side.end_of(3).outcome.fate is Fate.DONE
    source = World.build("small", seed=SEED)
    assert (side.world.page(2, 5) == source.page(2, 7)).all()


def test_closing_ends_every_thread_and_fails_what_waits(side: Side) -> None:
    producer = side.start_producer()
    producer.tell(do="expect", transfer="t1")
    side.fetch(1, "t1", Span(0, BLOCK), Table(0, (1,)), Table(0, (2,)))
    began = time.monotonic()
    side.runtime.close()
    assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-consumer")]
    assert side.end_of(1, seconds=1).outcome.fate is not Fate.DONE


class TestLarge:
    """Transfers that take long enough to be interrupted."""

    kind = "large"

    def test_a_stopped_producer_writes_nothing_after_its_blocks_went_back(self, side: Side) -> None:
        producer = side.start_producer()
        blocks = list(range(500))
        tokens = len(blocks) * BLOCK
        side.fetch(1, "t1", Span(0, tokens), Table(0, tuple(blocks)), Table(0, (501,)))
        producer.publish(1, "t1", tokens, [(0, blocks[::-1]), (0, [501])])
        memory = side.world.bytes
        pages = [side.world.page(layer, block) for layer in range(LAYERS) for block in (0, 250, 499)]
        wait_for(lambda: any(page[0] for page in pages), seconds=10)
        producer.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        end = side.end_of(1, seconds=8)
        assert end.outcome.reason is ProtocolReason.PEER_LOST
        if side.transport == "cma":
            # A stopped process may go on; only its end proves that it does not.
            stays(lambda: not side.is_quiet(1), seconds=1.0)
            producer.process.kill()
        wait_for(lambda: side.is_quiet(1), seconds=15 - (time.monotonic() - stopped))
        memory[:] = 0
        producer.process.send_signal(signal.SIGCONT)
        if side.transport == "mooncake":
            # It goes on, and comes to know that its write has failed: until then it may have been trying.
            wait_for(lambda: memory.any() or 1 in producer.quiet(), seconds=20)
        stays(lambda: not memory.any(), seconds=0.5)
