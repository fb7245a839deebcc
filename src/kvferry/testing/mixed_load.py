"""Mixed load on a served pair through any router, and the audit of it: every answer, every transfer, every block.

A seed decides what is asked: prompts of 1 to 2,000 tokens, some asked again, some of whose clients leave (at once,
while the prompt is computed or moved, or in the middle of a stream). One engine computes all prompts without any
transfer first, each alone and then many at once. Then the same prompts go through the router, so many at a time, and

* every answer that was finished is that of the single engine, by the rule of :mod:`kvferry.testing.comparison`;
* every transfer that was finished has the same digest at both ends (but where vLLM's own connector sends: it tells
  none, and only what it receives is read), and so many were finished as answers (or more: of a client that has left,
  or of an engine that was asked twice);
* at the end both engines' block pools are whole: vLLM resets its prefix cache only when no block but the null block is
  in use, and says so; no connector holds a block, and none knows a transfer that is not over.

Tokens are bytes in the models built here, so texts are compared, and a text can be scored.
"""

import asyncio
import random
import string
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvferry.runtime.report import Side
from kvferry.runtime.stories import ask_stories
from kvferry.testing.comparison import FLOAT32_TOLERANCE, compare_logprobs
from kvferry.testing.transfer_report import read_reports

LONGEST: Final = 2_000
EDGES: Final = (1, 2, 31, 32, 33, 64, 129, 1_024, 1_999, LONGEST)
"""Lengths that every plan of some size contains."""

MOST_TOKENS: Final = 16
"""Of an answer."""

SETTLE_S: Final = 60.0
ANSWER_S: Final = 300.0
_SIDES: Final[tuple[Side, ...]] = ("producer", "consumer")
_BUSY: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_HELD: Final = ("vllm:kvferry_held_blocks", "vllm:kvferry_quarantined_blocks")
_ALPHABET: Final = string.ascii_lowercase + "     "


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    number: int
    prompt: str
    max_tokens: int
    stream: bool
    leaves_after: float | None = None
    """The client hangs up after so many seconds, unless it has its answer by then."""
    leaves_at: int | None = None
    """The client hangs up after so many events of its stream."""

    @property
    def stays(self) -> bool:
        """Whether the client waits for its whole answer, however long that takes."""
        return self.leaves_after is None and self.leaves_at is None


def plan_load(count: int, *, seed: int, longest: int = LONGEST) -> tuple[Ask, ...]:
    """What is asked, in order: a function of its arguments alone.

    >>> asks = plan_load(200, seed=1)
    >>> min(len(one.prompt) for one in asks), max(len(one.prompt) for one in asks)
    (1, 2000)
    >>> asks == plan_load(200, seed=1)
    True
    """
    source = random.Random(seed)
    edges = [length for length in EDGES if length <= longest]
    lengths = [*edges, *(round(longest ** source.random()) for _ in range(count))][:count]
    source.shuffle(lengths)
    asks: list[Ask] = []
    for number, length in enumerate(lengths):
        again = asks and length not in edges and source.random() < 0.2
        prompt = source.choice(asks).prompt if again else "".join(source.choices(_ALPHABET, k=length))
        stream = source.random() < 0.5
        way = source.random()
        asks.append(
            Ask(
                number,
                prompt,
                max_tokens=source.randint(1, MOST_TOKENS),
                stream=stream,
                leaves_after=source.choice((0.0, 0.02, 0.1, 0.3, 1.0, 2.0)) if way < 0.15 else None,
                leaves_at=source.randint(1, 6) if stream and way > 0.9 else None,
            )
        )
    return tuple(asks)


@dataclass(frozen=True, slots=True)
class Got:
    """What one client saw."""

    ask: Ask
    end: Literal["finished", "left", "failed"]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    said: str = ""
    """Of a failure: what the client was told."""


class Clients:
    """Ask one address for completions."""

    def __init__(self, url: str, *, model: str, concurrency: int, named: str | None = None) -> None:
        """``named``: requests are named so, with their number behind it; every engine that sees one logs the name."""
        self._url = url
        self._model = model
        self._named = named
        self._slots = asyncio.Semaphore(concurrency)
        # A connection each: one that was kept may be closed by the server just when the next request is written to it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, limits=limits)

    async def all(self, asks: Iterable[Ask]) -> list[Got]:
        """Ask all, so many at a time, in order."""
        async with self._client:
            return list(await asyncio.gather(*(self.one(ask) for ask in asks)))

    async def close(self) -> None:
        """For whoever asks one by one."""
        await self._client.aclose()

    async def one(self, ask: Ask) -> Got:
        """Ask, when fewer than so many are asked already."""
        async with self._slots:
            try:
                async with asyncio.timeout(ask.leaves_after):
                    return await (self._streamed(ask) if ask.stream else self._whole(ask))
            except TimeoutError:
                return Got(ask, "left")
            except httpx.HTTPError as error:
                return Got(ask, "failed", said=f"{type(error).__name__}: {error}")

    def _body(self, ask: Ask) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "stream": ask.stream,
        }

    def _headers(self, ask: Ask) -> dict[str, str]:
        return {} if self._named is None else {"x-request-id": f"{self._named}{ask.number}"}

    async def _whole(self, ask: Ask) -> Got:
        url = f"{self._url}/v1/completions"
        answer = await self._client.post(url, json=self._body(ask), headers=self._headers(ask))
        if answer.status_code != 200:
            return Got(ask, "failed", said=f"{answer.status_code}: {answer.text[:300]}")
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "abort":
            return Got(ask, "failed", choice["text"], said="the engine ended it")
        return Got(ask, "finished", choice["text"], tuple(choice["logprobs"]["token_logprobs"]))

    async def _streamed(self, ask: Ask) -> Got:
        text, logprobs, aborted = "", list[float](), False
        url = f"{self._url}/v1/completions"
        async with self._client.stream("POST", url, json=self._body(ask), headers=self._headers(ask)) as answer:
            if answer.status_code != 200:
                return Got(ask, "failed", said=f"{answer.status_code}: {(await answer.aread())[:300]!r}")
            events = 0
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = msgspec.json.decode(data)
                if "choices" not in event:
                    return Got(ask, "failed", said=data[:300])
                for choice in event["choices"]:
                    text += choice["text"]
                    aborted |= choice["finish_reason"] == "abort"
                    logprobs += choice["logprobs"]["token_logprobs"] if choice.get("logprobs") else []
                events += 1
                if events == ask.leaves_at:
                    return Got(ask, "left")
        if aborted or not text:
            return Got(ask, "failed", text, said="the engine ended it")
        return Got(ask, "finished", text, tuple(logprobs))


@dataclass(frozen=True, slots=True)
class Reference:
    """What the single engine answered to one prompt, as long as any client wants it."""

    alone: Got
    batched: Got

    def stable_for(self, tokens: int) -> bool:
        """Whether the engine agrees with itself on that many tokens."""
        return self.alone.text[:tokens] == self.batched.text[:tokens]


async def take_references(
    url: str, asks: Sequence[Ask], *, model: str, concurrency: int, forget: Callable[[], None]
) -> dict[str, Reference]:
    """Ask the engine at ``url``, without a router, each prompt alone and all together; ``forget`` empties its cache."""
    prompts = [
        Ask(number, prompt, MOST_TOKENS, stream=False)
        for number, prompt in enumerate(dict.fromkeys(a.prompt for a in asks))
    ]
    alone = await Clients(url, model=model, concurrency=1).all(prompts)
    await asyncio.to_thread(forget)
    batched = await Clients(url, model=model, concurrency=concurrency).all(prompts)
    await asyncio.to_thread(forget)
    return {a.ask.prompt: Reference(a, b) for a, b in zip(alone, batched, strict=True)}


@dataclass
class Audit:
    """What a load came to; ``faults`` is empty when all is as it must be."""

    ends: dict[str, int] = field(default_factory=dict)
    by_text: int = 0
    by_logprobs: int = 0
    too_short: int = 0
    """Finished answers to prompts of which nothing is to be moved."""
    transfers: int = 0
    nbytes: int = 0
    released: int = 0
    """Transfers of which nothing was wanted after all: the client left while its request waited for decode."""
    unfinished: int = 0
    """Transfers that ended otherwise than done, as those of clients that left may."""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return (
            f"{sum(self.ends.values())} requests in {self.seconds:.0f} s: {ends}; answers compared by text "
            f"{self.by_text}, by log probabilities {self.by_logprobs}; {self.transfers} transfers done, "
            f"{self.nbytes} bytes, {self.released} released, {self.unfinished} not finished; {len(self.faults)} faults"
        )


@dataclass(frozen=True)
class Ends:
    """The two engines behind the router, and what they write down."""

    prefill: str
    decode: str
    report: Path
    debug: Path
    """The connectors' debug sockets."""
    model: str
    least: int = 1
    """Prompts of fewer tokens are not moved. Beside a state the last token is left to decode: there it is 2."""
    told_by: frozenset[Side] = frozenset(("producer", "consumer"))
    """The sides that report transfers: not a producer of vLLM's own connector."""
    ours: frozenset[Side] = frozenset(("producer", "consumer"))
    """The sides that are kvferry's: they tell which transfers are not over."""

    @property
    def engines(self) -> tuple[str, str]:
        """Both addresses."""
        return self.prefill, self.decode


def run_load(
    router: str, ends: Ends, asks: Sequence[Ask], references: Mapping[str, Reference], *, concurrency: int
) -> Audit:
    """Put ``asks`` through the router, wait until all is quiet, and judge."""
    before = read_reports([ends.report]).keys()
    began = time.monotonic()
    got = asyncio.run(Clients(router, model=ends.model, concurrency=concurrency).all(asks))
    audit = Audit(seconds=time.monotonic() - began)
    for one in got:
        audit.ends[one.end] = audit.ends.get(one.end, 0) + 1
    audit.faults += [f"request {one.ask.number}: {one.said}" for one in got if one.end == "failed"]
    for url, side in zip(ends.engines, _SIDES, strict=True):
        audit.faults += settle(url, ours=side in ends.ours)
    audit.faults += open_transfers(ends)
    for one in got:
        if one.end == "finished":
            audit.too_short += len(one.ask.prompt) < ends.least
            judge_answer(one, references[one.ask.prompt], ends, audit)
    judge_transfers(ends, before, audit)
    return audit


def open_transfers(ends: Ends) -> list[str]:
    """Those that kvferry's connectors know and that are not over, as faults; so is a side that tells nothing."""
    told = ask_stories(str(ends.debug), None)
    silent = sorted(ends.ours - {one.side for one in told})
    return [
        *(f"no {side} tells its open transfers" for side in silent),
        *(f"transfer {name} is not over on the {one.side}'s side" for one in told for name in one.open),
    ]


def settle(url: str, *, ours: bool, seconds: float = SETTLE_S) -> list[str]:
    """Wait until no block of an engine is in use; what is, otherwise. Empties its prefix cache.

    An engine of ``ours`` must tell how many blocks its connector holds: that it is silent is a fault too.
    """
    with httpx.Client(timeout=30, trust_env=False) as client:
        deadline = time.monotonic() + seconds
        while True:
            told = _metrics(client, url)
            if absent := [name for name in (*_BUSY, *(_HELD if ours else ())) if name not in told]:
                return [f"{url} does not tell {name}" for name in absent]
            held, busy = [told.get(name, 0.0) for name in _HELD], sum(told[name] for name in _BUSY)
            whole = not busy and client.post(f"{url}/reset_prefix_cache").raise_for_status().json()["success"]
            if whole and not any(held):
                return []
            if time.monotonic() > deadline:
                pool = "whole" if whole else "in use"
                return [
                    f"{url}: blocks {pool}, {held[0]:.0f} held and {held[1]:.0f} in quarantine, {busy:.0f} requests"
                ]
            time.sleep(0.2)


def forget_caches(urls: Iterable[str]) -> None:
    """Empty prefix caches, of either connector's engines; all of their blocks must be free."""
    faults = [fault for url in urls for fault in settle(url, ours=False)]
    if faults:
        raise RuntimeError("; ".join(faults))


def _metrics(client: httpx.Client, url: str) -> Mapping[str, float]:
    """What an engine tells of itself, summed over its ranks."""
    told: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get(f"{url}/metrics").raise_for_status().text):
        for sample in family.samples:
            told[sample.name] = told.get(sample.name, 0.0) + sample.value
    return told


def judge_answer(got: Got, reference: Reference, ends: Ends, audit: Audit) -> None:
    """Is the answer that of the single engine?"""
    tokens = got.ask.max_tokens
    name = f"request {got.ask.number} ({len(got.ask.prompt)} tokens)"
    if len(got.text) != tokens:
        audit.faults.append(f"{name}: {len(got.text)} tokens instead of {tokens}: {got.text!r}")
    elif reference.stable_for(tokens):
        audit.by_text += 1
        if got.text != reference.alone.text[:tokens]:
            audit.faults.append(f"{name}: {got.text!r} instead of {reference.alone.text[:tokens]!r}")
    else:
        audit.by_logprobs += 1
        verdict = compare_logprobs(got.logprobs, score(ends, got.ask.prompt, got.text), FLOAT32_TOLERANCE)
        if not verdict.equal:
            audit.faults.append(f"{name}: {verdict.detail}")


def score(ends: Ends, prompt: str, answer: str) -> list[float]:
    """The log probability that the single engine gives each token of ``answer`` after ``prompt``."""
    body = {"model": ends.model, "prompt": prompt + answer, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    found = httpx.post(f"{ends.prefill}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False)
    entries = found.raise_for_status().json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    ids = [str(3 + byte) for byte in answer.encode()]
    return [float(entry[token]["logprob"]) for entry, token in zip(entries, ids, strict=True)]


def judge_transfers(ends: Ends, before: Iterable[str], audit: Audit) -> None:
    """Are the transfers that were not there ``before`` the same at both ends, and as many as the answers?"""
    transfers = [one for name, one in read_reports([ends.report]).items() if name not in set(before)]
    for transfer in transfers:
        lines = (*transfer.producer, *transfer.consumer)
        if not any(line.stop > line.start for line in lines):
            audit.released += 1
        elif all(line.status == "done" for line in lines) and (transfer.complete or len(ends.told_by) == 1):
            audit.transfers += 1
            audit.nbytes += sum(line.bytes or 0 for line in lines if line.side == min(ends.told_by, key=_SIDES.index))
            if len(ends.told_by) == 2:
                audit.faults += [f"transfer {transfer.transfer_id}: {problem}" for problem in transfer.problems()]
        else:
            audit.unfinished += 1
    finished = audit.ends.get("finished", 0) - audit.too_short
    if audit.transfers < finished:
        audit.faults.append(f"only {audit.transfers} transfers for {finished} answers")
