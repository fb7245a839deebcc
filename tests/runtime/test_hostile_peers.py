"""What peers can say wrongly beyond the decoders: each is refused with an answer, and nothing of it stays behind."""

from typing import Any

import msgspec
import pytest

from kvferry.control import Directory, RankCard, Registration
from kvferry.control.bootstrap_client import read_listing
from kvferry.control.directory import RANKS
from kvferry.control.hello import check_greeting
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import RequestId, TransferId
from kvferry.layout import bind_layout, encode_placement
from kvferry.protocol import (
    MAX_NAME,
    VERSION,
    LayoutAnswer,
    LayoutAsk,
    Note,
    ProducerLimits,
    Pull,
    PullExtension,
    Reply,
    ReplyExtension,
    Side,
    Span,
    Status,
    Table,
    Ticket,
    decode_inbound,
    decode_reply,
    encode,
    make_hello_answer,
)
from kvferry.protocol.replies import Verdict, judge
from kvferry.runtime import Fetch
from kvferry.runtime.producers import RemoteEngine, RemoteRank
from kvferry.runtime.pulling import Pulled, PullMaker
from kvferry.testing.example_layouts import token_major
from kvferry.testing.fuzz_targets import read_upstream, targets

from .loopback import SOURCE, Joined, join
from .paired import paired, wait_until
from .test_loopback import answer_to


@pytest.fixture
def pair() -> Any:
    joined = join([token_major(0, 4, 0)], token_major(0, 4, 0))
    yield joined
    joined.close()


def a_pull(pair: Joined, **changes: Any) -> Pull:
    """A right pull of this consumer, then changed in its extension."""
    producer, consumer = pair.wire.locals[0], pair.consumer._local
    rank = RemoteRank("0", producer.placement.fingerprint, "memory", "x")
    engine = RemoteEngine(producer.incarnation, producer.model, (rank,))
    pulled = Pulled(RequestId("r"), TransferId("t"), Span(0, 8), (Table(0, (1, 2)),))
    receiver = pair.hub.transport()
    pull = PullMaker(consumer, "127.0.0.1").pull(pulled, engine, 0, receiver=receiver, inline=True)
    assert isinstance(pull.kvferry, PullExtension)
    return msgspec.structs.replace(pull, kvferry=msgspec.structs.replace(pull.kvferry, **changes))


class Ear:
    """An outlet that keeps what is sent."""

    def __init__(self, heard: list[bytes]) -> None:
        self.send = lambda connection, data: heard.append(data)

    def address_of(self, connection: bytes) -> str:
        return ""


def refusal(pair: Joined, message: object) -> str:
    reply = answer_to(pair, message)
    assert reply.status is Status.ERROR
    assert isinstance(reply.kvferry, ReplyExtension)
    assert not pair.producers[0]._pulls
    return reply.kvferry.reason or ""


def test_a_hole_outside_its_list_is_refused_and_nothing_waits(pair: Joined) -> None:
    pull = a_pull(pair)
    positions = pull.kvferry.requests["r"]  # type: ignore[union-attr]
    wrong = msgspec.structs.replace(positions, nulls=((7,),))
    assert refusal(pair, a_pull(pair, requests={"r": wrong})) == ProtocolReason.MALFORMED


def test_a_placement_under_another_name_is_refused_before_it_is_built(pair: Joined) -> None:
    name = "0" * 64
    other = encode_placement(pair.wire.locals[0].placement)
    side = replace_side(a_pull(pair), (name,))
    assert refusal(pair, a_pull(pair, consumer=side, placements={name: other})) == ProtocolReason.MALFORMED
    assert refusal(pair, a_pull(pair, consumer=side, placements={name: b"\xdd\xff\xff\xff\xff"})) == (
        ProtocolReason.MALFORMED
    )


def replace_side(pull: Pull, fingerprints: tuple[str, ...]) -> Side:
    assert isinstance(pull.kvferry, PullExtension)
    return msgspec.structs.replace(pull.kvferry.consumer, fingerprints=fingerprints)


def test_placements_that_nobody_named_are_not_kept(pair: Joined) -> None:
    """A pull may carry thousands of them; only those of its own side are looked at."""
    many = {f"{number:064x}": b"junk" for number in range(3000)}
    named = a_pull(pair).kvferry
    assert isinstance(named, PullExtension)
    pull = a_pull(pair, placements=many | named.placements)
    pair.call(pair.producers[0].on_message, b"stranger", encode(pull))
    assert len(pair.producers[0]._pulls) == 1
    assert len(pair.producers[0]._plans.missing(many)) == len(many)


def test_a_refusal_names_the_pull_also_where_it_cannot_be_read(pair: Joined) -> None:
    """An answer that names none is lost on a connection of many pulls, and its producer taken for silent."""
    good = a_pull(pair, pull=41)
    (blocks,) = good.req_blocks.values()
    for bad in (
        msgspec.structs.replace(good, req_blocks={"r": ("t" * (2 << 20), blocks[1])}),
        msgspec.structs.replace(good, req_blocks={"r" * (MAX_NAME + 1): blocks}),
        msgspec.structs.replace(good, remote_port=1 << 20),
        a_pull(pair, pull=41, version=(2, 0)),
    ):
        reply = answer_to(pair, bad)
        assert isinstance(reply.kvferry, ReplyExtension)
        assert (reply.status, reply.kvferry.pull) == (Status.ERROR, 41)
        pull_verdict = judge(reply, RequestId("r"), pair.wire.locals[0].incarnation, upstream=False)
        assert pull_verdict.kind is Verdict.REFUSED


def test_a_request_that_no_message_can_hold_fails_at_once_and_alone() -> None:
    """Silence about it would end in a fence, and a fence fails all that is open with the same producer."""
    tables, long = (Table(0, (8, 2)), Table(0, (7,))), "t" * (MAX_NAME + 1)
    with paired() as real:
        for ticket, transfer in enumerate(("other", long)):
            wanted = (RequestId(f"d{ticket}"), TransferId(transfer), real.at, Span(0, 20))
            real.consumer.fetch(Fetch(Ticket(ticket), *wanted, tables))
        (end,) = real.ends(1, seconds=5)
        assert (end.ticket, end.outcome.reason) == (1, ProtocolReason.MALFORMED)
        wait_until(lambda: real.consumer.take_quiet() == [1])
        real.producer.withdraw(TransferId("other"))
        (end,) = real.ends(1, seconds=5)
        assert (end.ticket, end.outcome.reason) == (0, ProtocolReason.ABORTED)


@pytest.mark.parametrize(
    "bases",
    [(), (0, 0), ((1 << 63) - 1,), ((1 << 63) - 4096,)],
    ids=["none", "too many", "at the end", "past the end"],
)
def test_bases_that_are_no_binding_are_refused(pair: Joined, bases: tuple[int, ...]) -> None:
    assert refusal(pair, a_pull(pair, bases=bases)) == ProtocolReason.PLAN_REFUSED


def test_a_wrong_repeat_of_a_pull_that_is_not_over_is_not_answered(pair: Joined) -> None:
    """A refusal says that nothing is written for the pull, and its sender would free the blocks of the first."""
    producer, good, wrong = pair.producers[0], a_pull(pair), a_pull(pair, bases=())
    heard: list[bytes] = []
    pair.call(producer.attach, Ear(heard))
    pair.call(producer.on_message, b"stranger", encode(good))
    pair.call(producer.on_message, b"stranger", encode(wrong))
    assert (heard, len(producer._pulls)) == ([], 1)
    pair.call(producer.withdraw, TransferId("t"))
    assert [decode_reply(one).status for one in heard] == [Status.FINISH]
    assert refusal(pair, wrong) == ProtocolReason.PLAN_REFUSED


def test_a_repeat_without_room_for_it_is_not_answered_and_not_kept() -> None:
    pair = join([token_major(0, 4, 0)], token_major(0, 4, 0), producer_limits=ProducerLimits(pulls=1))
    producer, heard = pair.producers[0], list[bytes]()
    pair.call(producer.attach, Ear(heard))
    for _ in range(3):
        pair.call(producer.on_message, b"stranger", encode(a_pull(pair)))
    assert (heard, len(producer._pulls)) == ([], 1)
    pair.call(producer.withdraw, TransferId("t"))
    (last,) = map(decode_reply, heard)
    assert (last.status, last.err_reqs, len(producer._pulls)) == (Status.FINISH, ("r",), 0)
    pair.close()


def test_a_layout_ask_is_answered_with_our_own_placements_each_once(pair: Joined) -> None:
    own = pair.wire.locals[0].placement.fingerprint
    pair.producers[0]._plans.learn(*_foreign())
    asked = (own,) * 5000 + (_foreign()[0], "nobody's")
    reply = answer_to(pair, Note(LayoutAsk(VERSION, 1, asked)))
    assert isinstance(reply.kvferry, LayoutAnswer)
    assert list(reply.kvferry.placements) == [own]
    assert len(encode(reply)) < 10_000


def _foreign() -> tuple[str, bytes]:
    placement = bind_layout(token_major(0, 2, 0)).placement
    return placement.fingerprint, encode_placement(placement)


def test_a_consumer_keeps_no_placement_that_it_did_not_ask_for(pair: Joined) -> None:
    async def answers(rank: RemoteRank, fingerprints: tuple[str, ...]) -> dict[str, bytes]:
        name, data = _foreign()
        own = pair.wire.locals[0].placement
        return {own.fingerprint: encode_placement(own), name: data}

    pair.wire.placements = answers  # type: ignore[method-assign]
    engine = pair.thread.run(pair.wire.find(SOURCE), timeout=5)
    pair.thread.run(pair.consumer._resolver.plan_with(engine), timeout=5)
    assert pair.consumer._resolver._plans.missing([_foreign()[0]])


def test_a_hello_answer_of_a_rank_that_is_not_there_is_refused() -> None:
    answer = make_hello_answer(Side("p", "e", 3, ("f",)), transport="cma", transport_address="x")
    with pytest.raises(RemoteProtocolError) as caught:
        check_greeting(answer, "tcp://127.0.0.1:1")
    assert caught.value.reason is ProtocolReason.MALFORMED
    check_greeting(Reply(Status.ERROR, err_msg="upstream's word"), "tcp://127.0.0.1:1")


@pytest.mark.parametrize("workers", [{}, {"0": {}}, {"0": {"0": "tcp://a:1"}, "1": {}}, {"5": {"0": "tcp://a:1"}}])
def test_a_listing_without_a_grid_of_ranks_is_refused(workers: dict[str, Any]) -> None:
    body = msgspec.json.encode({"0": {"engine_id": "p", "worker_addr": workers}})
    with pytest.raises(RemoteProtocolError) as caught:
        read_listing(body, "http://x")
    assert caught.value.reason is ProtocolReason.MALFORMED


def test_secure_addresses_are_addresses_too() -> None:
    card = RankCard(VERSION, "e", 1, 1, "f", secure="http://10.0.0.1/x")
    with pytest.raises(RemoteProtocolError):
        Directory().register(Registration("p", 0, 0, 0, "tcp://127.0.0.1:1", card))


def test_the_directory_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.control.directory.RANKS", 40)
    directory = Directory()
    for rank in range(40):
        directory.register(Registration("p", 0, rank, 0, "tcp://127.0.0.1:1"))
    with pytest.raises(RemoteProtocolError) as caught:
        directory.register(Registration("p", 0, 40, 0, "tcp://127.0.0.1:1"))
    assert caught.value.reason is ProtocolReason.LIMIT_EXCEEDED
    directory.register(Registration("p", 0, 7, 0, "tcp://127.0.0.1:1"))
    assert RANKS > 40


@pytest.mark.parametrize(
    "changes",
    [{"block_lens": (0, 2048)}, {"kv_block_lens": (2048, 0)}, {"block_lens": (-(1 << 63), 2048)}]
    + [{"kv_caches_base_addr": (-4096, 4096)}],
)
def test_a_pull_in_upstreams_form_with_impossible_tensors_is_refused(changes: dict[str, Any]) -> None:
    (good, *_) = next(one.good for one in targets() if one.name == "upstream pull")
    read_upstream(good)
    message = decode_inbound(good)
    assert isinstance(message, Pull)
    with pytest.raises(RemoteProtocolError) as caught:
        read_upstream(encode(msgspec.structs.replace(message, **changes)))
    assert caught.value.reason is ProtocolReason.MALFORMED
