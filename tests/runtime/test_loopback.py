"""Producer and consumer runtimes against each other: right bytes, right ends, blocks back when and only when quiet."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout import Group, Layout, bind_layout
from kvferry.protocol import (
    Fate,
    HelloAnswer,
    Receiver,
    Reply,
    ReplyExtension,
    Span,
    Status,
    Table,
    Ticket,
    Wanted,
    decode_reply,
    encode,
    make_hello,
    make_pull,
)
from kvferry.runtime import Local, RuntimeOptions
from kvferry.runtime.journal import ProducerJournal
from kvferry.runtime.producer import ProducerCore
from kvferry.runtime.producers import RemoteEngine, RemoteRank
from kvferry.runtime.pulling import Pulled, PullMaker
from kvferry.runtime.report import Line, Report
from kvferry.testing.layouts import page, side_by_side, state, worker

from .loopback import SOURCE, Joined, fetch, join, next_end, publication
from .paired import wait_until

BLOCK = 16
NBYTES = 8
PAGE = 2 * BLOCK * NBYTES


def hybrid(num_blocks: int = 16) -> Layout:
    components = side_by_side(
        [
            page("l0", heads=(0, 2, 2), tokens=BLOCK, nbytes=NBYTES, num_blocks=num_blocks),
            page("l1", heads=(0, 2, 2), tokens=BLOCK, nbytes=NBYTES, num_blocks=num_blocks),
            state("l2", part=(0, 4, 4), nbytes=NBYTES, num_blocks=num_blocks, group=1),
        ],
        base=0,
    )
    return worker(components, groups=[Group("attention", BLOCK), Group("state", 4096)])


@pytest.fixture
def joined() -> Iterator[Joined]:
    pair = join([hybrid()], hybrid())
    for memory in pair.source:
        memory.bytes[:] = np.random.default_rng(1).integers(0, 256, memory.bytes.size, np.uint8)
    yield pair
    pair.close()


def rows(memory: np.ndarray, layer: int, block: int) -> np.ndarray:
    """The page of one block of one attention layer."""
    first = layer * 16 * PAGE + block * PAGE
    return memory[first : first + PAGE]


P_TABLES = (Table(0, (3, 4, 9)), Table(0, (5,)))
D_TABLES = (Table(0, (8, 2, 1)), Table(0, (7,)))


def publish_and_fetch(pair: Joined, transfer: str = "t1", *, tokens: int = 40) -> None:
    pair.call(pair.producers[0].publish, publication(1, transfer, tokens, *P_TABLES))
    pair.call(pair.consumer.fetch, fetch(11, transfer, Span(0, tokens), *D_TABLES))


def test_the_right_bytes_arrive_and_both_sides_end(joined: Joined) -> None:
    publish_and_fetch(joined)
    end = next_end(joined)
    assert (end.outcome.fate, end.ticket, end.request) == (Fate.DONE, 11, "d-t1")
    source, target = joined.source[0].bytes, joined.target.bytes
    for layer in (0, 1):
        assert (rows(target, layer, 8) == rows(source, layer, 3)).all()
        assert (rows(target, layer, 2) == rows(source, layer, 4)).all()
    states = 2 * 16 * PAGE
    assert (target[states + 7 * 32 : states + 8 * 32] == source[states + 5 * 32 : states + 6 * 32]).all()
    assert joined.consumer.quiet.get(timeout=5) == 11
    assert joined.producers[0].quiet.get(timeout=5) == 1


def test_a_pull_that_comes_first_waits_for_the_prompt(joined: Joined) -> None:
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, 40), *D_TABLES))
    joined.call(joined.producers[0].expect, TransferId("t1"))
    with pytest.raises(queue.Empty):
        joined.consumer.ended.get(timeout=0.05)
    joined.call(joined.producers[0].publish, publication(1, "t1", 40, *P_TABLES))
    assert next_end(joined).outcome.fate is Fate.DONE


def test_a_release_frees_the_producer_and_moves_nothing(joined: Joined) -> None:
    joined.call(joined.producers[0].publish, publication(1, "t1", 40, *P_TABLES))
    joined.call(joined.consumer.release, TransferId("t1"), RequestId("d-t1"), SOURCE)
    assert joined.producers[0].quiet.get(timeout=5) == 1
    assert not joined.target.bytes.any()


def test_a_state_of_another_position_is_refused(joined: Joined) -> None:
    joined.call(joined.producers[0].publish, publication(1, "t1", 41, *P_TABLES))
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, 40), *D_TABLES))
    end = next_end(joined)
    assert end.outcome.fate is Fate.FAILED
    assert end.outcome.reason is ProtocolReason.PLAN_REFUSED
    assert "41" in end.outcome.detail
    assert joined.consumer.quiet.get(timeout=5) == 11
    assert not joined.target.bytes.any()


def test_a_withdrawn_transfer_fails_its_fetch(joined: Joined) -> None:
    joined.call(joined.producers[0].expect, TransferId("t1"))
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, 40), *D_TABLES))
    joined.call(joined.producers[0].withdraw, TransferId("t1"))
    assert next_end(joined).outcome.fate is not Fate.DONE
    assert joined.consumer.quiet.get(timeout=5) == 11


def test_another_model_is_refused_before_a_byte() -> None:
    pair = join([hybrid()], hybrid(), models=("m1", "m2"))
    publish_and_fetch(pair)
    end = next_end(pair)
    assert end.outcome.reason is ProtocolReason.INCOMPATIBLE_PEER
    assert "'m1'" in end.outcome.detail
    assert "'m2'" in end.outcome.detail
    pair.close()


def test_an_aborted_fetch_gives_its_blocks_back_when_the_producer_says_so(joined: Joined) -> None:
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, 40), *D_TABLES))
    joined.call(joined.producers[0].expect, TransferId("t1"))
    joined.call(joined.consumer.cancel, Ticket(11))
    assert next_end(joined).outcome.fate is Fate.ABORTED
    assert joined.consumer.quiet.get(timeout=5) == 11
    joined.call(joined.producers[0].publish, publication(1, "t1", 40, *P_TABLES))
    assert joined.producers[0].quiet.get(timeout=5) == 1


def test_a_lost_producer_is_fenced_before_blocks_go_back() -> None:
    pair = join([hybrid()], hybrid(), rows_per_poll=1)
    pair.source[0].bytes[:] = 7
    pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), *D_TABLES))
    wait_until(lambda: pair.consumer.open_pulls != ())
    (key,) = pair.consumer.open_pulls
    pair.hub.stop("memory:2")
    pair.call(pair.producers[0].publish, publication(1, "t1", 40, *P_TABLES))
    with pytest.raises(queue.Empty):
        pair.consumer.ended.get(timeout=0.1)
    pair.wire.cut = True
    pair.call(pair.consumer.on_lost, key)
    assert next_end(pair).outcome.reason is ProtocolReason.PEER_LOST
    assert pair.consumer.quiet.get(timeout=5) == 11
    assert not pair.hub.reaches("memory:2")
    pair.close()


@pytest.mark.parametrize("way", ["pull", "note"])
def test_where_no_connection_can_be_made_the_fetch_ends_and_its_blocks_go_back(joined: Joined, way: str) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise RemoteProtocolError(ProtocolReason.PEER_LOST, "no socket for it: Too many open files")

    joined.call(joined.producers[0].withdraw, TransferId("t1"))
    setattr(joined.wire, way, nothing)
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, 40), *D_TABLES))
    assert next_end(joined).outcome.reason in (ProtocolReason.PEER_LOST, ProtocolReason.ABORTED)
    assert joined.consumer.quiet.get(timeout=5) == 11


def test_a_producer_that_has_restarted_at_its_address_is_asked_for_anew(joined: Joined) -> None:
    """It was listed with its old life when it was asked for last, and its connection stays open."""
    old, hub = joined.wire.locals[0], joined.hub
    new = replace(old, incarnation=Incarnation(EngineId("p"), "e9"))
    options = RuntimeOptions(host="loopback", make_transport=hub.transport)

    def restart() -> None:
        core = ProducerCore(new, joined.thread, options, journal=ProducerJournal(new, None))
        core.attach(joined.wire)
        joined.producers[0] = joined.wire.producers[0] = core

    joined.call(restart)
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, 40), *D_TABLES))
    assert next_end(joined).outcome.reason is ProtocolReason.STALE_INCARNATION
    joined.wire.locals[0] = new
    joined.call(joined.producers[0].publish, publication(1, "t2", 40, *P_TABLES))
    joined.call(joined.consumer.fetch, fetch(12, "t2", Span(0, 40), *D_TABLES))
    assert next_end(joined).outcome.fate is Fate.DONE


def test_two_producer_ranks_fill_one_consumer() -> None:
    def half(first: int) -> Layout:
        parts = [page("l0", heads=(first, 1, 2), tokens=BLOCK, nbytes=NBYTES, num_blocks=16)]
        return worker(parts)

    pair = join([half(0), half(1)], worker([page("l0", heads=(0, 2, 2), tokens=BLOCK, nbytes=NBYTES, num_blocks=16)]))
    for index, memory in enumerate(pair.source):
        memory.bytes[:] = index + 1
    for index, producer in enumerate(pair.producers):
        pair.call(producer.publish, publication(index + 1, "t1", 40, Table(0, (3, 4, 9))))
    pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), Table(0, (8, 2, 1))))
    assert next_end(pair).outcome.fate is Fate.DONE
    page_bytes = rows(pair.target.bytes, 0, 8)
    assert (page_bytes[: PAGE // 2] == 1).all()
    assert (page_bytes[PAGE // 2 :] == 2).all()
    assert [producer.quiet.get(timeout=5) for producer in pair.producers] == [1, 2]
    pair.close()


def answer_to(pair: Joined, message: object) -> Reply:
    """What the first producer rank answers to one message of a stranger."""
    answers: list[bytes] = []

    class Ear:
        def address_of(self, connection: bytes) -> str:
            return ""

        def send(self, connection: bytes, data: bytes) -> None:
            assert connection == b"stranger"
            answers.append(data)

    pair.call(pair.producers[0].attach, Ear())
    pair.call(pair.producers[0].on_message, b"stranger", encode(message))
    (answer,) = answers
    return decode_reply(answer)


UPSTREAM = Receiver(hostname="10.0.0.1", port=4000, tp_rank=0, tp_size=1, base_addresses=(4096,), block_lens=(256,))


def test_a_pull_of_upstreams_connector_is_refused_by_name(joined: Joined) -> None:
    pull = make_pull(UPSTREAM, [Wanted(RequestId("r"), TransferId("t"), Span(0, 0), (Table(None, (1, 2)),))])
    answer = answer_to(joined, pull)
    assert answer.status is Status.ERROR
    assert answer.err_msg is not None
    assert answer.err_msg.startswith("incompatible-peer: ")


def test_a_hello_is_answered_with_who_we_are(joined: Joined) -> None:
    answer = answer_to(joined, make_hello(UPSTREAM, "nonce"))
    assert isinstance(answer.kvferry, HelloAnswer)
    assert (answer.kvferry.producer.engine_id, answer.kvferry.producer.epoch) == ("p", "e1")
    assert (answer.kvferry.transport, answer.kvferry.transport_address) == ("memory", "memory:1")


def test_a_pull_for_another_life_of_the_engine_is_refused(joined: Joined) -> None:
    here = bind_layout(joined.target.layout)
    local = Local(Incarnation(EngineId("d"), "e2"), "m", 0, here.binding, (here.placement,), 1, 1)
    rank = RemoteRank("0", here.placement.fingerprint, "memory", "memory:1")
    older = RemoteEngine(Incarnation(EngineId("p"), "e0"), "m", (rank,))
    pulled = Pulled(RequestId("r"), TransferId("t"), Span(0, 40), D_TABLES)
    receiver = joined.hub.transport()
    answer = answer_to(joined, PullMaker(local, "loopback").pull(pulled, older, 0, receiver=receiver, inline=False))
    assert isinstance(answer.kvferry, ReplyExtension)
    assert answer.kvferry.reason == "stale-incarnation"


def test_layouts_that_cannot_be_planned_are_refused_before_a_byte() -> None:
    other = worker([page("l0", heads=(0, 2, 2), tokens=BLOCK, nbytes=2 * NBYTES, num_blocks=16)])
    pair = join([worker([page("l0", heads=(0, 2, 2), tokens=BLOCK, nbytes=NBYTES, num_blocks=16)])], other)
    pair.call(pair.producers[0].publish, publication(1, "t1", 40, Table(0, (3, 4, 9))))
    pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), Table(0, (8, 2, 1))))
    end = next_end(pair)
    assert end.outcome.reason is ProtocolReason.PLAN_REFUSED
    assert "l0" in end.outcome.detail
    assert pair.consumer.quiet.get(timeout=5) == 11
    pair.close()


def test_both_ends_report_the_same_digest(tmp_path: Path) -> None:
    file = tmp_path / "transfers.jsonl"
    report = Report(str(file))
    pair = join([hybrid()], hybrid(), report=report)
    pair.source[0].bytes[:] = np.random.default_rng(2).integers(0, 256, pair.source[0].bytes.size, np.uint8)
    publish_and_fetch(pair)
    assert next_end(pair).outcome.fate is Fate.DONE
    pair.call(pair.producers[0].publish, publication(2, "t2", 40, *P_TABLES))
    pair.call(pair.consumer.release, TransferId("t2"), RequestId("d-t2"), SOURCE)
    assert {pair.producers[0].quiet.get(timeout=5) for _ in range(2)} == {1, 2}
    pair.close()
    report.close()
    lines = [msgspec.json.decode(line, type=Line) for line in file.read_bytes().splitlines()]
    moved = {line.side: line for line in lines if line.transfer_id == "t1"}
    assert moved["producer"].digest is not None
    assert moved["producer"].digest == moved["consumer"].digest
    assert moved["producer"].pages == moved["consumer"].pages == 7
    needed = 2 * 40 * 2 * NBYTES + 4 * NBYTES
    # The planner may carry the rest of the last block where that makes longer runs, and nothing beyond it.
    assert needed <= (moved["producer"].bytes or 0) <= needed + 2 * 8 * 2 * NBYTES
    idle = {line.side: line for line in lines if line.transfer_id == "t2"}
    assert {(line.bytes, line.descriptors, line.status) for line in idle.values()} == {(0, 0, "done")}
