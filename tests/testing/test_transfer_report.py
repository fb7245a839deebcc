"""Reports of two sides: what proves a transfer, and what each missing piece is called."""

from pathlib import Path

import msgspec
import pytest

from kvferry.runtime.report import Line, Report
from kvferry.testing.transfer_report import Transfer, read_reports, wait_for_reports

PRODUCER = Line(
    transfer_id="t",
    request_id="r-p",
    side="producer",
    engine_id="p",
    peer_engine_id="d",
    producer_rank=0,
    consumer_rank=0,
    start=0,
    stop=300,
    status="done",
    bytes=4096,
    descriptors=3,
    ms=1.5,
    transport="memory",
    digest="ab" * 16,
    pages=2,
)
CONSUMER = msgspec.structs.replace(
    PRODUCER, request_id="r-d", side="consumer", engine_id="d", peer_engine_id="p", ms=2.5
)


def write(path: Path, *lines: Line) -> Path:
    report = Report(str(path))
    for line in lines:
        report.write(line)
    report.close()
    return path


def test_two_sides_with_equal_digests_prove_a_transfer(tmp_path: Path) -> None:
    one = write(tmp_path / "p.jsonl", PRODUCER)
    other = write(tmp_path / "d.jsonl", CONSUMER)
    transfer = wait_for_reports([one, other], ["t"], timeout=0.0)["t"]
    assert transfer.proven
    assert (transfer.nbytes, transfer.descriptors, transfer.ms, transfer.tokens) == (4096, 3, 1.5, 300)


def test_one_file_may_hold_both_sides_and_every_pair_of_ranks(tmp_path: Path) -> None:
    second = [msgspec.structs.replace(line, consumer_rank=1, digest="cd" * 16) for line in (PRODUCER, CONSUMER)]
    path = write(tmp_path / "t.jsonl", PRODUCER, *second, CONSUMER)
    transfer = read_reports([path, path])["t"]
    assert transfer.proven
    assert (transfer.nbytes, transfer.descriptors) == (8192, 6)


def test_a_replica_that_had_nothing_to_send_is_no_half_of_a_transfer(tmp_path: Path) -> None:
    idle = msgspec.structs.replace(PRODUCER, producer_rank=1, start=0, stop=0, bytes=0, digest=None)
    alone = read_reports([write(tmp_path / "idle.jsonl", idle)])["t"]
    assert alone.problems() == ("nothing was reported",)
    transfer = read_reports([write(tmp_path / "t.jsonl", PRODUCER, idle, CONSUMER)])["t"]
    assert transfer.complete
    assert transfer.proven


@pytest.mark.parametrize(
    ("producer", "consumer", "told"),
    [
        ({"digest": "00" * 16}, {}, "0->0: digests differ"),
        ({"digest": None}, {}, "0->0: no digest"),
        ({"status": "failed", "reason": "peer-lost"}, {}, "producer 0->0: failed (peer-lost)"),
        ({}, {"status": "expired"}, "consumer 0->0: expired"),
        ({"consumer_rank": 1}, {}, "0->1: no report of the consumer"),
    ],
)
def test_whatever_is_not_proven_is_told(producer: dict[str, object], consumer: dict[str, object], told: str) -> None:
    transfer = Transfer(
        "t",
        (msgspec.structs.replace(PRODUCER, **producer),),
        (msgspec.structs.replace(CONSUMER, **consumer),),
    )
    assert not transfer.proven
    assert any(told in problem for problem in transfer.problems())


def test_a_transfer_that_nobody_reported_is_not_proven(tmp_path: Path) -> None:
    found = wait_for_reports([tmp_path / "none.jsonl"], ["t"], timeout=0.0)
    assert found["t"].problems() == ("nothing was reported",)
    assert not found["t"].complete
