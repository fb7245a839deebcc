"""A small world of the joined machines: its states, and everything that can happen in each.

A world has few ranks and requests and a *budget* of bad luck: how many crashes, lost or repeated messages, lies of an
engine, aborts, and timers that fire before what is under way arrives. Its state is a tuple of numbers: of the states
of the machines (:mod:`kvferry.testing.explore_parts`), of the messages under way, and of what is left of the budget.

A crash takes all producer ranks: what they had sent may still arrive until the consumer notices, what was sent to them
is lost, and the new life may compute the same prompts again. Bytes that had left an engine when it ended, by a crash or
for a proof, may land until the engine that they are for is destroyed. A death takes the consumer: each producer rank
notices it some time later. Left out are keep-alives, which carry no word. The requests are alike, so they are asked for
by name.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

from kvferry.ids import TransferId
from kvferry.protocol import Consumer, Ticket
from kvferry.testing.explore_parts import ConsumerPart, Local, Parts, ProducerPart, Reaction, Stimulus, new_consumer
from kvferry.testing.joined import Message, Moving, life_of_producer


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
    deaths: int = 0
    """The consumer dies."""
    vain_fences: int = 0
    """Fences that prove nothing, until they are tried again."""

    landings: int = 0
    """Ends of a writer's engine, by a crash or for a proof, after which bytes that had left it may still land."""

    def less(self, what: str) -> "Budget":
        """One piece of bad luck is used up."""
        return replace(self, **{what: getattr(self, what) - 1})


@dataclass(frozen=True, slots=True)
class Left:
    """Bytes on their way whose writer is gone: they land until the engine that they are for is destroyed."""

    destination: Ticket
    life: int
    """Of the writer."""
    generation: int
    """Of the receive engine."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What of a world is in no machine and under way in no message."""

    budget: Budget
    unpublished: frozenset[tuple[int, int]]
    """Requests and producer ranks whose prompts are not computed yet."""
    asked: int = 0
    """So many requests have been asked for."""
    life: int = 0
    """Of the producers."""
    known: int = 0
    """The life that the consumer knows of."""
    unheard: frozenset[int] | None = None
    """The consumer is dead, and these producer ranks have not noticed yet."""
    left: frozenset[Left] = frozenset()


Step = tuple[str, tuple[object, ...]]
State = tuple[int, ...]
"""Numbers: of the state of each producer rank, of the consumer's, of the messages under way, of the rest."""

Bag = tuple[int, ...]
"""Numbers of messages, sorted; one that is under way twice is in it twice."""

GIVEN_BACK: Final = "blocks are given back while a write may land in them"
LATE: Final = "a write begins into blocks that were given back"


class SmallWorld:
    """The states of a world, and what can happen in each."""

    def __init__(
        self, *, producers: int, requests: int, budget: Budget, consumer: Callable[[], Consumer] = new_consumer
    ) -> None:
        self.parts = Parts()
        self._ranks = range(producers)
        self._transfers = [TransferId(f"t{index}") for index in range(requests)]
        self._messages: list[Message] = []
        self._message_numbers: dict[Message, int] = {}
        self._bags: list[Bag] = []
        self._bag_numbers: dict[Bag, int] = {}
        self._rests: list[Rest] = []
        self._rest_numbers: dict[Rest, int] = {}
        unpublished = frozenset((index, rank) for index in range(requests) for rank in self._ranks)
        self.first: State = (
            *self._fresh_producers(0),
            self.parts.number(ConsumerPart(producers, consumer)),
            self._bag(()),
            self._rest(Rest(budget, unpublished)),
        )

    def successors(self, state: State) -> list[tuple[Step, State | str]]:
        """Everything that can happen now, with the state that follows, or the promise that is broken."""
        found = [*self._engine_steps(state), *self._network_steps(state)]
        seconds = self._deadline(state)
        budget = self._rests[state[-1]].budget
        if seconds is None:
            return [*found, *self._bad_luck(state)] if found else []
        if not found:
            found = [(("wait", (seconds,)), self._advance(state, seconds, budget))]
        elif budget.hurries:
            found.append((("hurry", (seconds,)), self._advance(state, seconds, budget.less("hurries"))))
        return [*found, *self._bad_luck(state)]

    def at_peace(self, state: State) -> bool:
        """Everything has ended and is given back, as far as anybody lives."""
        return all(self.parts.locals[number].at_peace for number in self._living(state))

    def under_way(self, state: State) -> tuple[Message, ...]:
        """The messages that have not arrived."""
        return tuple(self._messages[number] for number in self._bags[state[-2]])

    def landing(self, state: State) -> frozenset[Left]:
        """What may still land although its writer is gone."""
        return self._rests[state[-1]].left

    def _living(self, state: State) -> State:
        return state[:-2] if self._rests[state[-1]].unheard is None else state[:-3]

    # -- what may happen -------------------------------------------------------------------------------------

    def _engine_steps(self, state: State) -> Iterator[tuple[Step, State | str]]:
        rest = self._rests[state[-1]]
        for index, rank in sorted(rest.unpublished):
            ticket = Ticket(1000 * (rest.life + 1) + 10 * index + rank)
            now = replace(rest, unpublished=rest.unpublished - {(index, rank)})
            yield self._step(state, rank, ("publish_ticket", self._transfers[index], ticket), rest=now)
        if rest.unheard is not None:
            for rank in sorted(rest.unheard):
                heard = replace(rest, unheard=rest.unheard - {rank})
                yield self._step(state, rank, ("lose",), rest=heard)
        elif rest.asked < len(self._transfers):
            asking: Stimulus = ("ask", self._transfers[rest.asked], Ticket(1 + rest.asked))
            yield self._step(state, len(self._ranks), asking, rest=replace(rest, asked=rest.asked + 1))
        for rank in self._ranks:
            for luck, stimulus in self.parts.locals[state[rank]].steps:
                if not luck:
                    yield self._step(state, rank, stimulus)
                elif getattr(rest.budget, luck):
                    yield self._step(state, rank, stimulus, rest=replace(rest, budget=rest.budget.less(luck)))
        if rest.unheard is not None:
            return
        for index in range(self.parts.locals[state[-3]].fences):
            yield self._step(state, len(self._ranks), ("be_fenced", index))
            if rest.budget.vain_fences:
                less = replace(rest, budget=rest.budget.less("vain_fences"))
                yield self._step(state, len(self._ranks), ("fence_in_vain", index), rest=less)
        if rest.known < rest.life:
            yield ("notice", ()), self._notice(state, rest)

    def _network_steps(self, state: State) -> Iterator[tuple[Step, State | str]]:
        rest, bag = self._rests[state[-1]], self._bags[state[-2]]
        for number in dict.fromkeys(bag):
            message = self._messages[number]
            where = message.producer if message.to_producer else len(self._ranks)
            left = _without(bag, number)
            yield self._step(state, where, ("arrive", message), bag=left)
            if rest.budget.losses:
                less = replace(rest, budget=rest.budget.less("losses"))
                yield ("lose", (message,)), (*state[:-2], self._bag(left), self._rest(less))
            if rest.budget.repeats:
                less = replace(rest, budget=rest.budget.less("repeats"))
                _, after = self._step(state, where, ("arrive", message), bag=bag, rest=less)
                yield ("arrive_twice", (message,)), after

    def _bad_luck(self, state: State) -> Iterator[tuple[Step, State | str]]:
        """What may happen at any time, and need not."""
        rest = self._rests[state[-1]]
        if rest.budget.crashes:
            yield ("crash", ()), self._crash(state, rest)
            if rest.budget.landings and rest.unheard is None:
                yield ("crash_with_bytes_on_their_way", ()), self._crash(state, self._leave(state, rest))
        if rest.unheard is not None:
            return
        if rest.budget.deaths:
            budget = rest.budget.less("deaths")
            now = replace(rest, unheard=frozenset(self._ranks), budget=budget, left=frozenset())
            yield ("die", ()), (*state[:-2], self._bag(()), self._rest(now))
        if rest.budget.aborts:
            less = replace(rest, budget=rest.budget.less("aborts"))
            for ticket in self.parts.locals[state[-3]].abortable:
                yield self._step(state, len(self._ranks), ("abort", ticket), rest=less)
        if rest.budget.cuts and rest.known == rest.life:
            for rank in self._ranks:
                yield ("cut", (rank,)), self._cut(state, rest, rank)

    # -- doing it --------------------------------------------------------------------------------------------

    def _step(
        self, state: State, where: int, stimulus: Stimulus, *, bag: Bag | None = None, rest: Rest | None = None
    ) -> tuple[Step, State | str]:
        """One part reacts to one stimulus."""
        said = ("" if where == len(self._ranks) else f"producer {where}: ") + str(stimulus[0])
        return (said, stimulus[1:]), self._react(state, where, stimulus, bag=bag, rest=rest)

    def _react(
        self, state: State, where: int, stimulus: Stimulus, *, bag: Bag | None = None, rest: Rest | None = None
    ) -> State | str:
        reaction = self.parts.react(state[where], stimulus)
        if reaction.broken is not None:
            return reaction.broken
        locals_ = [*state[:-2]]
        locals_[where] = reaction.after
        rest = rest or self._rests[state[-1]]
        broken = self._crossed(locals_, reaction, rest.left)
        if broken is not None:
            return broken
        if reaction.left or rest.left:
            rest = replace(rest, left=self._landing_now(locals_, rest, reaction.left))
        under_way = self._bags[state[-2]] if bag is None else bag
        sent = [self._message(one) for one in reaction.sent if not one.to_producer or one.life == rest.life]
        if sent and rest.unheard is None:
            under_way = tuple(sorted([*under_way, *sent]))
        return (*locals_, self._bag(under_way), self._rest(rest))

    def _crossed(self, locals_: list[int], reaction: Reaction, left: frozenset[Left]) -> str | None:
        """What no part sees alone: a block that is given back while another part writes into it."""
        consumer = self.parts.locals[locals_[-1]]
        for moving in reaction.started:
            if moving.destination in consumer.given_back and _lands(moving, consumer):
                return LATE
        if not reaction.freed:
            return None
        aimed: list[Moving | Left] = [*left]
        for number in locals_[:-1]:
            aimed += self.parts.locals[number].moving
        lands = any(one.destination in reaction.freed and _lands(one, consumer) for one in aimed)
        return GIVEN_BACK if lands else None

    def _landing_now(self, locals_: list[int], rest: Rest, more: Iterable[Moving]) -> frozenset[Left]:
        """Of what the ended engines left, what can still land."""
        if rest.unheard is not None:
            return frozenset()
        consumer = self.parts.locals[locals_[-1]]
        left = rest.left.union(Left(one.destination, one.life, one.generation) for one in more)
        return frozenset(one for one in left if _lands(one, consumer))

    def _leave(self, state: State, rest: Rest) -> Rest:
        """What the producers are writing stays on its way."""
        writing = [moving for where in self._ranks for moving in self.parts.locals[state[where]].moving]
        left = self._landing_now([*state[:-2]], rest, writing)
        return replace(rest, left=left, budget=rest.budget.less("landings"))

    def _advance(self, state: State, seconds: float, budget: Budget) -> State | str:
        """Time passes for all; the order in which their timers fire does not matter, since they share only messages."""
        rest = replace(self._rests[state[-1]], budget=budget)
        for where in range(len(self._living(state))):
            after = self._react(state, where, ("advance", seconds), rest=rest)
            if isinstance(after, str):
                return after
            state = after
        return state

    def _crash(self, state: State, rest: Rest) -> State:
        """The producing engine dies and comes back: what it had sent may still arrive, what was sent to it may not."""
        life = rest.life + 1
        bag = tuple(one for one in self._bags[state[-2]] if not self._messages[one].to_producer)
        unpublished = frozenset((index, rank) for index in range(len(self._transfers)) for rank in self._ranks)
        now = replace(rest, life=life, unpublished=unpublished, budget=rest.budget.less("crashes"))
        if rest.unheard is not None:
            now = replace(now, unheard=frozenset())  # the new life never knew the consumer
        return (*self._fresh_producers(life), state[-3], self._bag(bag), self._rest(now))

    def _notice(self, state: State, rest: Rest) -> State | str:
        """The consumer hears of it: nothing more comes by the connections of the old life."""
        bag = tuple(one for one in self._bags[state[-2]] if self._messages[one].life > rest.known)
        now = replace(rest, known=rest.known + 1)
        return self._react(state, len(self._ranks), ("notice",), bag=bag, rest=now)

    def _cut(self, state: State, rest: Rest, rank: int) -> State | str:
        """A connection breaks: what is under way on it is lost, and both sides notice."""
        bag = tuple(one for one in self._bags[state[-2]] if self._messages[one].producer != rank)
        now = self._react(state, rank, ("lose",), bag=bag, rest=replace(rest, budget=rest.budget.less("cuts")))
        return now if isinstance(now, str) else self._react(now, len(self._ranks), ("lose",))

    def _deadline(self, state: State) -> float | None:
        due = [self.parts.locals[number].deadline for number in self._living(state)]
        return min((one for one in due if one is not None), default=None)

    # -- numbers ---------------------------------------------------------------------------------------------

    def _fresh_producers(self, life: int) -> tuple[int, ...]:
        return tuple(self.parts.number(ProducerPart(rank, len(self._ranks), life)) for rank in self._ranks)

    def _message(self, message: Message) -> int:
        number = self._message_numbers.setdefault(message, len(self._messages))
        if number == len(self._messages):
            self._messages.append(message)
        return number

    def _bag(self, bag: Bag) -> int:
        number = self._bag_numbers.setdefault(bag, len(self._bags))
        if number == len(self._bags):
            self._bags.append(bag)
        return number

    def _rest(self, rest: Rest) -> int:
        number = self._rest_numbers.setdefault(rest, len(self._rests))
        if number == len(self._rests):
            self._rests.append(rest)
        return number


def _lands(aimed: Moving | Left, consumer: Local) -> bool:
    """Whether the engine that it is aimed at still exists."""
    return aimed.generation == consumer.generations.get(life_of_producer(aimed.life), 0)


def _without(bag: Bag, number: int) -> Bag:
    at = bag.index(number)
    return bag[:at] + bag[at + 1 :]


_WORDS: Final = {
    "crashes": "crash",
    "losses": "lost message",
    "repeats": "repeated message",
    "lies": "lie",
    "failures": "failed write",
    "aborts": "abort",
    "cuts": "broken connection",
    "hurries": "early deadline",
    "deaths": "death of the consumer",
    "vain_fences": "fence that proves nothing",
    "landings": "bytes that outlive their writer",
}


def luck_of(budget: Budget) -> str:
    """``crash, 2 times; lost message``."""
    spent = [(one.name, getattr(budget, one.name)) for one in fields(budget)]
    said = [_WORDS[name] if count == 1 else f"{_WORDS[name]}, {count} times" for name, count in spent if count]
    return "; ".join(said) or "none"
