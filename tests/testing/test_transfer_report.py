"""Reports of two sides: what proves a transfer, and what each missing piece is called."""

from pathlib import Path

import msgspec
import pytest

from kvferry.runtime.report import Line, Report
from kvferry.testing.transfer_report import Transfer, read_reports, wait_for_report, wait_for_reports

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


class TestToUpstream:
    """Its producer calls every rank of such a consumer the first one."""

    SENT = tuple(msgspec.structs.replace(PRODUCER, digest=digest) for digest in ("cd" * 16, "ab" * 16))
    LANDED = tuple(
        msgspec.structs.replace(CONSUMER, consumer_rank=rank, digest=digest)
        for rank, digest in enumerate(("ab" * 16, "cd" * 16))
    )

    def test_the_digests_of_all_ranks_are_compared_at_once(self) -> None:
        assert Transfer("t", self.SENT, self.LANDED).landing_problems() == ()

    def test_a_rank_that_sent_nothing_of_what_it_holds_is_not_counted(self) -> None:
        copy = msgspec.structs.replace(PRODUCER, producer_rank=1, bytes=0)
        assert Transfer("t", (*self.SENT, copy), self.LANDED).landing_problems() == ()

    @pytest.mark.parametrize(
        "landed",
        [LANDED[:1], (), (LANDED[0], LANDED[0]), (LANDED[0], msgspec.structs.replace(LANDED[1], digest=None))],
        ids=["one is missing", "nothing", "another", "no digest"],
    )
    def test_what_has_not_landed_as_it_was_sent_is_told(self, landed: tuple[Line, ...]) -> None:
        (problem,) = Transfer("t", self.SENT, landed).landing_problems()
        assert problem.startswith("digests differ")

    def test_what_failed_or_was_not_reported_is_told(self) -> None:
        failed = msgspec.structs.replace(CONSUMER, status="failed", reason="gone", digest=None, pages=0)
        assert "consumer: failed (gone)" in Transfer("t", self.SENT, (failed,)).landing_problems()
        assert Transfer("t", (), ()).landing_problems() == ("nothing was reported",)
        no_digest = [msgspec.structs.replace(line, digest=None) for line in (PRODUCER, CONSUMER)]
        assert Transfer("t", (no_digest[0],), (no_digest[1],)).landing_problems() == ("no digest",)


def test_a_report_is_waited_for_until_it_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", PRODUCER)
    assert wait_for_report(path, "t", lambda found: found.sent, timeout=0.0).sent == ("ab" * 16,)
    assert wait_for_report(path, "t", lambda found: found.landed, timeout=0.0).landed == ()
    assert wait_for_report(path, "other", lambda found: found.landed, timeout=0.0) == Transfer("other", (), ())
