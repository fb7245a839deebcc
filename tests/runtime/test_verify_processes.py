"""Integrity on request between two processes, over the real engines: right passes, wrong is found, nothing leaks."""

from collections.abc import Iterator

import pytest

from kvferry.testing.ferry_bench import Ferry
from kvferry.testing.ferry_process import Spec
from kvferry.testing.ports import free_port

TRANSPORTS = [pytest.param("cma"), pytest.param("mooncake", marks=pytest.mark.mooncake)]
TOKENS = 16 * 11 + 5


@pytest.fixture(params=TRANSPORTS)
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Ferry, Ferry]]:
    port = free_port()
    ferries = []
    try:
        ferries.append(Ferry(Spec(role="producer", transport=request.param, port=port)))
        ferries.append(Ferry(Spec(role="consumer", transport=request.param, engine="d", verify="full")))
        yield ferries[0], ferries[1]
    finally:
        for ferry in ferries:
            ferry.close()


def transfer(producer: Ferry, consumer: Ferry, name: str) -> dict[str, object]:
    producer.tell("publish", transfer=name, tokens=TOKENS, salt=3)
    consumer.tell("fetch", transfer=name, tokens=TOKENS, salt=3, source=[producer.engine, producer.url])
    return consumer.wait("ended", name)


def test_right_passes_and_each_kind_of_wrong_is_found(sides: tuple[Ferry, Ferry]) -> None:
    producer, consumer = sides
    misdeeds = [
        ("Corrupt", {"nbytes": 1}),
        ("Corrupt", {"nbytes": 300, "row": 1}),
        ("SwapTargets", {}),
        ("WrongSource", {}),
    ]
    assert transfer(producer, consumer, "first")["fate"] == "done"
    for index, (name, args) in enumerate(misdeeds):
        producer.tell("misdeed", name=name, args=args)
        end = transfer(producer, consumer, f"wrong{index}")
        assert (end["fate"], end["reason"]) == ("failed", "verify-mismatch"), end
        assert "layer l" in str(end["detail"])
        assert transfer(producer, consumer, f"right{index}")["fate"] == "done"
    ours = consumer.audit_until(lambda audit: not audit["held"], seconds=10)
    theirs = producer.audit_until(lambda audit: not audit["held"], seconds=10)
    pages = 2 * -(-TOKENS // 16)
    assert ours["counts"] == {
        "verified_pages": 5 * pages,
        "verified_bytes": 5 * 2 * 2 * TOKENS * 64,
        "verify_mismatches": 4,
    }
    for audit in (ours, theirs):
        assert (audit["free"], audit["wrong"], audit["stray"]) == (audit["total"], 0, 0)
