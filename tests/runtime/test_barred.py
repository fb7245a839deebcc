"""A consumer that takes its blocks back on a producer's word: no pull that it has given up is served after that."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvferry.errors import ProtocolReason
from kvferry.ids import TransferId
from kvferry.protocol import (
    VERSION,
    Note,
    ProducerLimits,
    Pull,
    Puller,
    PullExtension,
    QuietAnswer,
    QuietAsk,
    ReplyExtension,
    Side,
    Status,
    Table,
    decode_reply,
    encode,
)
from kvferry.runtime.barred import Barred
from kvferry.testing.example_layouts import token_major
from kvferry.testing.faulty import Hang, Misdeeds

from .loopback import Joined, join, publication
from .paired import wait_until
from .test_hostile_peers import a_pull

TABLES = (Table(0, (1, 2)),)
SOON = ProducerLimits(stop_timeout=0.1, fence_after=0.1)


@dataclass
class Peer:
    """A consumer rank as its producer sees it."""

    pair: Joined
    said: dict[bytes, list[bytes]] = field(default_factory=dict)

    def send(self, connection: bytes, data: bytes) -> None:
        self.said.setdefault(connection, []).append(data)

    def address_of(self, connection: bytes) -> str:
        return ""

    def pull(self, number: int, *, connection: bytes = b"pulls", **changes: Any) -> None:
        message = named(a_pull(self.pair, pull=number, **changes), f"t{number}")
        self.pair.call(self.pair.producers[0].on_message, connection, encode(message))

    def gives_up(self, below: int) -> bool:
        """Whether the producer answers that all is quiet."""
        ask = Note(QuietAsk(VERSION, 1, self.pair.consumer._local.side(), below))
        self.pair.call(self.pair.producers[0].on_message, b"asks", encode(ask))
        answer = decode_reply(self.said.pop(b"asks")[-1]).kvferry
        assert isinstance(answer, QuietAnswer)
        return answer.quiet

    def heard(self) -> list[tuple[Status, str | None]]:
        """What its pulls were answered since this was last asked: the status and the reason."""
        replies = map(decode_reply, self.said.pop(b"pulls", []))
        return [(one.status, why(one.kvferry)) for one in replies]


def why(extension: object) -> str | None:
    assert isinstance(extension, ReplyExtension)
    return extension.reason or next((one.reason for one in extension.failed), None)


def named(pull: Pull, transfer: str) -> Pull:
    """The same pull for another transfer."""
    return msgspec.structs.replace(pull, req_blocks={"r": (transfer, pull.req_blocks["r"][1])})


@pytest.fixture
def peer() -> Iterator[Peer]:
    pair = join([token_major(0, 4, 0)], token_major(0, 4, 0), misdeeds=Misdeeds(Hang()), producer_limits=SOON)
    one = Peer(pair)
    pair.call(pair.producers[0].attach, one)
    yield one
    pair.close()


def open_pulls(peer: Peer) -> int:
    return len(peer.pair.producers[0]._pulls)


def test_pulls_that_wait_are_dropped_at_once_and_those_after_them_go_on(peer: Peer) -> None:
    for number in (3, 4, 7):
        peer.pull(number)
    assert peer.gives_up(5)
    assert [reason for _, reason in peer.heard()] == [ProtocolReason.PEER_LOST] * 2
    assert open_pulls(peer) == 1


def test_a_pull_that_comes_after_the_word_is_refused_however_late(peer: Peer) -> None:
    assert peer.gives_up(5)
    peer.pull(4)
    ((status, reason),) = peer.heard()
    assert (status, reason) == (Status.ERROR, ProtocolReason.ABORTED)
    peer.pair.call(peer.pair.producers[0].publish, publication(1, "t4", 8, *TABLES))
    assert (open_pulls(peer), peer.heard()) == (0, [])
    assert not peer.pair.target.bytes.any()
    peer.pull(5)
    assert open_pulls(peer) == 1


def test_an_older_word_does_not_open_what_a_newer_one_has_shut(peer: Peer) -> None:
    assert peer.gives_up(9)
    assert peer.gives_up(2)
    peer.pull(8)
    assert [reason for _, reason in peer.heard()] == [ProtocolReason.ABORTED]


def test_the_word_is_not_given_while_a_byte_may_move(peer: Peer) -> None:
    peer.pair.call(peer.pair.producers[0].publish, publication(1, "t1", 8, *TABLES))
    peer.pull(1)
    assert not peer.gives_up(5)
    wait_until(lambda: peer.gives_up(5))  # by the end of the engine that hangs
    assert open_pulls(peer) == 0
    assert peer.pair.producers[0].quiet.get(timeout=5) == 1


@pytest.mark.parametrize("other", [{"index": 1}, {"epoch": "another life"}, {"engine_id": "another engine"}])
def test_it_is_one_life_of_one_rank_that_gives_up(peer: Peer, other: dict[str, Any]) -> None:
    own = a_pull(peer.pair).kvferry
    assert isinstance(own, PullExtension)
    twice = own.consumer.fingerprints * 2
    peer.pull(1, consumer=msgspec.structs.replace(own.consumer, fingerprints=twice, **other))
    assert peer.gives_up(5)
    assert (open_pulls(peer), peer.heard()) == (1, [])


def test_with_no_room_for_another_promise_none_is_made_and_the_old_ones_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    barred = Barred(most=2)
    known, more = [Puller("d@e", str(rank)) for rank in range(2)], Puller("forged@e", "0")
    assert all(barred.bar(one, 5) for one in known)
    assert not barred.bar(more, 5)
    assert not barred.bar(more, 6)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert barred.bar(known[0], 7)
    assert [barred.bars(one, 4) for one in (*known, more)] == [True, True, False]
    assert barred.bars(known[0], 6)


def test_a_consumer_that_cannot_be_promised_anything_keeps_its_blocks(peer: Peer) -> None:
    producer = peer.pair.producers[0]
    producer._barred = Barred(most=1)
    forged = Note(QuietAsk(VERSION, 1, Side("forged", "e", 0), 9))
    peer.pair.call(producer.on_message, b"asks", encode(forged))
    peer.pull(1)
    assert not peer.gives_up(5)
    assert open_pulls(peer) == 0  # it is dropped all the same
    peer.pull(2)
    peer.pair.call(producer.withdraw, TransferId("t2"))
    assert [reason for _, reason in peer.heard()] == [ProtocolReason.PEER_LOST, ProtocolReason.ABORTED]
