"""The audit of a mixed load sees what it is there to see."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvferry.runtime.report import Line, Side
from kvferry.testing.mixed_load import (
    Ask,
    Audit,
    Ends,
    Got,
    Reference,
    judge_answer,
    judge_transfers,
    open_transfers,
    plan_load,
    settle,
)

ASK = Ask(7, "a prompt", max_tokens=3, stream=False)


def got(text: str) -> Got:
    return Got(ASK, "finished", text, (-0.5,) * len(text))


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends("http://127.0.0.1:1", "http://127.0.0.1:1", tmp_path / "report", tmp_path / "debug", "tiny")


def line(side: Side, transfer: str = "t", *, stop: int = 8, digest: str | None = "d", status: str = "done") -> Line:
    return Line(
        transfer_id=transfer,
        request_id="r",
        side=side,
        engine_id="e",
        peer_engine_id="o",
        producer_rank=0,
        consumer_rank=0,
        start=0,
        stop=stop,
        status=status,
        bytes=stop,
        digest=digest,
    )


def audited(ends: Ends, *lines: Line, finished: int) -> Audit:
    ends.report.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    audit = Audit(ends={"finished": finished})
    judge_transfers(ends, before=(), audit=audit)
    return audit


@pytest.mark.parametrize(("text", "fault"), [("abc", 0), ("abd", 1), ("ab", 1), ("abcd", 1)])
def test_an_answer_is_right_or_a_fault(ends: Ends, text: str, fault: int) -> None:
    audit = Audit()
    judge_answer(got(text), Reference(got("abcxyz"), got("abcuvw")), ends, audit)
    assert len(audit.faults) == fault


def test_what_the_single_engine_does_not_agree_on_is_not_compared_by_text() -> None:
    reference = Reference(got("abcx"), got("abcy"))
    assert reference.stable_for(3)
    assert not reference.stable_for(4)


def test_equal_digests_are_no_fault(ends: Ends) -> None:
    audit = audited(ends, line("producer"), line("consumer"), finished=1)
    assert (audit.transfers, audit.nbytes, audit.faults) == (1, 8, [])


def test_unequal_or_missing_digests_are_faults(ends: Ends) -> None:
    for digest in ("other", None):
        audit = audited(ends, line("producer"), line("consumer", digest=digest), finished=1)
        assert len(audit.faults) == 1


def test_an_answer_without_a_transfer_is_a_fault(ends: Ends) -> None:
    assert audited(ends, finished=1).faults == ["only 0 transfers for 1 answers"]


def test_an_answer_to_a_prompt_that_is_too_short_needs_no_transfer(ends: Ends) -> None:
    audit = Audit(ends={"finished": 1}, too_short=1)
    judge_transfers(ends, before=(), audit=audit)
    assert audit.faults == []


def test_of_vllms_own_connector_one_side_is_told(ends: Ends) -> None:
    alone = replace(ends, told_by=frozenset(("consumer",)))
    audit = audited(alone, line("consumer"), line("consumer", "other", digest=None, status="failed"), finished=1)
    assert (audit.transfers, audit.nbytes, audit.unfinished, audit.faults) == (1, 8, 1, [])
    assert len(audited(alone, line("consumer"), finished=2).faults) == 1
    assert len(audited(ends, line("consumer"), finished=1).faults) == 1


def test_what_was_released_or_failed_counts_for_no_answer(ends: Ends) -> None:
    nothing = [line(side, "released", stop=0, digest=None) for side in ("producer", "consumer")]
    failed = [line("producer", "failed", digest=None, status="aborted")]
    audit = audited(ends, *nothing, *failed, finished=0)
    assert (audit.released, audit.unfinished, audit.transfers, audit.faults) == (1, 1, 0, [])


def test_a_side_that_does_not_tell_its_open_transfers_is_a_fault(ends: Ends) -> None:
    ends.debug.mkdir()
    silent = ["no consumer tells its open transfers", "no producer tells its open transfers"]
    assert open_transfers(ends) == silent
    assert open_transfers(replace(ends, ours=frozenset(("consumer",)))) == silent[:1]


IDLE = ("num_requests_running", "num_requests_waiting")
HELD = ("kvferry_held_blocks", "kvferry_quarantined_blocks")


@pytest.mark.parametrize(("ours", "told"), [(True, (*IDLE, *HELD)), (False, IDLE), (False, (*IDLE, *HELD))])
def test_an_engine_that_tells_of_nothing_in_use_is_no_fault(
    answering: Callable[..., str], told: tuple[str, ...], *, ours: bool
) -> None:
    assert settle(answering(told), ours=ours, seconds=0) == []


@pytest.mark.parametrize("absent", [*IDLE, *HELD])
def test_a_metric_that_an_engine_does_not_tell_is_a_fault(answering: Callable[..., str], absent: str) -> None:
    url = answering([name for name in (*IDLE, *HELD) if name != absent])
    assert settle(url, ours=True, seconds=0) == [f"{url} does not tell vllm:{absent}"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ((*IDLE, "kvferry_held_blocks 3", "kvferry_quarantined_blocks 0"), "blocks whole, 3 held and 0 in quarantine"),
        ((*IDLE, "kvferry_held_blocks 0", "kvferry_quarantined_blocks 2"), "blocks whole, 0 held and 2 in quarantine"),
        (("num_requests_running 1", "num_requests_waiting", *HELD), "blocks in use, 0 held and 0 in quarantine"),
        (("num_requests_running", "num_requests_waiting 1", *HELD), "blocks in use, 0 held and 0 in quarantine"),
    ],
)
def test_what_is_in_use_at_the_end_is_a_fault(answering: Callable[..., str], told: tuple[str, ...], said: str) -> None:
    url = answering(told)
    (fault,) = settle(url, ours=True, seconds=0)
    assert fault.startswith(f"{url}: {said}")


def test_a_plan_of_a_load_has_all_kinds_of_requests() -> None:
    asks = plan_load(200, seed=1)
    assert [ask.number for ask in asks] == list(range(200))
    assert {1, 2, 31, 32, 33, 1999, 2000} <= {len(ask.prompt) for ask in asks}
    assert len({ask.prompt for ask in asks}) < 190
    assert sum(ask.leaves_after is not None for ask in asks) > 10
    assert sum(ask.leaves_at is not None for ask in asks) > 5
    assert 100 < sum(ask.stays for ask in asks) < 180
    assert plan_load(200, seed=2) != asks
