"""A transfer id that was given to several prompts never brings one prompt the cache of another."""

from typing import Any

import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import (
    Answer,
    Failure,
    LeaseEnded,
    Producer,
    ProducerAction,
    PromptMark,
    Published,
    PullArrived,
    PulledRequest,
    Puller,
    PullId,
    Span,
    StartWrite,
    Table,
    Ticket,
    decode_inbound,
    encode,
    make_pull,
    requests_of,
)
from kvferry.protocol.messages import PullExtension, Side
from kvferry.protocol.pulls import Receiver, Wanted

T = TransferId("t")
TABLES = (Table(0, (5, 6)),)
PROMPT = (PromptMark(31, "all but the last"), PromptMark(32, "all"))


def published() -> Published:
    return Published(T, Ticket(1), Span(0, 32), TABLES, 100.0, prompt=PROMPT)


def pull(number: int, prompt: str | None, stop: int = 32, **options: Any) -> PullArrived:
    wanted = PulledRequest(RequestId("d"), T, Span(0, stop), TABLES, prompt=prompt, **options)
    return PullArrived(PullId(number), Puller("D", str(number)), (wanted,), 1)


def feed(machine: Producer, *events: Any) -> list[ProducerAction]:
    actions: list[ProducerAction] = []
    for event in events:
        actions += machine.handle(event, 0.0)
        machine.check_invariants()
    return actions


@pytest.mark.parametrize(("prompt", "stop"), [("all", 32), ("all but the last", 31), (None, 32)])
@pytest.mark.parametrize("pull_first", [False, True])
def test_the_prompt_itself_is_served_at_both_lengths(prompt: str | None, stop: int, pull_first: bool) -> None:
    events = [published(), pull(1, prompt, stop)]
    (start,) = feed(Producer(), *(reversed(events) if pull_first else events))
    assert isinstance(start, StartWrite)


@pytest.mark.parametrize(("prompt", "stop"), [("another", 32), ("all but the last", 32), ("all", 31), ("all", 16)])
@pytest.mark.parametrize("pull_first", [False, True])
def test_another_prompt_is_refused_and_the_right_one_still_served(prompt: str, stop: int, pull_first: bool) -> None:
    machine = Producer()
    events = [published(), pull(1, prompt, stop)]
    (answer,) = feed(machine, *(reversed(events) if pull_first else events))
    assert isinstance(answer, Answer)
    (failure,) = answer.err
    assert (failure.reason, answer.finish) == (ProtocolReason.OTHER_PROMPT, True)
    (start,) = feed(machine, pull(2, "all"))
    assert isinstance(start, StartWrite)


def test_a_refused_repetition_waits_for_nothing() -> None:
    """Two pulls of one rank that both came early: the first is refused, and the second with it."""
    machine = Producer()
    twice = [pull(1, "another"), PullArrived(PullId(2), Puller("D", "1"), pull(1, "another").requests, 1)]
    answers = feed(machine, *twice, published())
    assert [type(one) for one in answers] == [Answer, Answer]
    assert [failure.reason for one in answers if isinstance(one, Answer) for failure in one.err] == [
        ProtocolReason.OTHER_PROMPT,
        ProtocolReason.DUPLICATE_TRANSFER,
    ]


def test_a_release_says_nothing_of_a_prompt_and_counts() -> None:
    actions = feed(Producer(), published(), pull(1, None, release=True))
    assert [one for one in actions if isinstance(one, LeaseEnded)]
    assert not [one for one in actions if isinstance(one, Failure)]


def test_the_digest_travels() -> None:
    side = Side(engine_id="e", epoch="1", index=0)
    extension = PullExtension(
        version=(1, 0), pull=1, consumer=side, producer=side, transport="memory", address="x", bases=(), requests={}
    )
    wanted = Wanted(RequestId("d"), T, Span(0, 32), TABLES, "all")
    sent = make_pull(Receiver(hostname="h", port=1, tp_rank=0, tp_size=1), [wanted], extension)
    (back,) = requests_of(decode_inbound(encode(sent)))  # type: ignore[arg-type]
    assert (back.prompt, back.span) == ("all", Span(0, 32))
