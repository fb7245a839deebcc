"""A fleet behind a router whose processes are replaced one at a time, while clients go on asking.

:class:`Place` is an address of the fleet; a process that stood there is a :class:`Life`, with a log of its own. Clients
(:class:`SteadyLoad`) ask the router all the while, each its next question as soon as it has an answer, and every
question has a name that each engine that is asked writes into its log. So afterwards it is known of each answer which
processes it came from, and :func:`judge` can ask the questions that matter:

* every finished answer is that of a single engine, by the rule of :mod:`kvferry.testing.comparison`;
* a request that failed was in the hands of a process that was being stopped just then: any other failure is a fault;
* transfers that a kvferry prefill engine has finished have equal digests at both ends;
* at the end no engine of the fleet has a block in use, holds one, or knows a transfer that is not over; an engine of
  kvferry that does not tell is a fault too.

Processes are stopped as an operator does it, by a signal, with all that they are working on; the router is told
nothing and finds out by itself.
"""

import asyncio
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvferry.runtime.report import Side
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.mixed_load import (
    Ask,
    Audit,
    Clients,
    Ends,
    Got,
    Reference,
    judge_answer,
    open_transfers,
    settle,
)
from kvferry.testing.ports import free_port
from kvferry.testing.serve import SERVED_NAME, START_TIMEOUT_S, Connector, Role, Server, ServeSpec
from kvferry.testing.transfer_report import read_reports

NAMED: Final = "rolling-"
ARGUMENTS: Final = ("--enable-log-requests",)
"""What every engine of such a fleet needs on its command line."""

STOP_TIMEOUT_S: Final = 60.0
"""For an engine that was told to finish what it has begun."""

_SIDES: Final[Mapping[Role, Side]] = {"prefill": "producer", "decode": "consumer"}
_SEEN = re.compile(rf"Received request \w+-({NAMED}\d+)-")


@dataclass(slots=True)
class Life:
    """One process of the fleet, from its start to its end."""

    name: str
    role: Role
    connector: Connector
    server: Server
    stopped: float | None = None
    """When it was told to stop."""
    gone: float | None = None

    def seen(self) -> set[str]:
        """Names of the requests that have reached it."""
        return set(_SEEN.findall(self.server.log.read_text(errors="replace")))

    def was_stopping(self, began: float, ended: float) -> bool:
        """Whether it was between the signal and its end at some time of this interval."""
        if self.stopped is None or self.gone is None:
            return False
        return began <= self.gone and self.stopped <= ended


class Place:
    """An address of the fleet: one process at a time, always on the same ports."""

    def __init__(self, spec: ServeSpec, forge: EngineForge | None = None) -> None:
        self.lives: list[Life] = []
        self._spec = spec
        self._forge = forge
        self._port = free_port()
        self.bootstrap = free_port()

    @property
    def role(self) -> Role:
        """Of all processes here."""
        return self._spec.role

    @property
    def now(self) -> Life:
        """The process that stands here."""
        return self.lives[-1]

    @property
    def url(self) -> str:
        """Of the API."""
        return f"http://127.0.0.1:{self._port}"

    def start(self, spec: ServeSpec) -> Life:
        """Start a process, without waiting for it."""
        server = spec.start(self._port, self.bootstrap, forge=self._forge)
        self.lives.append(Life(spec.name, spec.role, spec.connector, server))
        return self.now

    def begin(self) -> Life:
        """Start the first one."""
        return self.start(self._spec)

    def begin_stop(self) -> None:
        """Tell the process that stands here to stop."""
        self.now.server.begin_stop()

    def stop(self) -> None:
        """Wait until it has."""
        self.now.server.stop()

    def replace(self, spec: ServeSpec) -> Life:
        """Stop the process that stands here, whatever it is doing, and start another; return when that one serves."""
        old = self.now
        old.stopped = time.monotonic()
        old.server.stop(STOP_TIMEOUT_S)
        old.gone = time.monotonic()
        new = self.start(spec)
        new.server.wait_healthy(START_TIMEOUT_S)
        return new


@dataclass(frozen=True, slots=True)
class Timed:
    """What one client saw, and when (of the monotonic clock)."""

    got: Got
    began: float
    ended: float

    @property
    def name(self) -> str:
        """As in the engines' logs."""
        return f"{NAMED}{self.got.ask.number}"


class SteadyLoad:
    """So many clients that ask a router without a pause, in a thread of their own, until told to end."""

    def __init__(self, router: str, asks: Sequence[Ask], *, model: str, clients: int) -> None:
        self.answers: list[Timed] = []
        self._router = router
        self._model = model
        self._clients = clients
        # Nobody leaves here: whether an answer that was begun is finished is what is measured.
        self._asks = itertools.cycle([replace(ask, leaves_after=None, leaves_at=None) for ask in asks])
        self._numbers = itertools.count()
        self._ended = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="steady load", daemon=True)
        self._thread.start()

    def __enter__(self) -> "SteadyLoad":
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def wait_for(self, holds: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Go on until it holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"gave up waiting until {what}")
            if not self._thread.is_alive():
                raise RuntimeError("the clients have ended by themselves")
            time.sleep(0.1)

    def end(self) -> tuple[Timed, ...]:
        """Ask nothing more, wait for the answers that are due, and return all."""
        self._ended = True
        self._thread.join()
        return tuple(self.answers)

    async def _run(self) -> None:
        clients = Clients(self._router, model=self._model, concurrency=self._clients, named=NAMED)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._clients):
                    group.create_task(self._ask(clients))
        finally:
            await clients.close()

    async def _ask(self, clients: Clients) -> None:
        while not self._ended:
            ask = replace(next(self._asks), number=next(self._numbers))
            began = time.monotonic()
            got = await clients.one(ask)
            self.answers.append(Timed(got, began, time.monotonic()))


def roll(
    places: Sequence[Place], specs: Sequence[ServeSpec], load: SteadyLoad, *, answers: int, seconds: float = 300.0
) -> None:
    """Replace the process at each place by the one of ``specs``, in order, under ``load``.

    Between two of them, and at the end, the newest process and the others go on until it has seen ``answers``
    requests and so many have been answered.
    """
    _go_on(places[0].now, load, answers=answers, seconds=seconds)
    for place, spec in zip(places, specs, strict=True):
        _go_on(place.replace(spec), load, answers=answers, seconds=seconds)


def _go_on(newest: Life, load: SteadyLoad, *, answers: int, seconds: float) -> None:
    before = len(load.answers)
    load.wait_for(
        lambda: len(load.answers) >= before + answers and len(newest.seen()) >= answers,
        seconds=seconds,
        what=f"{newest.name} has seen {answers} requests",
    )


@dataclass(slots=True)
class Rolled:
    """What a replacement under load came to; ``faults`` is empty when all is as it must be."""

    audit: Audit = field(default_factory=Audit)
    pairs: Counter[tuple[Connector, Connector]] = field(default_factory=Counter)
    """Finished answers by the connectors of the prefill and the decode engine."""
    again: int = 0
    """Finished answers that more than one engine of a kind was asked for."""
    own: list[str] = field(default_factory=list)
    """Failures of requests in the hands of a process that was being replaced."""
    slowest: float = 0.0
    digests: int = 0
    """Transfers that both ends reported, both kvferry, with equal digests."""
    landed: int = 0
    """The same from kvferry to vLLM's own connector, whose memory was read."""

    @property
    def faults(self) -> list[str]:
        """What is not as it must be."""
        return self.audit.faults

    def __str__(self) -> str:
        pairs = ", ".join(f"{first} to {second} {count}" for (first, second), count in sorted(self.pairs.items()))
        return (
            f"{sum(self.pairs.values()) + self.again} finished answers ({pairs}, {self.again} asked again), by text "
            f"{self.audit.by_text}, by log probabilities {self.audit.by_logprobs}; {len(self.own)} failed with their "
            f"own process; {self.digests} transfers with equal digests between kvferry engines, {self.landed} to "
            f"upstream; slowest answer {self.slowest:.1f} s; "
            f"{len(self.faults)} faults"
        )


def judge(
    answers: Sequence[Timed], places: Sequence[Place], references: Mapping[str, Reference], *, report: Path, debug: Path
) -> Rolled:
    """Once the load has ended: see the module's words. Engines that are up at the end must all be quiet."""
    rolled = Rolled()
    prefill = next(place.url for place in places if place.role == "prefill")
    ours = frozenset(_SIDES[place.role] for place in places if place.now.connector == "ferry")
    ends = Ends(prefill, prefill, report, debug, SERVED_NAME, ours=ours)
    seen = [(life, life.seen()) for place in places for life in place.lives]
    for place in places:
        rolled.faults.extend(settle(place.url, ours=place.now.connector == "ferry"))
    for one in answers:
        account(one, [life for life, names in seen if one.name in names], references, ends, rolled)
    rolled.faults.extend(open_transfers(ends))
    rolled.faults.extend(_digests(rolled, report))
    return rolled


def account(one: Timed, own: Sequence[Life], references: Mapping[str, Reference], ends: Ends, rolled: Rolled) -> None:
    """Add one request, which the processes ``own`` were asked for, to the account."""
    rolled.slowest = max(rolled.slowest, one.ended - one.began)
    if one.got.end == "finished":
        judge_answer(one.got, references[one.got.ask.prompt], ends, rolled.audit)
        _count(rolled, own)
    else:
        _excuse(rolled, one, own)


def _count(rolled: Rolled, own: Sequence[Life]) -> None:
    prefills = [life for life in own if life.role == "prefill"]
    decodes = [life for life in own if life.role == "decode"]
    if len(prefills) == len(decodes) == 1:
        rolled.pairs[prefills[0].connector, decodes[0].connector] += 1
    else:
        rolled.again += 1


def _excuse(rolled: Rolled, one: Timed, own: Sequence[Life]) -> None:
    replaced = [life.name for life in own if life.was_stopping(one.began, one.ended)]
    text = f"{one.name}, {'streamed' if one.got.ask.stream else 'whole'}: {one.got.end}: {one.got.said}"
    if replaced:
        rolled.own.append(f"{text} (while {', '.join(replaced)} was stopped)")
    else:
        rolled.faults.append(f"{text} (seen by {', '.join(life.name for life in own) or 'none'}, none of them stopped)")


def _digests(rolled: Rolled, report: Path) -> Iterator[str]:
    for transfer in read_reports([report]).values():
        done = all(line.status == "done" for line in (*transfer.producer, *transfer.consumer))
        if done and transfer.producer and transfer.consumer and any(line.bytes for line in transfer.producer):
            to_upstream = any(line.peer_engine_id.startswith("upstream:") for line in transfer.producer)
            rolled.landed += to_upstream
            rolled.digests += not to_upstream
            yield from (f"transfer {transfer.transfer_id}: {problem}" for problem in transfer.problems())
