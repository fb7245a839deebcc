"""Processes that die, stop, go on, come back, or end a transfer on purpose."""

import time

from kvferry.testing.fault_bench import VICTIM, FaultBench, Row, Seen, wait_until
from kvferry.testing.ports import free_port

SLOW = {"rows": 150, "pause": 0.08}
"""Makes a write over ``cma`` last long enough to be interrupted."""

TIMING = {"publish": 20.0, "pull": 20.0}

PATIENT = {"publish": 480.0, "pull": 480.0}
"""The defaults of an engine: no deadline comes to anybody's help."""


def begin_write(bench: FaultBench) -> None:
    """Start the victim, and return when its first bytes have landed."""
    if bench.transport == "cma":
        bench.producer.tell("misdeed", name="Slow", args=SLOW)
    bench.publish()
    bench.fetch()
    bench.consumer.wait("began", VICTIM, seconds=30)


def _opened(bench: FaultBench) -> None:
    """Let the victim's pull wait at a producer that still computes."""
    bench.producer.tell("expect", transfer=VICTIM)
    bench.fetch()
    said = wait_until(lambda: bench.said_event("producer", "PullArrived"), seconds=10)
    assert said, "the pull did not arrive"


def _replace_producer(bench: FaultBench) -> None:
    bench.producer = bench.start_producer()
    bench.move()


def _replace_consumer(bench: FaultBench) -> None:
    bench.consumer = bench.start_consumer()
    bench.move()


def producer_killed(transport: str, phase: str) -> Row:
    """SIGKILL."""
    seen = Seen(phase=phase, producer="killed")
    with FaultBench(transport, large=phase == "during the write", timing=TIMING) as bench:
        bench.warm()
        match phase:
            case "before the pull":
                bench.publish()
                bench.producer.kill()
                since = bench.fetch()
            case "pull waits":
                _opened(bench)
                since = bench.producer.kill()
            case "during the write":
                begin_write(bench)
                since = bench.producer.kill()
            case _:
                bench.publish()
                bench.fetch()
                bench.consumer.wait("quiet", VICTIM)
                bench.producer.kill()
                bench.consumer.wait("ended", VICTIM)
                since = bench.fetch()
        bench.ended(since, seen)
        _replace_producer(bench)
        return bench.row("producer dies", "SIGKILL, then a new one at the same port", seen)


def producer_stopped(transport: str, phase: str) -> Row:
    """SIGSTOP, and SIGCONT once the consumer has given up."""
    seen = Seen(phase=phase)
    with FaultBench(transport, large=phase == "during the write", timing=TIMING) as bench:
        bench.warm()
        if phase == "during the write":
            begin_write(bench)
        else:
            _opened(bench)
        since = bench.producer.stop()
        end = bench.consumer.wait("ended", VICTIM, seconds=15)
        seen.consumer, seen.noticed = f"{end['fate']} {end['reason']}", end["at"] - since
        if transport == "cma" and phase == "during the write":
            early = bench.consumer.find("quiet", VICTIM, seconds=2.0)
            if early is not None:
                seen.problems.append("blocks went back while the stopped writer could go on")
        bench.producer.resume()
        resumed = time.monotonic()
        if phase != "during the write":
            bench.publish()
        quiet = bench.consumer.wait("quiet", VICTIM, seconds=30)
        seen.back = max(0.0, quiet["at"] - (resumed if quiet["at"] > resumed else since))
        bench.producer_back(resumed, seen, seconds=40)
        bench.move()
        means = "SIGSTOP, SIGCONT after the consumer gave up; blocks counted from SIGCONT where they wait for it"
        return bench.row("producer stops and goes on", means, seen)


def producer_stopped_for_good(transport: str, phase: str) -> Row:
    """SIGSTOP in the middle of a write, and no SIGCONT: over ``cma`` nothing proves that it will not go on."""
    seen = Seen(phase="during the write")
    full = phase == "quarantine full"
    limits = {"quarantined_blocks": 32.0 if full else 128.0}  # the victim has 64
    with FaultBench(transport, large=True, timing=PATIENT, limits=limits) as bench:
        bench.warm()
        neighbour = bench.start_producer(engine="q", port=free_port())
        begin_write(bench)
        since = bench.producer.stop()
        end = bench.consumer.wait("ended", VICTIM, seconds=15)
        seen.consumer, seen.noticed = f"{end['fate']} {end['reason']}", end["at"] - since
        if bench.consumer.find("quiet", VICTIM, seconds=8.0) is not None:
            seen.problems.append("blocks went back while the stopped writer could go on")
        neighbour.tell("publish", transfer="other", tokens=200, salt=9)
        bench.consumer.tell("fetch", transfer="other", tokens=200, salt=9, source=[neighbour.engine, neighbour.url])
        other = bench.consumer.wait("ended", "other")
        expected = "failed limit-exceeded" if full else "done"
        if f"{other['fate']} {other['reason']}".strip() != expected:
            seen.problems.append(f"a fetch from another producer should be {expected}, not {other}")
        bench.consumer.wait("quiet", "other", seconds=5)
        killed = bench.producer.kill()
        seen.producer = "stopped, later killed"
        seen.back = bench.consumer.wait("quiet", VICTIM, seconds=20)["at"] - killed
        _replace_producer(bench)
        means = f"SIGSTOP, later SIGKILL, blocks counted from it; meanwhile a fetch from another producer: {expected}"
        return bench.row(f"producer stays stopped, {phase}", means, seen)


def consumer_killed(transport: str, phase: str) -> Row:
    """SIGKILL."""
    seen = Seen(phase=phase, consumer="killed")
    with FaultBench(transport, large=phase == "during the write", timing=PATIENT) as bench:
        bench.warm()
        if phase == "during the write":
            begin_write(bench)
        else:
            _opened(bench)
        since = bench.consumer.kill()
        if phase == "pull waits":
            # Publication finds the loss noticed; in the other phases the write does.
            noticed = wait_until(lambda: bench.said_event("producer", "ConsumerLost"), seconds=10)
            assert noticed, "the producer did not notice that its consumer died"
        if phase != "during the write":
            bench.publish()
        bench.producer_back(since, seen, seconds=40)
        seen.noticed = seen.back
        _replace_consumer(bench)
        return bench.row("consumer dies", "SIGKILL, then a new one", seen)


def consumer_stopped(transport: str, phase: str) -> Row:
    """SIGSTOP; SIGCONT after eight seconds."""
    seen = Seen(phase=phase)
    with FaultBench(transport, large=phase == "during the write", timing=TIMING) as bench:
        bench.warm()
        if phase == "during the write":
            begin_write(bench)
        else:
            _opened(bench)
        since = bench.consumer.stop()
        quiet = bench.producer.find("quiet", VICTIM, seconds=8)
        bench.consumer.resume()
        if phase == "during the write":
            end = bench.consumer.wait("ended", VICTIM, seconds=20)
            seen.consumer = f"{end['fate']} {end['reason']}".strip()
            bench.consumer.wait("quiet", VICTIM, seconds=30)
        else:
            end = bench.consumer.wait("ended", VICTIM, seconds=25)
            seen.consumer = f"{end['fate']} {end['reason']}".strip()
            bench.consumer.wait("quiet", VICTIM, seconds=30)
            bench.publish()
        if quiet is None:
            bench.producer_back(since, seen, seconds=40)
        else:
            seen.back, seen.producer = quiet["at"] - since, bench.said("producer")
        seen.noticed = seen.back
        bench.move()
        return bench.row("consumer stops and goes on", "SIGSTOP, SIGCONT after 8 s", seen)


def producer_restarts(transport: str, phase: str) -> Row:
    """It closes in order and comes back at its port, with the same or with other layouts."""
    seen = Seen(phase="between transfers", producer="closed")
    with FaultBench(transport, timing=TIMING) as bench:
        bench.warm()
        other = phase == "with another layout"
        for _ in range(3):
            closed = bench.producer.close()
            if closed is None or closed["free"] != closed["total"]:
                seen.problems.append("the producer closed with blocks held")
            bench.producer = bench.start_producer(block_tokens=8, blocks=400) if other else bench.start_producer()
            since = time.monotonic()
            end = bench.move()
            seen.consumer, seen.noticed = end["fate"], max(0.0, end["at"] - since)
        return bench.row("producer restarts", f"closed and started at its port {phase}, three times", seen)


def consumer_restarts(transport: str, phase: str) -> Row:
    """The same for a consumer."""
    seen = Seen(phase="between transfers", consumer="closed")
    with FaultBench(transport, timing=TIMING) as bench:
        bench.warm()
        closed = bench.consumer.close()
        if closed is None or closed["free"] != closed["total"]:
            seen.problems.append("the consumer closed with blocks held")
        other = phase == "with another layout"
        bench.consumer = bench.start_consumer(block_tokens=8, blocks=400) if other else bench.start_consumer()
        since = time.monotonic()
        end = bench.move()
        seen.noticed = max(0.0, end["at"] - since)
        seen.producer = "done"
        return bench.row("consumer restarts", f"closed and started {phase}", seen)


def other_version(transport: str, phase: str) -> Row:
    """In a rolling upgrade one side speaks another version of the protocol."""
    side, kind = phase.split(", ")
    version = (1, 9) if kind == "minor" else (2, 0)
    seen = Seen(phase="all through")
    with FaultBench(transport, timing=TIMING) as bench:
        bench.warm()
        old = bench.producer if side == "producer" else bench.consumer
        old.close()
        if side == "producer":
            bench.producer = bench.start_producer(version=version)
        else:
            bench.consumer = bench.start_consumer(version=version)
        bench.publish()
        since = bench.fetch()
        end = bench.ended(since, seen)
        expected = "done" if kind == "minor" else "failed version-mismatch"
        if seen.consumer != expected:
            seen.problems.append(f"expected {expected}: {end}")
        if kind == "major":
            bench.producer.tell("withdraw", transfer=VICTIM)
        bench.producer_back(since, seen)
        if kind == "major":  # the upgrade goes on: now both speak the new version
            other = "consumer" if side == "producer" else "producer"
            getattr(bench, other).close()
            setattr(bench, other, getattr(bench, f"start_{other}")(version=version))
        bench.move()
        spoken = f"the {side} speaks {version[0]}.{version[1]}"
        means = f"{spoken}; a transfer after both do" if kind == "major" else spoken
        return bench.row(f"another {kind} version", means, seen)


def closed_while_writing(transport: str, phase: str) -> Row:
    """One side closes in order while the victim is on its way."""
    seen = Seen(phase="during the write")
    with FaultBench(transport, large=True, timing=TIMING) as bench:
        bench.warm()
        begin_write(bench)
        since = time.monotonic()
        side = bench.producer if phase == "producer" else bench.consumer
        closed = side.close(seconds=20)
        if closed is None:
            seen.problems.append("it did not close")
        elif closed["stray"] or (phase == "producer" and closed["free"] != closed["total"]):
            seen.problems.append(f"after closing: {closed}")
        if phase == "producer":
            seen.producer = "closed"
            bench.ended(since, seen)
            _replace_producer(bench)
        else:
            seen.consumer = "closed"
            bench.producer_back(since, seen, seconds=40)
            seen.noticed = seen.back
            _replace_consumer(bench)
        return bench.row(f"{phase} closes", "close() in the middle of a write", seen)


def forked(transport: str, phase: str) -> Row:
    """A child made by fork uses the engine that it inherited."""
    seen = Seen(phase="between transfers", producer="refused by name", consumer="refused by name")
    with FaultBench(transport, timing=TIMING) as bench:
        bench.warm()
        for ferry in (bench.producer, bench.consumer):
            word = "forked" if phase == "fork" else "after-close"
            answer = ferry.ask("fork" if phase == "fork" else "use-after-close", word)
            if not answer["refused"]:
                seen.problems.append(f"{ferry.spec.role}: not refused")
        bench.move()
        name = "use after fork" if phase == "fork" else "use after close"
        means = (
            "os.fork(), the child calls the engine" if phase == "fork" else "a closed engine is called, closed twice"
        )
        return bench.row(name, means, seen)


def expired(transport: str, phase: str) -> Row:
    """Deadlines: nobody pulls, or nobody publishes."""
    seen = Seen(phase=phase)
    with FaultBench(transport, timing={"publish": 2.0, "pull": 2.0, "orphan": 1.0}) as bench:
        bench.warm()
        if phase == "nobody pulls":
            since = bench.publish()
            bench.producer_back(since, seen)
            seen.noticed = seen.back
        else:
            if phase == "nobody publishes":
                bench.producer.tell("expect", transfer=VICTIM)
            since = bench.fetch()
            bench.ended(since, seen)
            seen.producer = bench.said("producer")
        bench.move()
        return bench.row("a deadline passes", "publish 2 s, pull 2 s, unknown transfers 1 s", seen)


def withdrawn(transport: str, phase: str) -> Row:
    """The producer's engine gives the prompt up."""
    seen = Seen(phase=phase)
    with FaultBench(transport, timing=TIMING) as bench:
        bench.warm()
        if phase == "pull waits":
            _opened(bench)
            since = bench.producer.tell("withdraw", transfer=VICTIM)
        else:
            bench.publish()
            bench.producer.tell("withdraw", transfer=VICTIM)
            bench.producer_back(time.monotonic(), seen)
            since = bench.fetch()
        bench.ended(since, seen)
        seen.producer = bench.said("producer")
        bench.move()
        return bench.row("prompt withdrawn", "the producer's engine aborts the request", seen)


def aborted(transport: str, phase: str) -> Row:
    """The consumer's engine gives the request up."""
    seen = Seen(phase=phase)
    with FaultBench(transport, large=phase == "during the write", timing=TIMING) as bench:
        bench.warm()
        if phase == "during the write":
            begin_write(bench)
        else:
            _opened(bench)
        since = bench.consumer.tell("cancel", transfer=VICTIM)
        bench.ended(since, seen)
        if phase != "during the write":
            bench.publish()
        bench.producer_back(since, seen)
        bench.move()
        return bench.row("request aborted", "the consumer's engine cancels the fetch", seen)
