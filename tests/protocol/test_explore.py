"""Small worlds of the protocol, explored without gaps; larger ones by ``make model-check``."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvferry.ids import EngineId, RequestId
from kvferry.protocol import (
    Consumer,
    FenceDone,
    FetchAborted,
    FetchRequested,
    Producer,
    ProducerLost,
    Published,
    Quieted,
    SendPull,
    Source,
    Table,
    WriteFailed,
)
from kvferry.protocol.replies import Verdict
from kvferry.testing.explore import Budget, PromiseBrokenError, SmallWorld, Step, explore, small_world
from kvferry.testing.explore_parts import ConsumerPart, ProducerPart, new_consumer, new_producer, number_of
from kvferry.testing.explore_world import Left, luck_of
from kvferry.testing.joined import SPAN, ConsumerRank, Joined, Message, ProducerRank

SMALL = [
    "one request, one crash, one lie",
    "one request, one lost and one repeated message",
    "one request, one abort and one broken connection",
    "one request, one hurry and one failure",
    "one producer, two requests, one crash",
    "two requests, one crash",
    "two requests, the consumer dies",
    "one request, one broken connection, a fence that proves nothing",
    "two requests, one crash that leaves bytes under way",
    "one request, one lie, one hurry, bytes outlive their writer",
]


@pytest.mark.parametrize("name", SMALL)
def test_every_promise_holds_in_every_state(name: str) -> None:
    found = explore(small_world(name), limit=200_000)
    assert found.whole
    assert found.states > 150
    assert found.ends > 5


def test_equal_states_are_met_on_many_ways() -> None:
    """Without that the exploration would be a tree, and the forms of states worth nothing."""
    found = explore(SmallWorld(producers=2, requests=2, budget=Budget()))
    assert found.whole
    assert found.steps > 3 * found.states


class HastyConsumer(Consumer):
    """Takes a lost producer for a quiet one: exactly the mistake that the fences are there for."""

    def handle(self, event, now):  # type: ignore[no-untyped-def]
        actions = super().handle(event, now)
        if isinstance(event, ProducerLost):
            actions += super().handle(FenceDone(event.producer), now)
        return actions


def asks_nobody(producer):  # type: ignore[no-untyped-def]
    return None


class ForgetfulConsumer(Consumer):
    """Never asks for a fence: what is in doubt stays so."""

    def __init__(self, limits):  # type: ignore[no-untyped-def]
        super().__init__(limits)
        self._fences._ask = asks_nobody


class HastyProducer(Producer):
    """Takes a failed write for one that is over."""

    def handle(self, event, now):  # type: ignore[no-untyped-def]
        if isinstance(event, WriteFailed):
            event = WriteFailed(event.write, event.reason, quiet=True)
        return super().handle(event, now)


class CarelessProducer(Producer):
    """Takes the end of its engine for the end of what had left it."""

    def handle(self, event, now):  # type: ignore[no-untyped-def]
        if isinstance(event, Quieted):
            event = Quieted(event.writes)
        return super().handle(event, now)


class CarelessConsumer(Consumer):
    """Takes every last word of a producer for quiet, also one that says otherwise."""

    def _follow(self, fetch, pull, verdict):  # type: ignore[no-untyped-def]
        if verdict.kind is Verdict.DOUBT:
            verdict = replace(verdict, kind=Verdict.REFUSED)
        super()._follow(fetch, pull, verdict)


def serves_nobody(puller, transfers):  # type: ignore[no-untyped-def]
    return False


class CurtProducer(Producer):
    """Names all requests of a pull that it has no room for, also one that it is writing for."""

    def __init__(self, limits):  # type: ignore[no-untyped-def]
        super().__init__(limits)
        self._pulls.serves = serves_nobody


def hasty() -> Consumer:
    return HastyConsumer(new_consumer().limits)


def forgetful() -> Consumer:
    return ForgetfulConsumer(new_consumer().limits)


def test_a_consumer_that_skips_the_fence_is_found_out() -> None:
    world = SmallWorld(producers=1, requests=1, budget=Budget(cuts=1), consumer=hasty)
    with pytest.raises(PromiseBrokenError, match=r"(?s)given back while a write may land.*after:.*cut"):
        explore(world)


def test_a_consumer_that_forgets_the_fence_is_found_out() -> None:
    world = SmallWorld(producers=1, requests=1, budget=Budget(cuts=1), consumer=forgetful)
    with pytest.raises(PromiseBrokenError, match=r"(?s)after:.*cut"):
        explore(world)


def test_a_producer_that_believes_its_engine_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.testing.explore_parts.Producer", HastyProducer)
    world = SmallWorld(producers=1, requests=1, budget=Budget(lies=1))
    with pytest.raises(PromiseBrokenError, match=r"(?s)(still being read|named before it is quiet).*after:.*lie"):
        explore(world)


def test_a_consumer_that_trusts_the_end_of_the_writer_is_found_out_only_by_what_outlives_it() -> None:
    assert explore(SmallWorld(producers=1, requests=1, budget=Budget(crashes=1), consumer=hasty)).whole
    world = SmallWorld(producers=1, requests=1, budget=Budget(crashes=1, landings=1), consumer=hasty)
    with pytest.raises(PromiseBrokenError, match=r"(?s)given back while a write may land.*crash_with_bytes.*notice"):
        explore(world)


OUTLIVING = Budget(lies=1, hurries=1, landings=1)
GIVEN_BACK_EARLY = r"(?s)given back while a write may land.*after:.*lie.*be_proven_to_read_nothing.*arrive"


def test_a_producer_that_takes_what_may_land_for_quiet_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.testing.explore_parts.Producer", CarelessProducer)
    assert explore(SmallWorld(producers=1, requests=1, budget=Budget(lies=1, hurries=1))).whole
    with pytest.raises(PromiseBrokenError, match=GIVEN_BACK_EARLY):
        explore(SmallWorld(producers=1, requests=1, budget=OUTLIVING))


def test_a_consumer_that_takes_what_may_land_for_quiet_is_found_out() -> None:
    def careless() -> Consumer:
        return CarelessConsumer(new_consumer().limits)

    assert explore(SmallWorld(producers=1, requests=1, budget=Budget(lies=1, hurries=1), consumer=careless)).whole
    with pytest.raises(PromiseBrokenError, match=GIVEN_BACK_EARLY):
        explore(SmallWorld(producers=1, requests=1, budget=OUTLIVING, consumer=careless))


@pytest.mark.parametrize("curt", [False, True])
def test_without_room_a_repeated_pull_frees_no_block_that_is_written(
    curt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer with room for one pull, in a network that repeats: its only word for the repeat is none."""
    kind, limits = (CurtProducer if curt else Producer), replace(new_producer().limits, pulls=1)
    monkeypatch.setattr("kvferry.testing.explore_parts.new_producer", lambda: kind(limits))
    world = SmallWorld(producers=1, requests=2, budget=Budget(repeats=2))
    if curt:
        with pytest.raises(PromiseBrokenError, match=r"(?s)given back while a write may land.*arrive_twice"):
            explore(world)
    else:
        assert explore(world).whole


class Whole(Joined):
    """All parts in one world, numbered as the parts number: what the search says must be what happens here."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, 0)
        self.producers = [ProducerRank(new_producer()) for _ in range(ranks)]
        self.consumers = [ConsumerRank(new_consumer())]
        self.counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.numbering = (0, "")
        self._numbers = self

    def __next__(self) -> int:
        part, what = self.numbering
        self.counts[part][what] += 1
        return number_of(what, self.counts[part][what])

    def _send_pull(self, rank: int, action: SendPull) -> None:
        self.numbering = (len(self.producers), f"pull {action.key.transfer} {action.key.rank}")
        super()._send_pull(rank, action)

    def _arrive_at_producer(self, message: Message) -> None:
        self.numbering = (message.producer, message.frame.hex())
        super()._arrive_at_producer(message)

    def parts(self) -> Iterator[ProducerPart | ConsumerPart]:
        """Its parts, as the search knows them."""
        for rank, me in enumerate(self.producers):
            part = ProducerPart(rank, len(self.producers), 0)
            part.me, part.now, part._numbered = me, self.now, self.counts[rank]
            yield part
        consumer = ConsumerPart(len(self.producers))
        consumer.me, consumer.now, consumer._numbered = self.consumers[0], self.now, self.counts[len(self.producers)]
        yield consumer

    def do(self, step: Step) -> None:
        """The same step here."""
        said, arguments = step
        where, _, name = said.rpartition(": ")
        rank = int(where.removeprefix("producer ")) if where else 0
        match name, arguments:
            case "arrive", (message,):
                self.deliver(self.network.index(message))
            case "arrive_twice", (message,):
                self.deliver(self.network.index(message), keep=True)
            case "lose", (message,):
                self.network.remove(message)
            case "finish", (write,):
                self.end_write(rank, write)
            case "lie", (write,):
                self.fail_write(rank, write, quiet=False)
            case "fail", (write,):
                self.fail_write(rank, write, quiet=True)
            case "be_proven" | "be_proven_to_read_nothing", ():
                self.prove(rank, landing=name != "be_proven")
            case "be_fenced" | "fence_in_vain", (index,):
                self.fence(0, index, works=name == "be_fenced")
            case "wait" | "hurry", (seconds,):
                self.now += seconds
                self._tick()
            case "cut", (cut,):
                self.cut(cut, 0)
            case "abort", (ticket,):
                self.tell_consumer(0, FetchAborted(ticket))
            case "publish_ticket", (transfer, ticket):
                self.producers[rank].published.add(ticket)
                self.tell_producer(rank, Published(transfer, ticket, SPAN, (Table(0, (ticket,)),), self.now + 30))
            case "ask", (transfer, ticket):
                consumer = self.consumers[0]
                consumer.fetched.add(ticket)
                consumer.tickets.setdefault(transfer, ticket)
                source, name = Source(EngineId("P"), "http://p"), RequestId(f"d-{ticket}")
                self.tell_consumer(
                    0, FetchRequested(transfer, name, ticket, source, SPAN, groups=1, deadline=self.now + 20, blocks=1)
                )
            case _:
                raise AssertionError(f"no such step: {step}")
        for transfer in sorted(self.consumers[0].asked):
            self.resolve(0, transfer)


WALKS = [
    Budget(losses=1, repeats=1),
    Budget(lies=1, cuts=1, aborts=1),
    Budget(hurries=2, failures=1),
    Budget(cuts=1, vain_fences=2),
    Budget(repeats=1, aborts=1, hurries=1, lies=1),
    Budget(lies=2, hurries=2, landings=1),
]


@pytest.mark.parametrize("luck", WALKS, ids=luck_of)
@pytest.mark.parametrize(("ranks", "requests"), [(1, 2), (2, 1), (2, 2)])
def test_what_is_looked_up_is_what_happens(ranks: int, requests: int, luck: Budget) -> None:
    """Walks at random, in numbers and beside it in one whole world: after each step they are in the same state."""
    world = SmallWorld(producers=ranks, requests=requests, budget=luck)
    longest = 0
    for seed in range(12):
        draw, whole, state, steps = random.Random(seed), Whole(ranks), world.first, 0
        while following := world.successors(state):
            step, after = draw.choice(following)
            assert not isinstance(after, str), after
            whole.do(step)
            state, steps = after, steps + 1
            assert tuple(world.parts.number(part) for part in whole.parts()) == state[:-2], step
            assert Counter(whole.network) == Counter(world.under_way(state)), step
            landing = {Left(one.destination, one.life, one.generation) for one in whole.left if whole._lands(one)}
            assert landing == world.landing(state), step
        assert all(part.at_peace for part in whole.parts())
        longest = max(longest, steps)
    assert longest >= 8
