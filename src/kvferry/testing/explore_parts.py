"""One machine of a small world, alone: every state that it can be in, numbered, and what each stimulus makes of it.

The joined machines share nothing but messages. So a world is a tuple of the states of its parts and the bag of messages
under way, and what a part does on a stimulus depends on its own state alone. Each such reaction is worked out once, on
the real machine under its real driver (:class:`kvferry.testing.joined.Joined`, in which the other parts are dummies),
and remembered; the search over worlds (:mod:`kvferry.testing.explore`) then only looks reactions up.

States are equal when their *forms* are: nested tuples of all records, with times relative to now and without histories.
Forms are compared in full, not by hash. Records are compared as sets: in which order they were made decides only the
order of the actions of one step, and the network is a bag. Timers further away than ``FAR`` never fire in a model.
"""

import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.protocol import (
    Consumer,
    ConsumerLimits,
    ConsumerLost,
    ConsumerTick,
    FetchAborted,
    FetchRequested,
    Producer,
    ProducerLimits,
    ProducerLost,
    ProducerTick,
    Published,
    SendPull,
    Source,
    StartWrite,
    Story,
    Table,
    Ticket,
    WriteFailed,
    WriteId,
)
from kvferry.protocol.consumer_records import Fetch, FetchPull, ProducerRecord
from kvferry.protocol.coverage import Coverage
from kvferry.protocol.producer_records import Lease, PullRecord, Write
from kvferry.testing.joined import SPAN, ConsumerRank, Joined, Message, Moving, ProducerRank

FAR: Final = 1e6
Stimulus = tuple[object, ...]
"""The name of a method of a part that plays a driver, and its arguments."""


def new_producer() -> Producer:
    """A producer's machine with times that fire in a model, and without a story."""
    limits = ProducerLimits(keep_alive=2 * FAR, write_timeout=12.0, stranger_wait=15.0)
    return Producer(limits, Story(transfers=1, entries=1))


def new_consumer() -> Consumer:
    """The same of a consumer."""
    return Consumer(ConsumerLimits(silence=2 * FAR, quarantined_blocks=64), Story(transfers=1, entries=1))


def number_of(what: str, count: int) -> int:
    """The number of the ``count``-th of its kind."""
    return int.from_bytes(blake2b(f"{what}#{count}".encode(), digest_size=5).digest(), "big")


class _Part(Joined):
    """A world in which one part is real. What it sends lies in ``network`` afterwards."""

    def __init__(self, producers: list[ProducerRank], consumer: ConsumerRank) -> None:
        super().__init__(0, 0)
        self.producers, self.consumers = producers, [consumer]
        self.started: list[Moving] = []
        self.freed: list[Ticket] = []
        self._numbered: Counter[str] = Counter()
        self._what = ""
        self._numbers = self  # type: ignore[assignment]

    def __next__(self) -> int:
        """A number that follows from what it numbers, so that two orders which lead to one state give equal numbers."""
        self._numbered[self._what] += 1
        return number_of(self._what, self._numbered[self._what])

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def form(self) -> object:
        """What tells this state from others."""
        raise NotImplementedError

    def relative_deadline(self) -> float | None:
        """When something is due, from now."""
        due = self._next_deadline()
        return None if due is None or due >= self.now + FAR else round(due - self.now, 3)


class ProducerPart(_Part):
    """One producer rank."""

    def __init__(self, rank: int, ranks: int, life: int) -> None:
        dummy = ProducerRank(new_producer(), life)
        ranked = [dummy] * ranks
        ranked[rank] = self.me = ProducerRank(new_producer(), life)
        super().__init__(ranked, ConsumerRank(new_consumer()))
        self.rank = rank

    def publish_ticket(self, transfer: TransferId, ticket: Ticket) -> None:
        """A prompt is computed."""
        self.me.published.add(ticket)
        self.tell_producer(self.rank, Published(transfer, ticket, SPAN, (Table(0, (int(ticket),)),), self.now + 30))

    def arrive(self, message: Message) -> None:
        """A message arrives."""
        self._what = message.frame.hex()
        self._arrive_at_producer(message)

    def finish(self, write: WriteId) -> None:
        """All bytes have moved."""
        self.end_write(self.rank, write)

    def lie(self, write: WriteId) -> None:
        """The engine says that it failed, and goes on."""
        self.fail_write(self.rank, write, quiet=False)

    def fail(self, write: WriteId) -> None:
        """The engine fails and stops."""
        self.me.writes.pop(write)
        self.tell_producer(self.rank, WriteFailed(write, ProtocolReason.TRANSPORT_FAILED, True))

    def be_proven(self) -> None:
        """The engine is destroyed."""
        self.prove(self.rank)

    def be_proven_to_read_nothing(self) -> None:
        """The engine is destroyed, and what had left it may still land."""
        self.prove(self.rank, landing=True)

    def lose(self) -> None:
        """The connection is gone."""
        self.tell_producer(self.rank, ConsumerLost(tuple(self.me.came_from)))

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self.tell_producer(self.rank, ProducerTick())

    def engine_steps(self) -> Iterator[tuple[str, Stimulus]]:
        """What its engine may do now: whose bad luck that is, and the stimulus."""
        for write, moving in sorted(self.me.writes.items(), key=str):
            yield "", ("finish", write)
            if not moving.told:
                yield "lies", ("lie", write)
                yield "failures", ("fail", write)
        if self.me.proofs:
            yield "", ("be_proven",)
            yield "landings", ("be_proven_to_read_nothing",)

    def form(self) -> object:
        me, machine = self.me, self.me.machine
        ended = (machine._leases.over.known, machine._pulls.turned_away.known)
        inside = (machine._leases.known, machine._writes.pulls, machine._writes.known, *ended)
        outside = (set(me.pulls), me.writes, me.proofs, me.ended, me.released, me.published, self._numbered)
        return self.rank, me.life, _due(machine, self.now), _frozen(inside, self.now), _frozen(outside, self.now)

    @property
    def at_peace(self) -> bool:
        """Everything has ended and is given back."""
        me = self.me
        whole = set(me.ended) == me.published == set(me.released)
        return whole and not me.pulls and not me.machine.held

    def _moving(self, rank: int, action: StartWrite, pull: Any) -> Moving:
        moving = super()._moving(rank, action, pull)
        self.started.append(moving)
        return moving


class ConsumerPart(_Part):
    """The consumer rank, and which life of the producers it knows."""

    def __init__(self, ranks: int, make: Callable[[], Consumer] = new_consumer) -> None:
        super().__init__([ProducerRank(new_producer())] * ranks, ConsumerRank(make()))
        self.me = self.consumers[0]

    def ask(self, transfer: TransferId, ticket: Ticket) -> None:
        """A fetch, whose producer is found at once."""
        self.me.fetched.add(ticket)
        self.me.tickets.setdefault(transfer, ticket)
        source, request = Source(EngineId("P"), "http://p"), RequestId(f"d-{ticket}")
        asked = FetchRequested(transfer, request, ticket, source, SPAN, groups=1, deadline=self.now + 20, blocks=1)
        self.tell_consumer(0, asked)

    def abort(self, ticket: Ticket) -> None:
        """The request is gone."""
        self.tell_consumer(0, FetchAborted(ticket))

    def arrive(self, message: Message) -> None:
        """A message arrives."""
        self._arrive_at_consumer(message)

    def be_fenced(self, index: int) -> None:
        """The receive engine is destroyed."""
        self.fence(0, index, works=True)

    def fence_in_vain(self, index: int) -> None:
        """The fence proves nothing: the writer lives and cannot be reached."""
        self.fence(0, index, works=False)

    def notice(self) -> None:
        """The consumer hears that the producers that it knew are gone, and that there are new ones."""
        old = self.producer_life()
        self.producers[0].life += 1  # all of them: the dummies are one
        self.tell_consumer(0, ProducerLost(old, ProtocolReason.STALE_INCARNATION))

    def lose(self) -> None:
        """A connection is gone."""
        self.tell_consumer(0, ProducerLost(self.producer_life()))

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self.tell_consumer(0, ConsumerTick())

    def resolve_all(self) -> None:
        """Producers are found at once."""
        for transfer in sorted(self.me.asked):
            self.resolve(0, transfer)

    def form(self) -> object:
        me, machine = self.me, self.me.machine
        inside = (machine._fetches.known, machine._pulls.producers, machine._fetches.quarantined)
        outside = (me.pulls, me.fences, me.generations, me.ended, me.released, me.fetched, self._numbered)
        return self.producers[0].life, _due(machine, self.now), _frozen(inside, self.now), _frozen(outside, self.now)

    @property
    def at_peace(self) -> bool:
        """Everything has ended and is given back."""
        me = self.me
        return set(me.ended) == me.fetched == set(me.released) and not me.machine.held

    def _landing(self, consumer: int, ticket: Ticket) -> bool:
        self.freed.append(ticket)  # whether a write lands there is for the search to see
        return False

    def _send_pull(self, rank: int, action: SendPull) -> None:
        self._what = f"pull {action.key.transfer} {action.key.rank}"
        super()._send_pull(rank, action)


Part = ProducerPart | ConsumerPart


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a stimulus made of a part."""

    after: int
    sent: tuple[Message, ...]
    started: tuple[Moving, ...]
    freed: tuple[Ticket, ...]
    left: tuple[Moving, ...] = ()
    """Writes whose engine is gone, of which bytes may still land."""
    broken: str | None = None
    """A promise that did not hold."""


@dataclass(slots=True)
class Local:
    """One state of one part: what the search needs to know of it, and the part itself, packed."""

    packed: bytes
    deadline: float | None
    at_peace: bool
    steps: tuple[tuple[str, Stimulus], ...] = ()
    moving: tuple[Moving, ...] = ()
    """Of a producer: writes whose bytes may be landing."""
    fences: int = 0
    abortable: tuple[Ticket, ...] = ()
    given_back: frozenset[Ticket] = frozenset()
    generations: dict[Incarnation, int] = field(default_factory=dict)
    """Of a consumer: of the engines that receive, by the life that they receive from; 0 where there is none yet."""
    reactions: dict[Stimulus, Reaction] = field(default_factory=dict)


class Parts:
    """All states of all parts that were met, by number."""

    def __init__(self) -> None:
        self.locals: list[Local] = []
        self._numbers: dict[object, int] = {}

    def number(self, part: Part) -> int:
        """The number of a part's state."""
        form = (type(part).__name__, part.form())
        number = self._numbers.get(form)
        if number is None:
            number = self._numbers[form] = len(self.locals)
            self.locals.append(_local(part))
        return number

    def react(self, number: int, stimulus: Stimulus) -> Reaction:
        """What comes of a stimulus."""
        reactions = self.locals[number].reactions
        found = reactions.get(stimulus)
        if found is None:
            found = reactions[stimulus] = self._work_out(number, stimulus)
        return found

    def _work_out(self, number: int, stimulus: Stimulus) -> Reaction:
        part: Part = pickle.loads(self.locals[number].packed)
        name, *arguments = stimulus
        try:
            getattr(part, str(name))(*arguments)
            if isinstance(part, ConsumerPart):
                part.resolve_all()
        except AssertionError as error:
            return Reaction(number, (), (), (), broken=str(error) or "a promise is broken")
        sent, started, freed, left = tuple(part.network), tuple(part.started), tuple(part.freed), tuple(part.left)
        for done in (part.network, part.started, part.freed, part.left):
            done.clear()
        return Reaction(self.number(part), sent, started, freed, left)


def _local(part: Part) -> Local:
    local = Local(pickle.dumps(part, -1), part.relative_deadline(), part.at_peace)
    if isinstance(part, ProducerPart):
        local.steps = tuple(part.engine_steps())
        local.moving = tuple(part.me.writes.values())
    else:
        local.fences = len(part.me.fences)
        local.abortable = tuple(sorted(part.me.fetched - set(part.me.ended)))
        local.given_back = frozenset(part.me.released)
        local.generations = dict(part.me.generations)
    return local


_CLOCKS: Final = {
    Lease: ("deadline", "kept_until"),
    Fetch: ("deadline",),
    ProducerRecord: ("doubt_since",),
}
"""Records that say a time, and where."""


def _due(machine: Producer | Consumer, now: float) -> object:
    live = machine._timers._live.items()
    return frozenset((round(when - now, 3), key) for key, (when, _) in live if when < now + FAR)


def _frozen(value: Any, now: float) -> object:
    """Equal for records that behave alike. Frozen records stand for themselves."""
    match value:
        case dict():
            return frozenset((key, _frozen(one, now)) for key, one in value.items())
        case set():
            return frozenset(value)
        case list() | tuple() | deque():
            return tuple(_frozen(one, now) for one in value)
        case Lease() | Fetch() | ProducerRecord() | Write() | FetchPull() | PullRecord() | Moving():
            clocks = _CLOCKS.get(type(value), ())
            return tuple(
                _since(getattr(value, name), now) if name in clocks else _frozen(getattr(value, name), now)
                for name in type(value).__slots__
            )
        case Coverage():
            return (value._epoch, tuple(map(tuple, value._ranges)), tuple(value._seen))
        case _:
            return value


def _since(when: float | None, now: float) -> float | None:
    return None if when is None else round(when - now, 3)
