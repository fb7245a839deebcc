"""Message channels that lose, repeat, delay or say nothing; peers that flood, storm or speak nonsense."""

import copy
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from kvferry.testing.fault_bench import VICTIM, FaultBench, Row, Seen
from kvferry.testing.faults.processes import PATIENT, begin_write
from kvferry.testing.ports import free_port
from kvferry.testing.relay import Front, Relay, Weather

WEATHERS: dict[str, tuple[Weather, str]] = {
    "late": (Weather(delay=0.4, jitter=0.4), "each message 0.4 to 0.8 s late, out of order"),
    "twice": (Weather(repeat=1.0, jitter=0.3), "each message twice, out of order"),
    "some lost": (Weather(drop=0.3), "3 of 10 messages lost"),
    "everything lost": (Weather(black_hole=True), "connections live, no message passes"),
}


@contextmanager
def _relayed(bench: FaultBench, weather: Weather) -> Iterator[Relay]:
    real = str(bench.producer.ask("address", "address")["address"])
    relay = Relay(real, weather, seed=3)
    front = Front(bench.producer.url, real=real, shown=relay.address)
    try:
        bench.url = front.url
        yield relay
    finally:
        bench.url = bench.producer.url
        front.close()
        relay.close()


def bad_weather(transport: str, phase: str) -> Row:
    """Twelve transfers through a relay; then one without it."""
    weather, means = copy.deepcopy(WEATHERS[phase])
    seen = Seen(phase="all through")
    timing = {"publish": 8.0, "pull": 8.0, "orphan": 4.0}
    with FaultBench(transport, timing=timing, limits={"silence": 4.0, "abort_timeout": 2.0}) as bench:
        with _relayed(bench, Weather()):
            bench.warm()
        names = [f"w-{index}" for index in range(12)]
        since = time.monotonic()
        with _relayed(bench, weather):
            # Another address, so the consumer asks the front for it; what it knew of the real one is not used.
            for index, name in enumerate(names):
                bench.publish(name, salt=50 + index, tokens=160)
                since = bench.fetch(name, salt=50 + index, tokens=160)
            ends = [bench.consumer.wait("ended", name, seconds=30) for name in names]
            weather.black_hole = False  # over cma a live writer is asked whether it is quiet, so it must be reachable
            for name in names:
                seen.back = bench.consumer.wait("quiet", name, seconds=40)["at"] - since
        for name in names:
            bench.producer.wait("quiet", name, seconds=40)
        fates = [f"{end['fate']} {end['reason']}".strip() for end in ends]
        seen.consumer = ", ".join(f"{fates.count(fate)} {fate}" for fate in dict.fromkeys(fates))
        told = [bench.said("producer", name) for name in names]
        seen.producer = ", ".join(f"{told.count(fate)} {fate}" for fate in dict.fromkeys(told))
        failed = [end["at"] - since for end in ends if end["fate"] != "done"]
        seen.noticed = max(failed, default=None)
        if phase == "late" and failed:
            seen.problems.append("messages that come late must not fail a transfer")
        bench.move()
        return bench.row(f"messages: {phase}", f"a relay: {means}; 12 transfers", seen)


def relay_cut(transport: str, phase: str) -> Row:
    """The connection breaks while the write is under way; both engines live."""
    seen = Seen(phase=phase)
    with FaultBench(transport, large=phase == "during the write", timing=PATIENT) as bench:
        with _relayed(bench, Weather()) as relay:
            bench.warm()
            if phase == "during the write":
                begin_write(bench)
            else:
                bench.producer.tell("expect", transfer=VICTIM)
                bench.fetch()
                time.sleep(0.5)
            since = time.monotonic()
            relay.cut()
            bench.ended(since, seen)
            if phase != "during the write":
                bench.publish()
        bench.producer_back(since, seen, seconds=40)
        bench.move()
        return bench.row(
            "connection cut", "a relay breaks all connections and takes new ones; both processes live", seen
        )


def dead_port(transport: str, phase: str) -> Row:
    """The address that a router or a bootstrap service gives leads nowhere."""
    seen = Seen(phase=phase)
    with FaultBench(transport, timing={"resolve": 2.0}) as bench, _mute() as mute:
        bench.warm()
        front = None
        match phase:
            case "bootstrap port closed":
                url = f"http://127.0.0.1:{free_port()}"
            case "bootstrap port mute":
                url = f"http://127.0.0.1:{mute}"
            case _:
                real = str(bench.producer.ask("address", "address")["address"])
                port = mute if phase == "message port mute" else free_port()
                front = Front(bench.producer.url, real=real, shown=f"tcp://127.0.0.1:{port}")
                url = front.url
        bench.publish()
        since = bench.fetch(url=url)
        bench.ended(since, seen)
        if front is not None:
            front.close()
        bench.producer.tell("withdraw", transfer=VICTIM)
        bench.producer_back(time.monotonic(), Seen())
        seen.producer = "not reached"
        bench.move()
        return bench.row("dead address", phase, seen)


@contextmanager
def _mute() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def abort_storm(transport: str, phase: str) -> Row:
    """Sixty fetches, all cancelled within a moment, before and while they are served."""
    seen = Seen(phase=phase)
    with FaultBench(transport, timing={"publish": 6.0, "pull": 20.0}) as bench:
        bench.warm()
        names = [f"storm-{index}" for index in range(60)]
        for index, name in enumerate(names):
            bench.publish(name, salt=index, tokens=64)
        for index, name in enumerate(names):
            bench.fetch(name, salt=index, tokens=64)
        since = time.monotonic()
        for name in names[::2] if phase == "every other" else names:
            bench.consumer.tell("cancel", transfer=name)
        ends = [bench.consumer.wait("ended", name, seconds=20) for name in names]
        for name in names:
            seen.back = bench.consumer.wait("quiet", name, seconds=20)["at"] - since
            bench.producer.wait("quiet", name, seconds=20)
        fates = [end["fate"] for end in ends]
        seen.consumer = ", ".join(f"{fates.count(fate)} {fate}" for fate in dict.fromkeys(fates))
        told = [bench.said("producer", name) for name in names]
        seen.producer = ", ".join(f"{told.count(fate)} {fate}" for fate in dict.fromkeys(told))
        seen.noticed = max(end["at"] - since for end in ends)
        bench.move()
        return bench.row("abort storm", f"60 fetches at once, {phase} cancelled", seen)


def flood(transport: str, phase: str) -> Row:
    """Another consumer pulls transfers that nobody knows; a valid one is served promptly all the same."""
    seen = Seen(phase="all through")
    with FaultBench(transport, timing={"orphan": 3.0}) as bench:
        bench.warm()
        flooder = bench.start_consumer(engine="flooder", blocks=2000, block_tokens=32)
        names = [f"unknown-{index}" for index in range(1500)]
        for name in names:
            flooder.tell("fetch", transfer=name, tokens=32, salt=0, source=["p", bench.producer.url])
        since = time.monotonic()
        bench.publish()
        bench.fetch()
        end = bench.ended(since, seen)
        if end["fate"] != "done":
            seen.problems.append("the valid request was not served")
        reasons: list[str] = []
        for name in names:
            one = flooder.wait("ended", name, seconds=40)
            reasons.append(f"{one['fate']} {one['reason']}".strip())
        said = ", ".join(f"{reasons.count(one)} {one}" for one in dict.fromkeys(reasons))
        bench.producer_back(since, seen)
        last = flooder.close(seconds=30)
        if last is None or last["free"] != last["total"]:
            seen.problems.append("the flooder's blocks did not come home")
        bench.move()
        means = f"1,500 pulls for unknown transfers beside a valid one; the flooder is told: {said}"
        return bench.row("flood of pulls", means, seen)


def nonsense(transport: str, phase: str) -> Row:
    """Bytes that are no messages, at the producer's message socket."""
    seen = Seen(phase="all through")
    with FaultBench(transport) as bench:
        bench.warm()
        address = str(bench.producer.ask("address", "address")["address"])
        context = zmq.Context()
        stranger: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(address)
        for index in range(400):
            stranger.send_multipart([os.urandom(1 + 37 * index % 4000)] * (1 + index % 3))
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(os.urandom(4096))
        since = time.monotonic()
        bench.publish()
        bench.fetch()
        end = bench.ended(since, seen)
        if end["fate"] != "done":
            seen.problems.append("the valid request was not served")
        bench.producer_back(since, seen)
        context.destroy(linger=0)
        bench.move()
        return bench.row("nonsense", "400 frames of random bytes, one to three a message, and raw bytes", seen)


def same_name_twice(transport: str, phase: str) -> Row:
    """A router gives one transfer id to two requests."""
    seen = Seen(phase=phase)
    with FaultBench(transport, timing={"publish": 5.0, "pull": 8.0}) as bench:
        bench.warm()
        if phase == "published twice":
            bench.publish(salt=7)
            since = bench.publish(salt=8)
            bench.producer.wait("quiet", VICTIM, seconds=5)
            bench.fetch(salt=7)
            bench.ended(since, seen)
            bench.producer_back(since, seen)
        else:
            bench.publish()
            bench.fetch()
            bench.ended(time.monotonic(), Seen())
            since = bench.fetch()
            bench.ended(since, seen)
            bench.producer_back(since, seen)
        bench.move()
        return bench.row("one transfer id for two requests", phase, seen)
