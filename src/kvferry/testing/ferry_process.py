"""One side of a transfer in a process of its own: ``python -m kvferry.testing.ferry_process SPEC``.

The process plays the embedding engine: it owns marked memory and a pool of blocks, allocates for each request, and
takes blocks back only when its runtime says that they are quiet. A producer then spoils the blocks, so that a read of
them afterwards shows; a consumer wipes them, so that a write into them afterwards shows. Commands come as JSON lines
on standard input, events go out as JSON lines on standard output, with the time of this host's monotonic clock.
"""

import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from kvferry.control import Networks
from kvferry.errors import FerryError
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout import Layout, bind_layout
from kvferry.plan import BlockTable
from kvferry.protocol import ConsumerLimits, Fate, ProducerLimits, Source, Span, Table, Ticket
from kvferry.runtime import (
    Alternative,
    Bootstrap,
    ConsumerRuntime,
    Fetch,
    Local,
    ProducerRuntime,
    Publication,
    RuntimeOptions,
    Timing,
    new_epoch,
)
from kvferry.runtime.options import PRIVATE_NETWORKS
from kvferry.testing.faulty import (
    Corrupt,
    FailAfter,
    FailAndWriteLater,
    FaultyTransport,
    Hang,
    Misdeed,
    Misdeeds,
    Repeat,
    Slow,
    SwapTargets,
    WrongSource,
)
from kvferry.testing.layouts import page, side_by_side, worker
from kvferry.testing.marked_memory import UNTOUCHED, MarkedMemory, Tables
from kvferry.testing.versions import speak
from kvferry.transport import CmaTransport, MooncakeTransport, Transport

SPOILT: Final = 0xEE
"""What a producer's blocks hold once they are quiet."""

MISDEEDS: Final[Mapping[str, type[Misdeed]]] = {
    kind.__name__: kind
    for kind in (Slow, FailAfter, FailAndWriteLater, Hang, Repeat, Corrupt, SwapTargets, WrongSource)
}


def misdeed(name: str, args: Mapping[str, float]) -> Misdeed:
    """A misdeed by its name."""
    return msgspec.convert(args, MISDEEDS[name])


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a side is to be."""

    role: str
    transport: str
    host: str = "127.0.0.1"
    port: int = 0
    """Of the bootstrap service, for a producer."""
    engine: str = "p"
    large: bool = False
    layers: int = 2
    block_tokens: int = 16
    blocks: int = 256
    timing: dict[str, float] = {}
    limits: dict[str, float] = {}
    misdeeds: tuple[tuple[str, dict[str, float]], ...] = ()
    always: tuple[str, dict[str, float]] | None = None
    debug_dir: str | None = None
    verify: Literal["off", "sample", "full"] = "off"
    retries: int = 0
    version: tuple[int, int] | None = None
    """Of the protocol that it speaks, where it is to be another one."""
    write_targets: tuple[str, ...] = ()
    """Networks beside the private ones that a producer may write to."""


def write_targets(spec: Spec) -> Networks:
    """The private networks, and what the spec adds."""
    more = Networks.parse(spec.write_targets, option="write_targets")
    return Networks((*PRIVATE_NETWORKS.members, *more.members))


def layout_of(spec: Spec) -> Layout:
    """Pages of heads by tokens; small ones, or 4 KiB runs that take an engine a while."""
    heads, row = ((0, 8, 8), 256) if spec.large else ((0, 2, 2), 64)
    layers = [
        page(f"l{index}", heads=heads, tokens=spec.block_tokens, nbytes=row, num_blocks=spec.blocks)
        for index in range(spec.layers)
    ]
    return worker(side_by_side(layers, base=0))


class Blocks:
    """The pool of one side, over its memory."""

    def __init__(self, spec: Spec) -> None:
        layout = layout_of(spec)
        self.memory = MarkedMemory(layout)
        self._components = layout.components
        self._spec = spec
        self._free = list(range(spec.blocks))
        self.total = spec.blocks

    def take(self, tokens: int) -> list[int]:
        """Blocks for so many tokens."""
        count = -(-tokens // self._spec.block_tokens)
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks are wanted, {len(self._free)} are free")
        taken, self._free = self._free[-count:], self._free[:-count]
        return taken

    def give_back(self, blocks: list[int], value: int) -> None:
        """Take blocks back, and overwrite them: whoever still uses them shows."""
        for block in blocks:
            for view in self._views(block):
                view[:] = value
        self._free[:0] = blocks  # first in, first out: a block rests before it is used again

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def strays(self, value: int) -> int:
        """Bytes of free blocks that do not hold ``value``."""
        return sum(int(np.count_nonzero(view != value)) for block in self._free for view in self._views(block))

    def touched(self, blocks: list[int]) -> bool:
        """Whether something has landed in any of these."""
        sample = blocks[:: max(1, len(blocks) // 16)]
        return any((view[:64] != UNTOUCHED).any() for block in sample for view in self._views(block))

    def _views(self, block: int) -> Iterator[np.ndarray]:
        for component in self._components:
            start = component.address + block * component.block_stride
            yield self.memory.bytes[start : start + component.block_stride]


@dataclass(slots=True)
class Held:
    """Blocks that belong to a request until they are quiet."""

    transfer: str
    tokens: int
    salt: int
    blocks: list[int]
    done: bool = False
    began: bool = False


@dataclass(slots=True)
class Counts:
    """What this side has seen go wrong or right."""

    wrong: int = 0
    """Bytes that were not what they must be in a request that was reported as done."""
    fates: dict[str, int] = field(default_factory=dict)


class SideProcess:
    """What both roles share."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.pool = Blocks(spec)
        self.held: dict[int, Held] = {}
        self.counts = Counts()
        self.misdeeds = Misdeeds(*(misdeed(name, args) for name, args in spec.misdeeds))
        if spec.always is not None:
            self.misdeeds.always = misdeed(*spec.always)
        self._tickets = iter(range(1, 1 << 40))
        bound = bind_layout(self.pool.memory.layout)
        self.local = Local(
            Incarnation(EngineId(spec.engine), new_epoch()), "faults", 0, bound.binding, (bound.placement,), 1, 1
        )

    def options(self) -> RuntimeOptions:
        """The options of its runtime."""
        spec = self.spec
        producing = spec.role == "producer"
        bootstrap = Bootstrap(url=f"http://{spec.host}:{spec.port}", serve=(spec.host, spec.port))
        return RuntimeOptions(
            host=spec.host,
            make_transport=self._make,
            bootstrap=bootstrap if producing else None,
            timing=Timing(**{"resolve": 2.0, **spec.timing}),
            debug_dir=spec.debug_dir,
            verify=spec.verify,
            retries=spec.retries,
            write_targets=write_targets(spec),
            producer_limits=ProducerLimits(**_whole(spec.limits)) if producing else ProducerLimits(),
            consumer_limits=ConsumerLimits() if producing else ConsumerLimits(**_whole(spec.limits)),
        )

    def _make(self) -> Transport:
        spec = self.spec
        engine: Transport = CmaTransport() if spec.transport == "cma" else MooncakeTransport(spec.host)
        return FaultyTransport(engine, self.misdeeds)

    def take(self, transfer: str, tokens: int, salt: int) -> tuple[Ticket, Table]:
        """Blocks for a request."""
        ticket = Ticket(next(self._tickets))
        blocks = self.pool.take(tokens)
        self.held[ticket] = Held(transfer, tokens, salt, blocks)
        return ticket, Table(0, tuple(blocks))

    def give_back(self, ticket: int, value: int) -> None:
        """Its blocks are quiet."""
        held = self.held.pop(ticket)
        self.pool.give_back(held.blocks, value)
        say("quiet", transfer=held.transfer)

    def tables_of(self, held: Held) -> Tables:
        """As the marked memory takes them."""
        return Tables(0, held.tokens, (BlockTable.of(held.blocks, first_token=0),), held.salt)

    def counted(self) -> dict[str, int]:
        """What the runtime has counted beside transfers so far."""
        return {}

    def audit(self, untouched: int) -> dict[str, Any]:
        """What this side can say about losses."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "total": self.pool.total,
            "free": self.pool.free,
            "held": sorted(held.transfer for held in self.held.values()),
            "stray": self.pool.strays(untouched),
            "wrong": self.counts.wrong,
            "fates": self.counts.fates,
            "counts": self.counted(),
            "threads": int(status["Threads"]),
            "fds": len(os.listdir("/proc/self/fd")),
            "rss": int(status["VmRSS"].split()[0]) * 1024,
        }


class ProducerSide(SideProcess):
    """Publishes."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.pool.give_back(self.pool.take(self.pool.total * spec.block_tokens), SPOILT)
        self.runtime = ProducerRuntime(self.local, self.options())
        self._counts: Counter[str] = Counter()

    def counted(self) -> dict[str, int]:
        """Engines renewed, and what else is only counted."""
        self._counts.update(self.runtime.take_interval().counts)
        return {str(name): count for name, count in self._counts.items()}

    def do(self, command: dict[str, Any]) -> None:
        """One command."""
        match command:
            case {"do": "expect", "transfer": transfer}:
                self.runtime.expect(TransferId(transfer))
            case {"do": "publish", "transfer": transfer, "tokens": tokens, "salt": salt}:
                ticket, table = self.take(transfer, tokens, salt)
                self.pool.memory.fill(self.tables_of(self.held[ticket]))
                request = RequestId(f"p-{transfer}")
                self.runtime.publish(Publication(ticket, request, TransferId(transfer), tokens, (table,)))
            case {"do": "withdraw", "transfer": transfer}:
                self.runtime.withdraw(TransferId(transfer))
            case {"do": "late"}:
                self.misdeeds.write_late()
            case {"do": "misdeed", "name": name, "args": args}:
                self.misdeeds.plan(misdeed(name, args))
            case {"do": "address"}:
                say("address", address=self.runtime.address)
            case _:
                raise RuntimeError(f"unknown command {command}")

    def look(self) -> None:
        """Take out what the runtime has to tell."""
        for ticket in self.runtime.take_quiet():
            self.give_back(ticket, SPOILT)


class ConsumerSide(SideProcess):
    """Fetches."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.runtime = ConsumerRuntime(self.local, self.options())
        self._tickets_of: dict[str, Ticket] = {}
        self._counts: Counter[str] = Counter()

    def do(self, command: dict[str, Any]) -> None:
        """One command."""
        match command:
            case {"do": "fetch", "transfer": transfer, "tokens": tokens, "salt": salt, "source": [engine, url]}:
                ticket, table = self.take(transfer, tokens, salt)
                self._tickets_of[transfer] = ticket
                source = Source(EngineId(engine), url)
                request = RequestId(f"d{ticket}-{transfer}")
                others = tuple(
                    Alternative(TransferId(name), Source(EngineId(engine), url))
                    for name, engine, url in command.get("others", ())
                )
                span = Span(0, tokens)
                self.runtime.fetch(
                    Fetch(ticket, request, TransferId(transfer), source, span, (table,), alternatives=others)
                )
            case {"do": "cancel", "transfer": transfer}:
                if transfer in self._tickets_of:  # else its end and this command have crossed
                    self.runtime.cancel(self._tickets_of[transfer])
            case {"do": "release", "transfer": transfer, "source": [engine, url]}:
                source = Source(EngineId(engine), url)
                self.runtime.release(TransferId(transfer), RequestId(f"r-{transfer}"), source)
            case _:
                raise RuntimeError(f"unknown command {command}")

    def counted(self) -> dict[str, int]:
        """Pages compared, mismatches, retries."""
        self._counts.update(self.runtime.take_interval().counts)
        return {str(name): count for name, count in self._counts.items()}

    def look(self) -> None:
        """Take out what the runtime has to tell; see what has begun to land."""
        for held in self.held.values() if self.spec.large else ():
            if not held.began and self.pool.touched(held.blocks):
                held.began = True
                say("began", transfer=held.transfer)
        quiet = self.runtime.take_quiet()  # first: the ends of these tickets are then in the other queue for sure
        for end in self.runtime.take_ended():
            self._ended(end.ticket, end.outcome.fate, str(end.outcome.reason or ""), end.outcome.detail)
        for ticket in quiet:
            self._tickets_of.pop(self.held[ticket].transfer, None)
            self.give_back(ticket, UNTOUCHED)

    def _ended(self, ticket: int, fate: Fate, reason: str, detail: str) -> None:
        held, at = self.held[ticket], time.monotonic()
        self.counts.fates[fate.value] = self.counts.fates.get(fate.value, 0) + 1
        if fate is Fate.DONE:
            wrong, _ = self.pool.memory.check(self.tables_of(held))
            self.counts.wrong += sum(one.wrong for one in wrong)
        say("ended", at=at, transfer=held.transfer, fate=fate.value, reason=reason, detail=detail)


def say(event: str, **more: object) -> None:
    """One line for the driver."""
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic()} | more) + "\n")
    sys.stdout.flush()


def use_in_fork(side: ProducerSide | ConsumerSide) -> None:
    """A child made by fork tries to use what it inherited; it must be refused, and the parent must go on."""
    engine = side.options().make_transport()
    child = os.fork()
    if child == 0:
        try:
            engine.address()
        except FerryError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    engine.close()
    say("forked", refused=os.waitstatus_to_exitcode(status) == 0)


def use_after_close(side: ProducerSide | ConsumerSide) -> None:
    """An engine that was closed refuses by name, and a second close is nothing."""
    engine = side.options().make_transport()
    engine.close()
    engine.close()
    try:
        engine.address()
        refused = False
    except FerryError:
        refused = True
    say("after-close", refused=refused)


def main(text: str) -> None:
    """Run one side until its input ends or it is told to close."""
    spec = msgspec.json.decode(text, type=Spec)
    if spec.version is not None:
        speak(spec.version)
    side: ProducerSide | ConsumerSide = ProducerSide(spec) if spec.role == "producer" else ConsumerSide(spec)
    untouched = SPOILT if spec.role == "producer" else UNTOUCHED
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    say("ready")
    while True:
        side.look()
        try:
            line = lines.get(timeout=0.002)
        except queue.Empty:
            continue
        command = json.loads(line) if line else {"do": "close"}
        match command["do"]:
            case "close":
                break
            case "audit":
                say("audit", **side.audit(untouched))
            case "fork":
                use_in_fork(side)
            case "use-after-close":
                use_after_close(side)
            case _:
                side.do(command)
    side.runtime.close()
    side.look()
    say("closed", **side.audit(untouched))


def _read(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")


def _whole(limits: Mapping[str, float]) -> dict[str, Any]:
    return {name: int(value) if name in _COUNTS else value for name, value in limits.items()}


_COUNTS: Final = frozenset(
    {"leases", "pulls", "strangers", "strangers_per_peer", "pullers", "remembered", "fetches", "quarantined_blocks"}
)


if __name__ == "__main__":
    main(sys.argv[1])
