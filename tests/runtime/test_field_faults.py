"""Faults of the field that live between an engine and the network, each by its id."""

import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from kvferry.ids import RequestId, TransferId
from kvferry.protocol import Fate, Span, Table, Ticket
from kvferry.runtime import Fetch, Publication, Timing
from kvferry.testing.faulty import FailAndWriteLater, Misdeed, Misdeeds, Slow

from .loopback import fetch, join, next_end, publication
from .paired import Pair, paired
from .test_loopback import D_TABLES, P_TABLES, hybrid, rows
from .worlds import BLOCK


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired() as one:
        yield one


def test_c13_a_chunk_is_not_sent_before_the_pass_that_writes_it_has_finished(pair: Pair) -> None:
    """The pull waits already; a kernel fills the blocks for 50 ms after the scheduler said that they are computed."""
    started, done = threading.Event(), threading.Event()
    pages = [pair.source.page(layer, block) for layer in range(4) for block in (3, 4)]
    value = 1

    def compute() -> None:
        started.set()
        pause = threading.Event()
        for page in pages:
            pause.wait(0.05 / len(pages))
            page[:] = value + 100
        done.set()

    tables = (Table(0, (3, 4)), Table(0, (5,)))
    pair.consumer.fetch(
        Fetch(
            Ticket(1), RequestId("d"), TransferId("t"), pair.at, Span(0, 2 * BLOCK), (Table(0, (8, 2)), Table(0, (7,)))
        )
    )
    kernel = threading.Thread(target=compute)
    kernel.start()
    started.wait()
    publication_ = Publication(Ticket(1), RequestId("p"), TransferId("t"), 2 * BLOCK, tables)
    pair.producer.publish(publication_, ready=done.is_set)
    (end,) = pair.ends(1)
    kernel.join()
    assert end.outcome.fate is Fate.DONE
    for layer in range(4):
        for here in (8, 2):
            assert (pair.target.page(layer, here) == value + 100).all(), (layer, here)


def test_c16_eight_threads_use_one_connection_and_no_message_is_torn(pair: Pair) -> None:
    """Requests of eight threads go over one socket, while a stranger sends messages of one to three parts."""
    threads, each = 8, 125
    names = [[f"t{thread}-{index}" for index in range(each)] for thread in range(threads)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(pair.producer.address)
    begin = threading.Barrier(threads + 1)

    def ask(thread: int) -> None:
        begin.wait()
        for index, name in enumerate(names[thread]):
            ticket, block = thread * each + index, 1 + index % 60
            tables = (Table(0, (block,)), Table(0, (block,)))
            pair.producer.publish(Publication(Ticket(ticket), RequestId(f"p{name}"), TransferId(name), BLOCK, tables))
            wanted = (RequestId(f"d{name}"), TransferId(name), pair.at, Span(0, BLOCK), tables)
            pair.consumer.fetch(Fetch(Ticket(ticket), *wanted))

    workers = [threading.Thread(target=ask, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    begin.wait()
    for index in range(600):
        stranger.send_multipart([bytes([index % 256]) * (1 + index)] * (1 + index % 3))
    for worker in workers:
        worker.join()
    ends = pair.ends(threads * each)
    context.destroy(linger=0)
    assert Counter(end.outcome.fate for end in ends) == {Fate.DONE: threads * each}
    assert Counter(end.ticket for end in ends) == dict.fromkeys(range(threads * each), 1)
    assert all(end.request == f"d{end.transfer}" for end in ends), "a reply of another request"
    for block in range(1, 61):
        for layer in range(4):
            assert np.array_equal(pair.target.page(layer, block), pair.source.page(layer, block))


@pytest.mark.parametrize("misdeed", [Slow(1, 0.3), FailAndWriteLater()], ids=["slow link", "says -1, writes later"])
def test_c20_a_deadline_that_passes_leaves_the_destination_held_until_nothing_comes(misdeed: Misdeed) -> None:
    """A deadline of 0.1 s, and an engine that goes on after it: the blocks are ours again only when it cannot."""
    misdeeds = Misdeeds(misdeed)
    pair = join([hybrid()], hybrid(), timing=Timing(pull=0.1), misdeeds=misdeeds)
    pair.source[0].bytes[:] = 7
    pair.call(pair.producers[0].publish, publication(1, "t1", 40, *P_TABLES))
    pair.call(pair.consumer.fetch, fetch(11, "t1", Span(0, 40), *D_TABLES))
    assert next_end(pair).outcome.fate is not Fate.DONE
    assert misdeeds.done == [misdeed], "the writer had begun when the deadline passed"
    assert pair.consumer.quiet.get(timeout=20) == 11
    pair.target.bytes[:] = 0xA5
    misdeeds.write_late()
    assert pair.producers[0].quiet.get(timeout=20) == 1, "and the writer is through with it"
    assert (pair.target.bytes == 0xA5).all(), "a byte came after the blocks were said to be quiet"
    pair.close()


@pytest.mark.parametrize(("theirs", "ours"), [("abc-1", "abc-2"), ("cmpl-x-0-9f3a", "cmpl-x-0-c07d"), ("same", "same")])
def test_p10_two_engines_that_name_a_request_differently_meet_by_the_transfer_id(theirs: str, ours: str) -> None:
    pair = join([hybrid()], hybrid())
    pair.source[0].bytes[:] = np.random.default_rng(1).integers(1, 256, pair.source[0].bytes.size, np.uint8)
    published = Publication(Ticket(1), RequestId(theirs), TransferId("x"), 40, P_TABLES)
    wanted = fetch(11, "x", Span(0, 40), *D_TABLES)
    pair.call(pair.producers[0].publish, published)
    pair.call(
        pair.consumer.fetch,
        Fetch(wanted.ticket, RequestId(ours), wanted.transfer, wanted.source, wanted.span, wanted.tables),
    )
    end = next_end(pair)
    assert (end.outcome.fate, end.request) == (Fate.DONE, ours)
    assert (rows(pair.target.bytes, 0, 8) == rows(pair.source[0].bytes, 0, 3)).all()
    pair.close()
