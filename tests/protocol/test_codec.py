"""Bytes to records: what is taken, what is refused and by which word, and that nothing is refused late."""

import resource

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import (
    VERSION,
    AbortNotice,
    Answer,
    Failure,
    Hello,
    HelloAnswer,
    LayoutAnswer,
    LayoutAsk,
    Note,
    Pull,
    PullExtension,
    PullId,
    Receiver,
    Reply,
    ReplyExtension,
    Side,
    Span,
    Status,
    Table,
    Wanted,
    decode_inbound,
    decode_reply,
    encode,
    make_hello,
    make_hello_answer,
    make_pull,
    make_refusal,
    make_reply,
    number_of,
    numbered,
    puller_of,
    requests_of,
)
from kvferry.protocol.pulls import incarnation_of
from kvferry.protocol.replies import Verdict, judge

RECEIVER = Receiver("10.0.0.2", 5000, tp_rank=1, tp_size=2)
PRODUCER = Side("P", "e1", 0, ("f",))


def extension(**changes: object) -> PullExtension:
    plain = PullExtension(
        version=VERSION,
        pull=7,
        consumer=Side("D", "e9", 1, ("g", "h")),
        producer=PRODUCER,
        transport="cma",
        address="42:1",
        bases=(1 << 40,),
        requests={},
    )
    return msgspec.structs.replace(plain, **changes)


def wanted(request: str = "r", *, tables: tuple[Table, ...] | None = None) -> Wanted:
    given_tables = (Table(16, (4, None, 6)), Table(None, (9,)))
    return Wanted(RequestId(request), TransferId(f"t-{request}"), Span(20, 60), tables or given_tables)


def refused(data: bytes, *, reply: bool = False) -> ProtocolReason:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_reply(data) if reply else decode_inbound(data)
    return caught.value.reason


def changed(message: Pull | Reply | Note, **fields: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message)) | fields)


def test_a_kvferry_pull_keeps_positions_and_holes() -> None:
    pull = make_pull(RECEIVER, [wanted("a"), wanted("b", tables=(Table(0, ()), Table(None, ())))], extension())
    again = decode_inbound(encode(pull))
    assert again == pull
    first, second = requests_of(again) if isinstance(again, Pull) else ()
    assert (first.request, first.transfer, first.span) == ("a", "t-a", Span(20, 60))
    assert first.tables == (Table(16, (4, None, 6)), Table(None, (9,)))
    assert (first.release, second.release) == (False, True)


def test_block_lists_stay_where_upstream_reads_them_and_all_of_ours_is_under_one_key() -> None:
    """Upstream breaks on a third element, or anything but integers, in ``req_blocks``."""
    plain = msgspec.msgpack.decode(encode(make_pull(RECEIVER, [wanted()], extension())))
    assert plain["req_blocks"] == {"r": ["t-r", [[4, 0, 6], [9]]]}
    without = msgspec.msgpack.decode(encode(make_pull(RECEIVER, [wanted()])))
    assert plain.keys() - without.keys() == {"kvferry"}
    assert without.keys() == {
        *("remote_hostname", "remote_port", "remote_tp_size", "remote_tp_rank", "req_blocks"),
        *("kv_caches_base_addr", "block_lens", "kv_block_lens"),
    }


def test_one_endless_name_does_not_cost_an_upstream_pull_its_other_requests() -> None:
    """Upstream puts all that a step begins into one pull, under the names that its clients have chosen."""
    lists = ("t1", ((1,),))
    pull = msgspec.structs.replace(
        make_pull(RECEIVER, [wanted()]), req_blocks={"r" * 600: lists, "b": ("t" * 600, ((2,),)), "c": ("t3", ((3,),))}
    )
    assert [one.transfer for one in requests_of(decode_inbound(encode(pull)))] == ["t1", "t" * 600, "t3"]  # type: ignore[arg-type]


def test_the_number_of_a_pull_is_read_where_the_rest_is_refused() -> None:
    pull = make_pull(RECEIVER, [wanted()], extension(pull=41, version=(2, 0)))
    with pytest.raises(RemoteProtocolError):
        decode_inbound(encode(pull))
    assert number_of(encode(pull)) == 41
    plain = Reply(Status.ERROR, kvferry=ReplyExtension(VERSION, PRODUCER))
    assert numbered(plain, 41) == Reply(Status.ERROR, kvferry=ReplyExtension(VERSION, PRODUCER, pull=41))
    assert numbered(plain, None) is plain
    assert numbered(Reply(Status.ERROR), 41) == Reply(Status.ERROR)
    for other in (b"", b"\xc1", encode(make_pull(RECEIVER, [wanted()])), encode(Note(LayoutAsk(VERSION, 1, ("f",))))):
        assert number_of(other) is None


def test_an_upstream_pull_has_no_positions_and_its_pullers_are_told_apart() -> None:
    pull = make_pull(RECEIVER, [wanted()])
    (request,) = requests_of(pull)
    assert request.span is None
    assert [table.first_token for table in request.tables] == [None, None]
    other = make_pull(Receiver("10.0.0.3", 5000, 0, 2), [wanted()])
    assert puller_of(pull) != puller_of(other)
    assert puller_of(pull).side == puller_of(other).side


def test_a_hello_is_a_pull_of_an_unpaired_rank_and_is_answered_with_an_error() -> None:
    hello = decode_inbound(encode(make_hello(RECEIVER, nonce="n" * 32)))
    assert isinstance(hello, Pull)
    assert isinstance(hello.kvferry, Hello)
    assert (hello.remote_tp_rank, len(hello.req_blocks)) == (-1, 1)
    answer = decode_reply(encode(make_hello_answer(PRODUCER, transport="cma", transport_address="1:2")))
    assert answer.status is Status.ERROR
    assert isinstance(answer.kvferry, HelloAnswer)
    assert (answer.kvferry.producer, answer.kvferry.transport_address) == (PRODUCER, "1:2")


@pytest.mark.parametrize(
    "note",
    [
        Note(LayoutAsk(VERSION, 3, ("f", "g"))),
        Note(AbortNotice(VERSION, PRODUCER, ("t",), expected=4, failed=True)),
    ],
)
def test_notes_come_back_as_they_were(note: Note) -> None:
    assert decode_inbound(encode(note)) == note


def test_placements_travel_as_bytes() -> None:
    answer = Reply(Status.FINISH, kvferry=LayoutAnswer(VERSION, 3, {"f": b"\x00\xff"}))
    assert decode_reply(encode(answer)) == answer


def test_answers_name_each_request_and_say_what_is_quiet() -> None:
    pull = make_pull(RECEIVER, [wanted("a"), wanted("b"), wanted("c")], extension())
    failure = Failure(RequestId("b"), ProtocolReason.TRANSPORT_FAILED, "short")
    pending = Failure(RequestId("c"), ProtocolReason.PLAN_REFUSED)
    action = Answer(PullId(1), ok=(RequestId("a"),), err=(failure,), failed=(pending,), finish=True)
    reply = decode_reply(encode(make_reply(action, pull, PRODUCER)))
    assert (reply.status, reply.ok_reqs, reply.err_reqs) == (Status.FINISH, ("a",), ("b",))
    assert reply.err_msg == "transport-failed: short"
    assert isinstance(reply.kvferry, ReplyExtension)
    assert reply.kvferry.pull == 7
    assert [(part.request, part.start, part.stop) for part in reply.kvferry.parts] == [("a", 20, 60)]
    assert [(one.request, one.quiet) for one in reply.kvferry.failed] == [("b", True), ("c", False)]


@pytest.mark.parametrize(
    ("landing", "final", "verdict"),
    [(False, True, Verdict.REFUSED), (True, True, Verdict.DOUBT), (False, False, Verdict.FAILING)],
    ids=["quiet", "may still land", "not over"],
)
def test_what_may_still_land_is_in_doubt_at_its_consumer(landing: bool, final: bool, verdict: Verdict) -> None:
    pull = make_pull(RECEIVER, [wanted("a")], extension())
    said = (Failure(RequestId("a"), ProtocolReason.TRANSPORT_FAILED, landing=landing),)
    action = Answer(PullId(1), err=said, finish=True) if final else Answer(PullId(1), failed=said)
    reply = decode_reply(encode(make_reply(action, pull, PRODUCER)))
    assert judge(reply, RequestId("a"), incarnation_of(PRODUCER), upstream=False).kind is verdict


def test_toward_upstream_an_answer_has_upstreams_fields_only() -> None:
    pull = make_pull(RECEIVER, [wanted("a")])
    reply = make_reply(Answer(PullId(1), ok=(RequestId("a"),), finish=True), pull, PRODUCER)
    assert msgspec.msgpack.decode(encode(reply)) == {"status": 0, "ok_reqs": ["a"]}
    assert msgspec.msgpack.decode(encode(make_reply(Answer(PullId(1)), pull, PRODUCER))) == {"status": 1}


def test_status_three_answers_only_a_layout_id() -> None:
    """A newer upstream leaves its regions out when it believes that we stored them."""
    pull = make_pull(RECEIVER, [wanted()])
    assert refused(changed(pull, layout_id=5)) is ProtocolReason.LAYOUT_MISS
    assert make_refusal(ProtocolReason.LAYOUT_MISS, "x").status is Status.LAYOUT_MISS
    assert decode_inbound(changed(pull, layout_id=0)) == pull
    with_regions = msgspec.structs.replace(pull, kv_caches_base_addr=(1,))
    assert decode_inbound(changed(with_regions, layout_id=5)) == with_regions
    ours = make_pull(RECEIVER, [wanted()], extension())
    assert make_refusal(ProtocolReason.LAYOUT_MISS, "x", pull=ours).status is Status.ERROR
    assert make_refusal(ProtocolReason.PLAN_REFUSED, "x", pull=pull).status is Status.ERROR


def test_unknown_keys_are_ignored_at_the_top_and_below_ours() -> None:
    pull = make_pull(RECEIVER, [wanted()], extension())
    assert decode_inbound(changed(pull, new_in_some_version={"x": [1]})) == pull
    nested = msgspec.msgpack.decode(encode(pull))
    nested["kvferry"]["lease_of_2031"] = "x"
    assert decode_inbound(msgspec.msgpack.encode(nested)) == pull
    assert decode_reply(changed(Reply(Status.CONTINUE), prefix_replay_checkpoints=None)) == Reply(Status.CONTINUE)


@pytest.mark.parametrize("version", [[1, 0], [1, 9]])
def test_another_minor_version_is_spoken_to(version: list[int]) -> None:
    nested = msgspec.msgpack.decode(encode(make_pull(RECEIVER, [wanted()], extension())))
    nested["kvferry"]["version"] = version
    assert isinstance(decode_inbound(msgspec.msgpack.encode(nested)), Pull)


def test_another_major_version_is_refused_by_name_whatever_its_body() -> None:
    """Its fields may have other types; the version is read before them."""
    body = {"kvferry": {"kind": "pull", "version": [2, 0], "pull": "seven", "consumer": 3}}
    assert refused(msgspec.msgpack.encode(body)) is ProtocolReason.VERSION
    assert refused(msgspec.msgpack.encode(body), reply=True) is ProtocolReason.VERSION


PULL = make_pull(RECEIVER, [wanted()], extension())
NESTED = msgspec.msgpack.decode(encode(PULL))


@pytest.mark.parametrize(
    "change",
    [
        {"remote_port": 65_536},
        {"remote_tp_size": 0},
        {"remote_tp_rank": -1},
        {"remote_tp_rank": "1"},
        {"req_blocks": {}},
        {"req_blocks": {"r": ["t", [[1]], "third"]}},
        {"req_blocks": {"r": ["t", [[-1], [1]]]}},
        {"req_blocks": {"r": ["", [[1], [1]]]}},
        {"req_blocks": {"r": ["t", [[1]]]}},
        {"req_blocks": {"r": ["t", [[1], [1]]], "s": ["t", [[1], [1]]]}},
        {"req_blocks": {"s": ["t", [[1], [1]]]}},
        {"kvferry": NESTED["kvferry"] | {"kind": "something"}},
        {"kvferry": NESTED["kvferry"] | {"kind": "hello"}},
        {"kvferry": NESTED["kvferry"] | {"bases": [-1]}},
        {"kvferry": NESTED["kvferry"] | {"bases": [2**63]}},
        {"kvferry": NESTED["kvferry"] | {"pull": None}},
        {"kvferry": NESTED["kvferry"] | {"requests": {"r": {"start": 9, "stop": 8, "first_tokens": [0, None]}}}},
        {"kvferry": NESTED["kvferry"] | {"requests": {"r": {"start": 0, "stop": 8, "first_tokens": [0]}}}},
        {"kvferry": "none"},
        {"kv_caches_base_addr": [1] * 65_537},
    ],
)
def test_what_contradicts_is_malformed(change: dict[str, object]) -> None:
    assert refused(changed(PULL, **change)) is ProtocolReason.MALFORMED


def test_a_hole_beyond_its_list_is_malformed() -> None:
    nested = msgspec.msgpack.decode(encode(PULL))
    nested["kvferry"]["requests"]["r"]["nulls"] = [[3], []]
    pull = decode_inbound(msgspec.msgpack.encode(nested))
    assert isinstance(pull, Pull)
    with pytest.raises(RemoteProtocolError):
        requests_of(pull)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x93\x01\x02\x03",
        b"\x81\xa1x" + b"\x91" * 1_000_000,
        b"\x81\xa7kvferry" + b"\x81\xa1x" * 1_000_000,
        b"\x81\xaareq_blocks\xdf\xff\xff\xff\xff",
        b"\x81\xb3kv_caches_base_addr\xdd\xff\xff\xff\xff",
        b"\x81\xafremote_hostname\xdb\xff\xff\xff\xff",
        b"\x81\xafremote_hostname\xa2\xff\xfe",
    ],
)
@pytest.mark.parametrize("reply", [False, True])
def test_garbage_is_malformed_at_once_and_costs_nothing(data: bytes, reply: bool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refused(data, reply=reply) is ProtocolReason.MALFORMED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64_000


def test_size_is_checked_before_anything_is_read() -> None:
    data = encode(PULL)
    with pytest.raises(RemoteProtocolError) as caught:
        decode_inbound(data, max_bytes=len(data) - 1)
    assert caught.value.reason is ProtocolReason.LIMIT_EXCEEDED
    with pytest.raises(RemoteProtocolError):
        decode_reply(b"\xc1" * 11, max_bytes=10)


def test_a_refusal_repeats_nothing_that_the_peer_sent() -> None:
    secret = "correct-horse"
    with pytest.raises(RemoteProtocolError) as caught:
        decode_inbound(msgspec.msgpack.encode({"remote_hostname": "h", "remote_port": secret}))
    assert secret not in str(caught.value)


def _values() -> st.SearchStrategy[object]:
    leaf = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8) | st.binary(max_size=8)
    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_to_a_message_gets_past_as_anything_but_a_refusal(data: st.DataObject) -> None:
    message = data.draw(
        st.sampled_from(
            [PULL, Note(AbortNotice(VERSION, PRODUCER, ("t",))), make_reply(Answer(PullId(1)), PULL, PRODUCER)]
        )
    )
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else bytes(raw)
    fields = data.draw(st.dictionaries(st.sampled_from(list(NESTED)), _values()))
    for frame in (cut, msgspec.msgpack.encode(NESTED | fields)):
        for decode in (decode_inbound, decode_reply):
            try:
                decoded = decode(frame)
                if isinstance(decoded, Pull):
                    requests_of(decoded)
            except RemoteProtocolError:
                pass
