"""Every state that the joined machines can reach in a small world, breadth first, with nothing left to chance.

The world is :class:`kvferry.testing.joined.Joined` with few ranks and requests and a *budget* of bad luck: how many
crashes, lost or repeated messages, lies of an engine, aborts, and timers that fire before what is under way arrives.
Within it every order of everything is tried. After each step the promises of ``joined`` and the machines' own
invariants are checked; where nothing can happen any more, everything must have ended and be given back.

States are compared by a form that knows no absolute time and no serial number: numbers are derived from what they
number, so that two orders which lead to the same state lead to equal forms. Only hashes of the forms are kept (64
bits: of a million states two differ with equal hashes with probability 3e-8).

What the model leaves out: keep-alives (they carry no word), and producers that are published to again after a crash.
"""

import argparse
import pickle
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import (
    Consumer,
    ConsumerLimits,
    FetchAborted,
    FetchRequested,
    Producer,
    ProducerLimits,
    Published,
    SendPull,
    Source,
    Story,
    Table,
    Ticket,
    WriteFailed,
)
from kvferry.protocol.consumer_records import Fetch, FetchPull, ProducerRecord
from kvferry.protocol.coverage import Coverage
from kvferry.protocol.producer_records import Lease, PullRecord, Write
from kvferry.testing.joined import SPAN, ConsumerRank, Joined, Message, Moving, ProducerRank

FAR = 1e6
"""Timers further away than this do not fire in the model."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may go wrong on one path."""

    crashes: int = 0
    """The producing engine dies and comes back with another epoch."""
    losses: int = 0
    repeats: int = 0
    lies: int = 0
    """Writes that fail and go on."""
    failures: int = 0
    """Writes that fail and are over."""
    aborts: int = 0
    cuts: int = 0
    """Connections that break."""
    hurries: int = 0
    """Deadlines that pass while something is under way."""


Step = tuple[str, tuple[object, ...]]


class SmallWorld(Joined):
    """A joined world whose numbers follow from what they number."""

    def __init__(self, *, producers: int, requests: int, budget: Budget) -> None:
        super().__init__(producers, 1)
        self.budget = budget
        self.transfers = [TransferId(f"t{index}") for index in range(requests)]
        self.producers = [ProducerRank(_producer()) for _ in range(producers)]
        limits = ConsumerLimits(silence=2 * FAR, quarantined_blocks=64)
        self.consumers = [ConsumerRank(Consumer(limits, _no_story()))]
        self.unpublished = {(transfer, rank) for transfer in self.transfers for rank in range(producers)}
        self.unasked = list(self.transfers)
        self._numbered: Counter[str] = Counter()
        self._what = ""
        self._numbers = self  # type: ignore[assignment]

    def __next__(self) -> int:
        self._numbered[self._what] += 1
        text = f"{self._what}#{self._numbered[self._what]}"
        return int.from_bytes(blake2b(text.encode(), digest_size=3).digest(), "big")

    # -- what may happen, and doing it -----------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Everything that can happen now."""
        yield from self._engine_steps()
        yield from self._network_steps()
        for index, _ in enumerate(self.consumers[0].fences):
            yield "fence", (index,)
        budget = self.budget
        if budget.crashes:
            yield "crash", ()
        if budget.aborts:
            for ticket in sorted(self.consumers[0].fetched - set(self.consumers[0].ended)):
                yield "abort", (ticket,)
        if budget.cuts:
            for rank in range(len(self.producers)):
                yield "break", (rank,)

    def _engine_steps(self) -> Iterator[Step]:
        if not self.producers[0].life:
            for transfer, rank in sorted(self.unpublished):
                yield "publish_at", (transfer, rank)
        if self.unasked:
            # The requests are alike: which of them is asked for first is only a name.
            yield "ask", (self.unasked[0],)
        for rank, producer in enumerate(self.producers):
            for write, moving in sorted(producer.writes.items(), key=str):
                yield "finish", (rank, write)
                if self.budget.lies and not moving.told:
                    yield "lie", (rank, write)
                if self.budget.failures and not moving.told:
                    yield "fail", (rank, write)
            if producer.proofs:
                yield "prove", (rank,)

    def _network_steps(self) -> Iterator[Step]:
        seen: set[Message] = set()
        for index, message in enumerate(self.network):
            if message in seen:
                continue
            seen.add(message)
            yield "arrive", (index,)
            if self.budget.losses:
                yield "lose", (index,)
            if self.budget.repeats:
                yield "arrive_twice", (index,)

    def due(self) -> bool:
        """Whether a deadline can pass."""
        deadline = self._next_deadline()
        return deadline is not None and deadline < self.now + FAR

    def spend(self, what: str) -> None:
        """Use up one piece of bad luck."""
        self.budget = replace(self.budget, **{what: getattr(self.budget, what) - 1})

    def do(self, step: Step) -> None:
        """One step."""
        getattr(self, step[0])(*step[1])

    def publish_at(self, transfer: TransferId, rank: int) -> None:
        """A prompt is computed."""
        self.unpublished.discard((transfer, rank))
        ticket = Ticket(1000 + 10 * self.transfers.index(transfer) + rank)
        self.producers[rank].published.add(ticket)
        self.tell_producer(rank, Published(transfer, ticket, SPAN, (Table(0, (int(ticket),)),), self.now + 30))

    def ask(self, transfer: TransferId) -> None:
        """A fetch, whose producer is found at once."""
        self.unasked.remove(transfer)
        ticket = Ticket(1 + self.transfers.index(transfer))
        consumer = self.consumers[0]
        consumer.fetched.add(ticket)
        consumer.tickets.setdefault(transfer, ticket)
        source, request = Source(EngineId("P"), "http://p"), RequestId(f"d-{ticket}")
        asked = FetchRequested(transfer, request, ticket, source, SPAN, groups=1, deadline=self.now + 20, blocks=1)
        self.tell_consumer(0, asked)
        self._resolve_all()

    def _resolve_all(self) -> None:
        for transfer in sorted(self.consumers[0].asked):
            self.resolve(0, transfer)

    def abort(self, ticket: Ticket) -> None:
        """The request is gone."""
        self.spend("aborts")
        self.tell_consumer(0, FetchAborted(ticket))
        self._resolve_all()

    def arrive(self, index: int) -> None:
        """A message arrives."""
        self.deliver(index)

    def arrive_twice(self, index: int) -> None:
        """A message arrives and will once more."""
        self.spend("repeats")
        self.deliver(index, keep=True)

    def lose(self, index: int) -> None:
        """A message is lost."""
        self.spend("losses")
        del self.network[index]

    def finish(self, rank: int, write: Any) -> None:
        """All bytes have moved."""
        self.end_write(rank, write)

    def lie(self, rank: int, write: Any) -> None:
        """The engine says that it failed, and goes on."""
        self.spend("lies")
        self.fail_write(rank, write, quiet=False)

    def fail(self, rank: int, write: Any) -> None:
        """The engine fails and stops."""
        self.spend("failures")
        producer = self.producers[rank]
        producer.writes.pop(write)
        self.tell_producer(rank, WriteFailed(write, ProtocolReason.TRANSPORT_FAILED, True))

    def fence(self, index: int) -> None:  # type: ignore[override]
        """The consumer's receive engine is destroyed."""
        super().fence(0, index, works=True)

    def crash(self) -> None:
        """The producing engine dies and comes back."""
        self.spend("crashes")
        life = self.producers[0].life + 1
        self.restart_producers()
        self.producers = [ProducerRank(_producer(), life) for _ in self.producers]

    def break_(self, rank: int) -> None:
        """A connection breaks."""
        self.spend("cuts")
        self.cut(rank, 0)

    def hurry(self) -> None:
        """A deadline passes while something is under way."""
        self.spend("hurries")
        self.wait()

    def wait(self) -> None:
        """Nothing happens until the next deadline."""
        deadline = self._next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        self._tick()
        self._resolve_all()

    # -- numbers that follow from what they number -----------------------------------------------------------

    def _send_pull(self, rank: int, action: SendPull) -> None:
        self._what = f"pull {action.key.transfer} {action.key.rank}"
        super()._send_pull(rank, action)

    def _arrive_at_producer(self, message: Message) -> None:
        self._what = f"arrival {message.producer} {message.life} {message.frame.hex()}"
        super()._arrive_at_producer(message)

    def form(self) -> int:
        """A hash of the state, without absolute times and histories."""
        sides = [_form_of(one.machine, self.now) for one in self.producers]
        sides += [_form_of(one.machine, self.now) for one in self.consumers]
        outside = [
            _frozen((tuple(one.pulls), one.writes, one.proofs, one.ended, one.released), self.now)
            for one in self.producers
        ]
        consumer = self.consumers[0]
        more = (consumer.pulls, consumer.fences, consumer.generations, consumer.ended, consumer.released)
        network = frozenset(Counter(self.network).items())
        numbered = frozenset(self._numbered.items())
        left = (frozenset(self.unpublished), tuple(self.unasked), self.budget, self.producers[0].life)
        return hash((tuple(sides), tuple(outside), _frozen(more, self.now), network, numbered, left))

    def check_end(self) -> None:
        """Where nothing can happen any more, everything has ended and is given back."""
        for producer in self.producers:
            assert set(producer.ended) == producer.published == set(producer.released), "a lease did not end"
            assert not producer.pulls, "a pull was not answered"
            assert not producer.machine.held, "blocks are held for ever"
        consumer = self.consumers[0]
        assert set(consumer.ended) == consumer.fetched == set(consumer.released), "a fetch did not end"
        assert not consumer.machine.held, "blocks are held for ever"


def _no_story() -> Story:
    return Story(transfers=1, entries=1)


def _producer() -> Producer:
    limits = ProducerLimits(keep_alive=2 * FAR, write_timeout=12.0, stranger_wait=15.0)
    return Producer(limits, _no_story())


_LEASES = {Lease: "deadline", Fetch: "deadline", ProducerRecord: "doubt_since"}
"""Records that say a time, and where."""


def _form_of(machine: Producer | Consumer, now: float) -> object:
    timers = sorted(
        (when - now, serial, key) for key, (when, serial) in machine._timers._live.items() if when < now + FAR
    )
    due = tuple((round(when, 3), key) for when, _, key in timers)
    if isinstance(machine, Producer):
        inside: tuple[object, ...] = (machine._leases, machine._pulls, machine._writes, machine._remembered)
    else:
        inside = (machine._fetches, machine._producers, machine._quarantined)
    return due, _frozen(inside, now)


def _frozen(value: Any, now: float) -> object:
    """Nested tuples; equal for records that behave alike. Frozen records stand for themselves."""
    match value:
        case dict():
            return tuple((key, _frozen(one, now)) for key, one in value.items())
        case set():
            return frozenset(value)
        case list() | tuple() | deque():
            return tuple(_frozen(one, now) for one in value)
        case Lease() | Fetch() | ProducerRecord() | Write() | FetchPull() | PullRecord() | Moving():
            clock = _LEASES.get(type(value), "")
            return tuple(
                _since(getattr(value, name), now) if name == clock else _frozen(getattr(value, name), now)
                for name in type(value).__slots__
            )
        case Coverage():
            return (value._epoch, tuple(map(tuple, value._ranges)), tuple(value._seen))
        case _:
            return value


def _since(when: float | None, now: float) -> float | None:
    return None if when is None else round(when - now, 3)


@dataclass(frozen=True, slots=True)
class Explored:
    """What an exploration came to."""

    states: int
    steps: int
    ends: int
    """States in which nothing can happen any more."""
    depth: int
    whole: bool
    """Nothing was left out."""
    seconds: float


class PromiseBrokenError(AssertionError):
    """A promise does not hold; the message has the steps that lead there."""


def explore(
    world: SmallWorld, *, limit: int = 10_000_000, seconds: float = 1e9, tell: Callable[[str], object] = lambda _: None
) -> Explored:
    """Visit every reachable state, at most ``limit`` of them, for at most so long."""
    began = time.monotonic()
    first = world.form()
    came: dict[int, tuple[int, Step] | None] = {first: None}
    queue: deque[tuple[int, int, bytes]] = deque([(first, 0, pickle.dumps(world, -1))])
    steps = ends = depth = 0
    whole = True
    while queue:
        if len(came) >= limit or time.monotonic() - began > seconds:
            whole = False
            break
        here, depth, packed = queue.popleft()
        possible = _possible(pickle.loads(packed))
        if not possible:
            ends += 1
            _checked(came, here, None, pickle.loads(packed).check_end)
        for step in possible:
            after: SmallWorld = pickle.loads(packed)
            steps += 1
            _checked(came, here, step, partial(after.do, step))
            form = after.form()
            if form not in came:
                came[form] = (here, step)
                queue.append((form, depth + 1, pickle.dumps(after, -1)))
                if len(came) % 20_000 == 0:
                    tell(f"{len(came):,} states, depth {depth}, {time.monotonic() - began:.0f} s")
    return Explored(len(came), steps, ends, depth, whole, time.monotonic() - began)


def _possible(world: SmallWorld) -> list[Step]:
    found = [(name + "_" if name == "break" else name, more) for name, more in world.steps()]
    if world.due():
        if not found or _only_bad_luck(found):
            found.append(("wait", ()))
        elif world.budget.hurries:
            found.append(("hurry", ()))
    elif _only_bad_luck(found):
        return []
    return found


def _only_bad_luck(found: list[Step]) -> bool:
    """Nothing is under way: what may still happen is bad luck, and need not."""
    return all(name in ("crash", "abort", "break_") for name, _ in found)


def _checked(came: dict[int, tuple[int, Step] | None], here: int, step: Step | None, act: Callable[[], None]) -> None:
    try:
        act()
    except AssertionError as error:
        path: list[Step] = [] if step is None else [step]
        while (origin := came[here]) is not None:
            here = origin[0]
            path.append(origin[1])
        said = "\n".join(f"  {name}{more}" for name, more in reversed(path))
        raise PromiseBrokenError(f"{error}, after:\n{said}") from error


WORLDS: dict[str, tuple[int, int, Budget]] = {
    "one request, one crash, one lie": (2, 1, Budget(crashes=1, lies=1)),
    "one request, one lost and one repeated message": (2, 1, Budget(losses=1, repeats=1)),
    "one request, one abort and one broken connection": (2, 1, Budget(aborts=1, cuts=1)),
    "one request, one hurry and one failure": (2, 1, Budget(hurries=1, failures=1)),
    "one producer, two requests, one crash": (1, 2, Budget(crashes=1)),
    "two requests, one crash": (2, 2, Budget(crashes=1)),
    "two requests, one crash and one loss": (2, 2, Budget(crashes=1, losses=1)),
    "one request, every kind of bad luck": (2, 1, Budget(1, 1, 1, 1, 0, 1, 0, 1)),
}
"""Producer ranks, requests, bad luck."""


def small_world(name: str) -> SmallWorld:
    """One of the worlds, at its beginning."""
    producers, requests, budget = WORLDS[name]
    return SmallWorld(producers=producers, requests=requests, budget=budget)


def main() -> int:
    parser = argparse.ArgumentParser(description="Explore small worlds of the protocol exhaustively.")
    parser.add_argument("--only", default="", help="worlds whose name contains this")
    parser.add_argument("--limit", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="for each world")
    chosen = parser.parse_args()
    complete = True
    for name in [one for one in WORLDS if chosen.only in one]:
        found = explore(
            small_world(name),
            limit=chosen.limit,
            seconds=chosen.seconds,
            tell=lambda line: sys.stderr.write(line + "\n"),
        )
        complete &= found.whole
        said = "all of them" if found.whole else "not all: cut off"
        sys.stdout.write(
            f"{name}: {found.states:,} states ({said}), {found.steps:,} steps, {found.ends} ends, "
            f"depth {found.depth}, {found.seconds:.0f} s\n"
        )
    return 0 if complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
