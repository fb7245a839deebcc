"""Both runtimes in one process, over real sockets and ``cma``, and how to wait for what their threads do."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.ids import EngineId
from kvferry.protocol import FetchEnded, Source
from kvferry.runtime import Bootstrap, ConsumerRuntime, ProducerRuntime
from kvferry.testing.ports import free_port

from .worlds import World, local_side, options_for


def wait_until(holds: Callable[[], object], *, seconds: float = 20.0) -> None:
    """Return as soon as it holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)


@dataclass
class Pair:
    """A producer whose memory has content, and a consumer whose memory is empty."""

    producer: ProducerRuntime
    consumer: ConsumerRuntime
    source: World
    target: World
    at: Source

    def ends(self, count: int, *, seconds: float = 60.0) -> list[FetchEnded]:
        """The next ends of fetches, at least so many."""
        ends: list[FetchEnded] = []
        wait_until(lambda: ends.extend(self.consumer.take_ended()) or len(ends) >= count, seconds=seconds)
        return ends


@contextmanager
def paired() -> Iterator[Pair]:
    """Start both, and close both."""
    port = free_port()
    source, target = World.build("small", seed=3), World.build("small")
    bootstrap = Bootstrap(url=f"http://127.0.0.1:{port}", serve=("127.0.0.1", port))
    producer = ProducerRuntime(local_side(source, engine="p", epoch="e1"), options_for("cma", bootstrap=bootstrap))
    consumer = ConsumerRuntime(local_side(target, engine="d", epoch="e2"), options_for("cma"))
    yield Pair(producer, consumer, source, target, Source(EngineId("p"), bootstrap.url))
    consumer.close()
    producer.close()
