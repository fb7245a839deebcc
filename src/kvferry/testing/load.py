"""Load on the protocol: thousands of requests at once between two processes, many producers to one consumer.

Nothing here is about bytes a second: the blocks are small. Counted are requests, wrong bytes and blocks, as in
:mod:`kvferry.testing.fault_bench`, and that a limit which is reached is answered by an error and not by silence.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvferry.testing.ferry_bench import Event, Ferry
from kvferry.testing.ferry_process import Spec
from kvferry.testing.ports import free_port

PATIENT: Final = {"resolve": 30.0}
"""A machine that is busy with the load answers late; how fast an absent producer is noticed is not the matter here."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load came to."""

    fates: dict[str, int]
    seconds: float
    wrong: int
    lost: int


def crowd(
    requests: int, *, transport: str = "cma", limits: dict[str, float] | None = None, publish_first: bool = False
) -> Loaded:
    """So many requests at once. Unless ``publish_first`` the pulls come before the first cache is there.

    A cache whose pull was refused waits for another one, until it is withdrawn here.
    """
    producer = Ferry(Spec(role="producer", transport=transport, port=free_port(), blocks=requests, limits=limits or {}))
    consumer = Ferry(
        Spec(role="consumer", timing=PATIENT, transport=transport, engine="d", block_tokens=16, blocks=requests)
    )
    names = [f"load-{index}" for index in range(requests)]
    try:
        began = time.monotonic()
        if publish_first:
            for index, name in enumerate(names):
                producer.tell("publish", transfer=name, tokens=16, salt=index)
        for index, name in enumerate(names):
            consumer.tell("fetch", transfer=name, tokens=16, salt=index, source=["p", producer.url])
        if not publish_first:
            first = consumer.find("ended", seconds=5) if limits else None
            for index, name in enumerate(names):
                producer.tell("publish", transfer=name, tokens=16, salt=index)
            consumer.events[:0] = [first] if first else []
        return _count([producer], consumer, names=names, began=began)
    finally:
        producer.close()
        consumer.close()


def many_to_one(producers: int, requests: int, *, transport: str = "cma") -> Loaded:
    """So many producers, with so many requests each, to one consumer."""
    sources = [
        Ferry(Spec(role="producer", transport=transport, engine=f"p{index}", port=free_port(), blocks=4 * requests))
        for index in range(producers)
    ]
    consumer = Ferry(
        Spec(
            role="consumer",
            timing=PATIENT,
            transport=transport,
            engine="d",
            block_tokens=16,
            blocks=4 * producers * requests,
        )
    )
    try:
        began, names = time.monotonic(), []
        for turn in range(requests):
            for index, source in enumerate(sources):
                name, salt = f"many-{turn}-{index}", 1000 * index + turn
                names.append(name)
                source.tell("publish", transfer=name, tokens=64, salt=salt)
                consumer.tell("fetch", transfer=name, tokens=64, salt=salt, source=[source.engine, source.url])
        return _count(sources, consumer, names=names, began=began)
    finally:
        for ferry in (*sources, consumer):
            ferry.close()


def one_to_many(consumers: int, requests: int, *, transport: str = "cma") -> Loaded:
    """One producer, and so many consumers that want so many requests each."""
    source = Ferry(Spec(role="producer", transport=transport, port=free_port(), blocks=4 * consumers * requests))
    sinks = [
        Ferry(
            Spec(
                role="consumer",
                timing=PATIENT,
                transport=transport,
                engine=f"d{index}",
                block_tokens=16,
                blocks=4 * requests,
            )
        )
        for index in range(consumers)
    ]
    try:
        began = time.monotonic()
        for turn in range(requests):
            for index, sink in enumerate(sinks):
                name, salt = f"many-{turn}-{index}", 1000 * index + turn
                sink.tell("fetch", transfer=name, tokens=64, salt=salt, source=[source.engine, source.url])
                source.tell("publish", transfer=name, tokens=64, salt=salt)
        parts = [
            _count([source], sink, names=[f"many-{turn}-{index}" for turn in range(requests)], began=began)
            for index, sink in enumerate(sinks)
        ]
        fates = sum((Counter(part.fates) for part in parts), Counter())
        wrong, lost = (max(getattr(part, name) for part in parts) for name in ("wrong", "lost"))
        return Loaded(dict(fates), parts[-1].seconds, wrong, lost)
    finally:
        for ferry in (source, *sinks):
            ferry.close()


def _count(producers: list[Ferry], consumer: Ferry, *, names: list[str], began: float) -> Loaded:
    fates: Counter[str] = Counter()
    for _ in names:
        end = consumer.wait("ended", seconds=240)
        if end["fate"] != "done":
            for producer in producers:
                producer.tell("withdraw", transfer=end["transfer"])
        fates[f"{end['fate']} {end['reason']}".strip()] += 1
    seconds = time.monotonic() - began

    def home(found: Event) -> bool:
        return bool(found["free"] == found["total"])

    audits = [ferry.audit_until(home, seconds=60) for ferry in (*producers, consumer)]
    wrong = sum(audit["wrong"] + audit["stray"] for audit in audits)
    return Loaded(dict(fates), seconds, wrong, sum(audit["total"] - audit["free"] for audit in audits))
