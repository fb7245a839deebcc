"""Producer and consumer machines joined without sockets, engines or clocks, over a network that misbehaves.

:class:`Joined` plays the driver of every machine. Messages lie in a bag and go out in any order, twice or never;
writes end well, fail, fail and go on, or never end; fences and proofs are carried out late. Beside them it keeps
what no machine sees: which writes *really* move bytes. After each event it holds the machines to what they promise:
one report for each ticket, one release, none of either while a byte of the ticket's blocks may still move, no write
for a transfer that is over, one last answer for each pull.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.protocol import (
    VERSION,
    AbortNotice,
    Announced,
    Answer,
    CancelWrite,
    Consumer,
    ConsumerAction,
    ConsumerEvent,
    ConsumerLimits,
    ConsumerLost,
    ConsumerTick,
    DestinationReleased,
    FenceDone,
    FenceFailed,
    FenceProducer,
    FetchEnded,
    FetchRequested,
    ForgetProducer,
    ForgetPull,
    LeaseEnded,
    Note,
    PeerAborted,
    Producer,
    ProducerAction,
    ProducerEvent,
    ProducerLimits,
    ProducerLost,
    ProducerTick,
    ProveQuiet,
    Published,
    Pull,
    PullArrived,
    PullExtension,
    PullId,
    PullIgnored,
    PullKey,
    PullRefused,
    Quieted,
    Receiver,
    Reply,
    ReplyArrived,
    Resolve,
    SendAbort,
    SendPull,
    Side,
    Source,
    SourceReleased,
    SourceResolved,
    Span,
    StartWrite,
    Table,
    Target,
    Ticket,
    Wanted,
    WriteDone,
    WriteFailed,
    WriteId,
    decode_inbound,
    decode_reply,
    encode,
    make_pull,
    make_refusal,
    make_reply,
    puller_of,
    puller_of_side,
    render,
    requests_of,
)

SPAN = Span(0, 32)


@dataclass(frozen=True, slots=True)
class Message:
    """A frame under way between producer rank and consumer rank."""

    producer: int
    consumer: int
    life: int
    """The life of the producer that it was sent to or by."""

    to_producer: bool
    frame: bytes


@dataclass(slots=True)
class Moving:
    """A write whose bytes may really be landing."""

    source: Ticket
    destination: Ticket
    consumer: int
    generation: int
    """Of the consumer's receive engine; an older one is destroyed and nothing lands through it."""

    life: int = 0
    """Of the writer."""

    told: bool = False
    """The machine was told that it failed; it goes on all the same."""


@dataclass(slots=True)
class ProducerRank:
    """One producer rank with what its driver keeps."""

    machine: Producer
    life: int = 0
    pulls: dict[PullId, Pull] = field(default_factory=dict)
    came_from: dict[PullId, int] = field(default_factory=dict)
    writes: dict[WriteId, Moving] = field(default_factory=dict)
    proofs: list[tuple[WriteId, ...]] = field(default_factory=list)
    ended: Counter[Ticket] = field(default_factory=Counter)
    released: Counter[Ticket] = field(default_factory=Counter)
    published: set[Ticket] = field(default_factory=set)


@dataclass(slots=True)
class ConsumerRank:
    """One consumer rank with what its driver keeps."""

    machine: Consumer
    pulls: dict[PullKey, int] = field(default_factory=dict)
    tickets: dict[TransferId, Ticket] = field(default_factory=dict)
    asked: dict[TransferId, Source] = field(default_factory=dict)
    fences: list[Incarnation] = field(default_factory=list)
    generations: Counter[Incarnation] = field(default_factory=Counter)
    ended: Counter[Ticket] = field(default_factory=Counter)
    released: Counter[Ticket] = field(default_factory=Counter)
    fetched: set[Ticket] = field(default_factory=set)
    dead: bool = False
    outcomes: dict[Ticket, FetchEnded] = field(default_factory=dict)


class Joined:
    """``producers`` ranks of one engine and ``consumers`` ranks of another."""

    def __init__(self, producers: int, consumers: int) -> None:
        self.now = 0.0
        self.network: list[Message] = []
        self._numbers = itertools.count(1)
        self._blocks = itertools.count(1)
        self.left: list[Moving] = []
        """Writes whose engine is gone, of which bytes that had left it may still land."""
        self._lost_later: list[tuple[int, tuple[PullId, ...]]] = []
        """Losses that a producer finds out by answering; told when it is done with that."""
        self.producers = [ProducerRank(_producer()) for _ in range(producers)]
        self.consumers = [ConsumerRank(Consumer(ConsumerLimits(quarantined_blocks=64))) for _ in range(consumers)]

    # ------------------------------------------------------------------------------------------- what may happen

    def ticket(self) -> Ticket:
        """A ticket that was never used."""
        return Ticket(next(self._numbers))

    def announce(self, transfer: TransferId) -> None:
        for rank in range(len(self.producers)):
            self.tell_producer(rank, Announced(transfer, self.now + 300))

    def publish(self, transfer: TransferId, rank: int) -> None:
        ticket = self.ticket()
        self.producers[rank].published.add(ticket)
        table = Table(0, (next(self._blocks), next(self._blocks)))
        self.tell_producer(rank, Published(transfer, ticket, SPAN, (table,), self.now + 100))

    def fetch(self, transfer: TransferId, rank: int) -> Ticket:
        ticket = self.ticket()
        consumer = self.consumers[rank]
        consumer.fetched.add(ticket)
        consumer.tickets.setdefault(transfer, ticket)
        event = FetchRequested(
            transfer,
            RequestId(f"d-{ticket}"),
            ticket,
            Source(EngineId("P"), "http://p"),
            SPAN,
            groups=1,
            deadline=self.now + 60,
            blocks=2,
        )
        self.tell_consumer(rank, event)
        return ticket

    def resolve(self, rank: int, transfer: TransferId) -> None:
        """The driver of a consumer has found the producer."""
        del self.consumers[rank].asked[transfer]
        targets = tuple(Target(producer) for producer in range(len(self.producers)))
        self.tell_consumer(rank, SourceResolved(transfer, self.producer_life(), upstream=False, targets=targets))

    def producer_life(self) -> Incarnation:
        return life_of_producer(self.producers[0].life)

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """A message arrives; ``keep``: it will come once more."""
        message = self.network[index] if keep else self.network.pop(index)
        if message.life != self.producers[0].life:
            return  # its connection died with that life
        if message.to_producer:
            self._arrive_at_producer(message)
        else:
            self._arrive_at_consumer(message)

    def refuse(self, index: int) -> None:
        """The driver of a producer refuses the message at this place, where it is a pull of this life."""
        message = self.network.pop(index)
        inbound = decode_inbound(message.frame) if message.to_producer else None
        if not isinstance(inbound, Pull) or message.life != self.producers[0].life:
            return
        transfers = tuple(TransferId(transfer) for transfer, _ in inbound.req_blocks.values())
        if self.producers[message.producer].machine.serves(puller_of(inbound), transfers):
            return  # it repeats one that is not over
        side = Side("P", f"life{message.life}", message.producer)
        reply = make_refusal(ProtocolReason.PLAN_REFUSED, "refused", pull=inbound, producer=side)
        answer = Message(message.producer, message.consumer, message.life, to_producer=False, frame=encode(reply))
        if not self.consumers[message.consumer].dead:
            self.network.append(answer)
        self.tell_producer(message.producer, PullRefused(puller_of(inbound), transfers))

    def end_write(self, rank: int, write: WriteId) -> None:
        """All bytes of a write have moved; also after it was said to have failed."""
        self.producers[rank].writes.pop(write)
        self.tell_producer(rank, WriteDone(write))

    def fail_write(self, rank: int, write: WriteId, *, quiet: bool) -> None:
        """The engine says -1. Unless ``quiet``, it goes on writing."""
        if quiet:
            self.producers[rank].writes.pop(write)
        else:
            self.producers[rank].writes[write].told = True
        self.tell_producer(rank, WriteFailed(write, ProtocolReason.TRANSPORT_FAILED, quiet))

    def prove(self, rank: int, *, landing: bool = False) -> None:
        """A producer destroys its engine: its writes read nothing any more. ``landing``: what had left still lands."""
        producer = self.producers[rank]
        producer.proofs.clear()
        gone = tuple(producer.writes)
        self.left += producer.writes.values() if landing else ()
        producer.writes.clear()
        self.tell_producer(rank, Quieted(gone, landing=landing))

    def fence(self, rank: int, index: int, *, works: bool) -> None:
        """A consumer carries out a fence, or fails to."""
        consumer = self.consumers[rank]
        incarnation = consumer.fences.pop(index)
        if works:
            consumer.generations[incarnation] += 1
            self.tell_consumer(rank, FenceDone(incarnation))
        else:
            self.tell_consumer(rank, FenceFailed(incarnation))

    def cut(self, producer: int, consumer: int) -> None:
        """A connection breaks: what is under way on it is lost, and both sides notice."""
        self.network = [m for m in self.network if (m.producer, m.consumer) != (producer, consumer)]
        rank = self.producers[producer]
        pulls = tuple(pull for pull, came_from in rank.came_from.items() if came_from == consumer)
        self.tell_producer(producer, ConsumerLost(pulls))
        self.tell_consumer(consumer, ProducerLost(self.producer_life()))

    def kill_consumer(self, rank: int) -> None:
        """A consumer dies without a word: nothing comes from it or reaches it; sending to it tells so."""
        self.consumers[rank].dead = True
        self.network = [message for message in self.network if message.consumer != rank]
        self.consumers[rank].asked.clear()
        self.consumers[rank].fences.clear()

    def restart_producers(self) -> None:
        """The producing engine dies and comes back under its name, with another epoch; what had left it still lands."""
        old = self.producer_life()
        self.left += [moving for producer in self.producers for moving in producer.writes.values()]
        life = self.producers[0].life + 1
        self.producers = [ProducerRank(_producer(), life) for _ in self.producers]
        for rank in range(len(self.consumers)):
            self.tell_consumer(rank, ProducerLost(old, ProtocolReason.STALE_INCARNATION))

    def pass_time(self, seconds: float) -> None:
        """Time goes on, and every machine whose deadline comes is told so in time."""
        until = self.now + seconds
        while (due := self._next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self._tick()
        self.now = until

    def settle(self) -> None:
        """Nothing bad happens any more: everything must come to its end."""
        for _ in range(400):
            while self.network:
                self.deliver(0)
            for rank, consumer in enumerate(self.consumers):
                for transfer in list(consumer.asked):
                    self.resolve(rank, transfer)
                while consumer.fences:
                    self.fence(rank, 0, works=True)
            for rank, producer in enumerate(self.producers):
                if producer.proofs:
                    self.prove(rank)
                for write in list(producer.writes):
                    if not producer.writes[write].told:
                        self.end_write(rank, write)
            if self._next_deadline() is None:
                return
            self.pass_time(2.0)
        raise AssertionError(f"still alive after {self.now} s")

    # ------------------------------------------------------------------------------------------------- the drivers

    def tell_producer(self, rank: int, event: ProducerEvent) -> None:
        producer = self.producers[rank]
        actions = producer.machine.handle(event, self.now)
        producer.machine.check_invariants()
        for action in actions:
            self._do_producer(rank, action)
        while self._lost_later:
            by, lost = self._lost_later.pop()
            self.tell_producer(by, ConsumerLost(lost))

    def tell_consumer(self, rank: int, event: ConsumerEvent) -> None:
        consumer = self.consumers[rank]
        if consumer.dead:
            return
        actions = consumer.machine.handle(event, self.now)
        consumer.machine.check_invariants()
        for action in actions:
            self._do_consumer(rank, action)

    def _do_producer(self, rank: int, action: ProducerAction) -> None:
        producer = self.producers[rank]
        match action:
            case Answer():
                self._answer(rank, action)
            case PullIgnored():
                del producer.pulls[action.pull], producer.came_from[action.pull]
            case StartWrite():
                pull = producer.pulls[action.write.pull]
                moving = producer.writes[action.write] = self._moving(rank, action, pull)
                assert not producer.ended[moving.source], "a write begins after the end"
                given_back = self.consumers[moving.consumer].released[moving.destination]
                assert not (given_back and self._lands(moving)), "a write begins into blocks given back"
            case CancelWrite():
                assert action.write in producer.writes
            case ProveQuiet():
                assert set(action.writes) <= set(producer.machine.in_doubt)
                producer.proofs.append(action.writes)
            case LeaseEnded():
                assert action.ticket in producer.published
                producer.ended[action.ticket] += 1
            case SourceReleased():
                assert not any(w.source == action.ticket for w in producer.writes.values()), "still being read"
                producer.released[action.ticket] += 1
            case _:
                assert_never(action)
        assert max([*producer.ended.values(), *producer.released.values()], default=0) <= 1, "twice"

    def _moving(self, rank: int, action: StartWrite, pull: Pull) -> Moving:
        assert isinstance(pull.kvferry, PullExtension)
        consumer, generation = pull.kvferry.consumer.index, int(pull.kvferry.address)
        source = self.producers[rank].machine.ticket_of(action.transfer)
        assert source is not None
        destination = Ticket(int(action.write.request.removeprefix("d-")))
        assert action.wanted.tables[0].blocks == (destination,)
        return Moving(source, destination, consumer, generation, self.producers[rank].life)

    def _answer(self, rank: int, action: Answer) -> None:
        producer = self.producers[rank]
        pull = producer.pulls[action.pull]  # a second last answer would not find it
        named = [*action.ok, *(failure.request for failure in action.err)]
        for request in named:
            assert WriteId(action.pull, request) not in producer.writes, "named before it is quiet"
        reply = make_reply(action, pull, Side("P", f"life{producer.life}", rank))
        consumer = producer.came_from[action.pull]
        if action.finish:
            del producer.pulls[action.pull], producer.came_from[action.pull]
        if self.consumers[consumer].dead:
            lost = tuple(pull for pull, came_from in producer.came_from.items() if came_from == consumer)
            self._lost_later.append((rank, lost))
            return
        self.network.append(Message(rank, consumer, producer.life, to_producer=False, frame=encode(reply)))

    def _do_consumer(self, rank: int, action: ConsumerAction) -> None:
        consumer = self.consumers[rank]
        match action:
            case Resolve():
                consumer.asked[action.transfer] = action.source
            case SendPull():
                self._send_pull(rank, action)
            case SendAbort():
                notice = AbortNotice(VERSION, self._side(rank), (action.key.transfer,), len(self.consumers))
                self._send(action.key.rank, rank, encode_note(notice))
            case ForgetPull():
                consumer.pulls.pop(action.key, None)
            case ForgetProducer():
                pass
            case FenceProducer():
                consumer.fences.append(action.producer)
            case FetchEnded():
                assert action.ticket in consumer.fetched
                consumer.ended[action.ticket] += 1
                consumer.outcomes[action.ticket] = action
            case DestinationReleased():
                assert not self._landing(rank, action.ticket), self._story(action.transfer)
                consumer.released[action.ticket] += 1
            case _:
                assert_never(action)
        assert max([*consumer.ended.values(), *consumer.released.values()], default=0) <= 1, "twice"

    def _landing(self, consumer: int, ticket: Ticket) -> bool:
        moving = [one for producer in self.producers for one in producer.writes.values()]
        return any(
            one.destination == ticket and one.consumer == consumer and self._lands(one) for one in (*moving, *self.left)
        )

    def _story(self, transfer: TransferId) -> str:
        """What every machine has to tell of a transfer, for the message of a failure."""
        machines: list[Producer | Consumer] = [rank.machine for rank in self.producers]
        machines += [rank.machine for rank in self.consumers]
        return "\n".join(f"{machine}\n{render(machine.story.of(transfer))}" for machine in machines)

    def _lands(self, moving: Moving) -> bool:
        """Whether the engine that the write is aimed at still exists."""
        return moving.generation == self.consumers[moving.consumer].generations[life_of_producer(moving.life)]

    def _side(self, rank: int) -> Side:
        return Side("D", "once", rank)

    def _send_pull(self, rank: int, action: SendPull) -> None:
        consumer = self.consumers[rank]
        number = next(self._numbers)
        consumer.pulls[action.key] = number
        ticket = consumer.machine.ticket_of(action.key.transfer)
        tables = () if action.release or ticket is None else (Table(0, (ticket,)),)
        request = RequestId(f"d-{ticket}")
        extension = PullExtension(
            version=VERSION,
            pull=number,
            consumer=self._side(rank),
            producer=Side("P", action.producer.epoch, action.key.rank),
            transport="none",
            address=str(consumer.generations[action.producer]),
            bases=(),
            requests={},
        )
        wanted = Wanted(request, action.key.transfer, SPAN, tables)
        pull = make_pull(Receiver("d", 1, rank, len(self.consumers)), [wanted], extension)
        self._send(action.key.rank, rank, encode(pull))

    def _send(self, producer: int, consumer: int, frame: bytes) -> None:
        life = self.producers[0].life
        self.network.append(Message(producer, consumer, life, to_producer=True, frame=frame))

    def _arrive_at_producer(self, message: Message) -> None:
        producer = self.producers[message.producer]
        inbound = decode_inbound(message.frame)
        if isinstance(inbound, Pull):
            assert isinstance(inbound.kvferry, PullExtension)
            if inbound.kvferry.producer.epoch != f"life{producer.life}":
                return  # refused by the driver: meant for another life
            pull = PullId(next(self._numbers))
            producer.pulls[pull] = inbound
            producer.came_from[pull] = message.consumer
            event = PullArrived(pull, puller_of(inbound), requests_of(inbound), len(self.consumers))
            self.tell_producer(message.producer, event)
            return
        assert isinstance(inbound.kvferry, AbortNotice)
        for transfer in inbound.kvferry.transfers:
            puller = puller_of_side(inbound.kvferry.consumer)
            aborted = PeerAborted(puller, TransferId(transfer), inbound.kvferry.expected)
            self.tell_producer(message.producer, aborted)

    def _arrive_at_consumer(self, message: Message) -> None:
        consumer = self.consumers[message.consumer]
        reply = decode_reply(message.frame)
        number = _number(reply)
        for key, current in list(consumer.pulls.items()):
            if current == number:
                self.tell_consumer(message.consumer, ReplyArrived(key, reply))

    def _next_deadline(self) -> float | None:
        machines: Sequence[Producer | Consumer] = [
            *(rank.machine for rank in self.producers),
            *(rank.machine for rank in self.consumers if not rank.dead),
        ]
        return min((due for m in machines if (due := m.next_deadline) is not None), default=None)

    def _tick(self) -> None:
        for rank in range(len(self.producers)):
            self.tell_producer(rank, ProducerTick())
        for rank in range(len(self.consumers)):
            self.tell_consumer(rank, ConsumerTick())


def life_of_producer(life: int) -> Incarnation:
    """How this life of the producing engine is named."""
    return Incarnation(EngineId("P"), f"life{life}")


def encode_note(notice: AbortNotice) -> bytes:
    """The frame of an abort."""
    return encode(Note(notice))


def _number(reply: Reply) -> int | None:
    return getattr(reply.kvferry, "pull", None)


def _producer() -> Producer:
    return Producer(ProducerLimits(keep_alive=5.0, write_timeout=20.0))
