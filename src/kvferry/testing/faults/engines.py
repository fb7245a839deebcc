"""Transfer engines that misbehave: the producer's engine is wrapped by :mod:`kvferry.testing.faulty`."""

from kvferry.testing.fault_bench import VICTIM, FaultBench, Row, Seen

MISDEEDS: dict[str, tuple[str, dict[str, float], str]] = {
    "fails part-way": ("FailAfter", {"rows": 40}, "fails after 40 descriptors, and stops"),
    "lies": ("FailAndWriteLater", {"delay": 3.0}, "says failed at once, writes 3 s later"),
    "lies and waits": ("FailAndWriteLater", {"delay": 30.0}, "says failed at once, would write 30 s later"),
    "hangs": ("Hang", {"rows": 40}, "writes 40 descriptors, never ends, cannot be cancelled"),
    "repeats": ("Repeat", {"delay": 1.0}, "writes everything twice, 1 s apart, ends after the second"),
    "slow": ("Slow", {"rows": 20, "pause": 0.2}, "20 descriptors, then a pause of 0.2 s, and so on"),
}


def misbehaves(transport: str, phase: str) -> Row:
    """One misdeed of the engine, on the victim."""
    name, args, means = MISDEEDS[phase]
    seen = Seen(phase="during the write")
    limits = {"write_timeout": 3.0, "stop_timeout": 1.0, "fence_after": 2.0}
    with FaultBench(transport, timing={"publish": 30.0, "pull": 20.0}, producer_limits=limits) as bench:
        bench.warm()
        bench.producer.tell("misdeed", name=name, args=args)
        bench.publish()
        since = bench.fetch()
        end = bench.ended(since, seen, seconds=30)
        bench.producer_back(since, seen, seconds=30)
        expected = "done" if phase in ("repeats", "slow") else "failed"
        if end["fate"] != expected:
            seen.problems.append(f"the victim should be {expected}")
        if phase == "lies and waits":
            # Both engines are new by now; the lie has nobody left to write with. Use the blocks and look.
            bench.move()
        bench.move()
        renewed = bench.producer.audit()["counts"].get("engines_renewed", 0)
        seen.producer += f", engine renewed {renewed} time(s)" if renewed else ""
        if phase == "hangs" and transport == "cma" and not renewed:  # elsewhere the consumer's fence settles it
            seen.problems.append("the engine was not renewed, or that was not counted")
        return bench.row(f"engine {phase}", means, seen)


def overfull(transport: str, phase: str) -> Row:
    """Four times 4,096 copies at once to one peer: an engine that is handed more than it queues fails, or wedges."""
    seen = Seen(phase="all through")
    with FaultBench(transport, large=True, timing={"publish": 60.0, "pull": 60.0}) as bench:
        bench.warm()
        names = [f"full-{index}" for index in range(4)]
        since = 0.0
        for index, name in enumerate(names):
            bench.publish(name, salt=index, tokens=1984)
        for index, name in enumerate(names):
            since = bench.fetch(name, salt=index, tokens=1984)
        fates = [bench.consumer.wait("ended", name, seconds=60)["fate"] for name in names]
        for name in names:
            seen.back = bench.consumer.wait("quiet", name, seconds=30)["at"] - since
            bench.producer.wait("quiet", name, seconds=30)
        told = [bench.said("producer", name) for name in names]
        seen.consumer = ", ".join(f"{fates.count(one)} {one}" for one in dict.fromkeys(fates))
        seen.producer = ", ".join(f"{told.count(one)} {one}" for one in dict.fromkeys(told))
        if fates != ["done"] * 4:
            seen.problems.append("a full queue must not fail a transfer")
        if bench.producer.audit()["counts"].get("engines_renewed", 0):
            seen.problems.append("the engine was renewed")
        bench.move()
        return bench.row("queues over-full", "four transfers of 3,968 copies of 4 KiB at once, to one peer", seen)


def misbehaves_in_a_crowd(transport: str, phase: str) -> Row:
    """One lie among twenty transfers: the others' bytes are right, and they end."""
    seen = Seen(phase="during the write")
    limits = {"write_timeout": 5.0, "stop_timeout": 1.0, "fence_after": 2.0}
    with FaultBench(transport, timing={"publish": 30.0, "pull": 20.0}, producer_limits=limits) as bench:
        bench.warm()
        bench.producer.tell("misdeed", name="FailAndWriteLater", args={"delay": 4.0})
        names = [f"crowd-{index}" for index in range(20)]
        since = 0.0
        for index, name in enumerate(names):
            bench.publish(name, salt=100 + index, tokens=160)
            since = bench.fetch(name, salt=100 + index, tokens=160)
        ends = [bench.consumer.wait("ended", name, seconds=30) for name in names]
        fates = [end["fate"] for end in ends]
        seen.consumer = f"{fates.count('done')} done, {fates.count('failed')} failed"
        seen.noticed = min((end["at"] - since for end in ends if end["fate"] == "failed"), default=None)
        if fates.count("failed") < 1 or fates.count("done") < 1:
            seen.problems.append(f"expected some of each: {fates}")
        for name in names:
            seen.back = bench.consumer.wait("quiet", name, seconds=30)["at"] - since
            bench.producer.wait("quiet", name, seconds=40)
        failed = next((one["transfer"] for one in ends if one["fate"] == "failed"), VICTIM)
        seen.producer = bench.said("producer", failed)
        bench.move()
        return bench.row("engine lies to one of twenty", "says failed at once, writes 4 s later", seen)
