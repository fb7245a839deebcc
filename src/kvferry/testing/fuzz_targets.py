"""Every reader of foreign bytes, as a function of those bytes, with good messages to start from.

A target takes bytes, does all that kvferry does with them before it trusts them, and either returns or raises a
:class:`~kvferry.errors.FerryError`. Anything else that it raises is a finding. The targets go past the decoders: a pull
is admitted, its tables are bound to descriptors and these are checked against what the puller has registered; a reply
is judged and its parts are counted; a registration goes into a directory that is then listed and read back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import msgspec

from kvferry.control.bootstrap import Release, decode_body
from kvferry.control.bootstrap_client import read_listing
from kvferry.control.directory import Directory, RankCard, Registration
from kvferry.control.doors import CurveKeys, ListedDoor, SecureDoor
from kvferry.control.hello import check_greeting
from kvferry.control.networks import Networks
from kvferry.control.secret import Secret
from kvferry.control.signing import HEADER, Signer, Verifier
from kvferry.control.sockets import check_endpoint
from kvferry.errors import FerryError
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout import bind_layout, decode_placement, encode_layout, encode_placement, parse_layout
from kvferry.plan import BlockTable, TransferRequest, encode_request, parse_request
from kvferry.protocol import (
    VERSION,
    AbortNotice,
    Hello,
    LayoutAnswer,
    LayoutAsk,
    Note,
    Pull,
    QuietAnswer,
    QuietAsk,
    Receiver,
    ReleaseNotice,
    Reply,
    ReplyExtension,
    Span,
    Status,
    Table,
    decode_inbound,
    decode_reply,
    encode,
    make_hello,
    make_hello_answer,
    requests_of,
)
from kvferry.protocol.coverage import Coverage
from kvferry.protocol.messages import Failed, PartDone
from kvferry.protocol.replies import judge
from kvferry.runtime.admission import admit
from kvferry.runtime.binding import check_covered, request_for
from kvferry.runtime.options import PRIVATE_NETWORKS, UpstreamPeers
from kvferry.runtime.plans import Plans
from kvferry.runtime.producers import RemoteEngine, RemoteRank
from kvferry.runtime.pulling import Pulled, PullMaker
from kvferry.runtime.sides import Local
from kvferry.runtime.stories import Answer, read_line
from kvferry.runtime.targets import check_numeric_target
from kvferry.runtime.upstream_serving import UpstreamCounter
from kvferry.testing.example_layouts import hybrid, token_major
from kvferry.testing.layouts import page, side_by_side, worker
from kvferry.testing.mutations import Form
from kvferry.testing.upstream_peer import caches_of, pull_of, receiver_of
from kvferry.transport.proc import CmaAddress
from kvferry.transport.ranges import RegionTable, check_descriptors

MAX_DESCRIPTORS: Final = 100_000
PRODUCER: Final = Incarnation(EngineId("p"), "e1")


@dataclass(frozen=True, slots=True)
class Target:
    """One reader."""

    name: str
    read: Callable[[bytes], object]
    good: tuple[bytes, ...]
    form: Form = "msgpack"


class _Receiving:
    """The transport of a consumer, as far as a pull tells of it."""

    name = "memory"

    def address(self) -> str:
        return "127.0.0.1:15000"


@cache
def _locals() -> tuple[Local, Local]:
    """A producer and a consumer of a hybrid model, each of one rank."""
    here, there = bind_layout(hybrid(4096)), bind_layout(hybrid(1 << 20))
    producer = Local(PRODUCER, "m", 0, here.binding, (here.placement,), 1, 1)
    return producer, Local(Incarnation(EngineId("d"), "e2"), "m", 0, there.binding, (there.placement,), 1, 1)


def _pulls() -> tuple[bytes, ...]:
    producer, consumer = _locals()
    rank = RemoteRank("tcp://127.0.0.1:1", producer.placement.fingerprint, "memory", "127.0.0.1:2")
    engine = RemoteEngine(PRODUCER, "m", (rank,))
    maker = PullMaker(consumer, "127.0.0.1")
    tables = (Table(0, (1, None)), Table(None, (3,)))
    pulled = Pulled(RequestId("r"), _transfer(), Span(0, 16), tables, "0" * 32)
    pulls = [maker.pull(pulled, engine, 0, receiver=_Receiving(), inline=inline) for inline in (False, True)]  # type: ignore[arg-type]
    return tuple(encode(one) for one in pulls)


def _transfer() -> TransferId:
    return TransferId("t" * 32)


def _notes() -> tuple[bytes, ...]:
    side = _locals()[1].side()
    notes = (
        LayoutAsk(VERSION, 3, side.fingerprints),
        AbortNotice(VERSION, side, ("t",), expected=2, failed=True),
        ReleaseNotice(VERSION, ("t", "u")),
        QuietAsk(VERSION, 4, side, 9),
    )
    hello = make_hello(Receiver("127.0.0.1", 0, tp_rank=0, tp_size=1), nonce="0" * 32)
    upstream = Pull(
        "127.0.0.1", 9, 2, 1, {"r": ("t", ((1, 2), (3,)))}, (4096, 8192), (64, 64), (32, 32), ("a", "b"), (0, 1)
    )
    assert isinstance(hello.kvferry, Hello)
    return (*(encode(Note(one)) for one in notes), encode(hello), encode(upstream))


def _replies() -> tuple[bytes, ...]:
    side = _locals()[0].side()
    parts = (PartDone("r", 0, 8, 1, (0,)), PartDone("r", 8, 16))
    told = ReplyExtension(VERSION, side, 7, parts, (Failed("q", "expired", True, "x"),), None, ("f",))
    placements = {side.fingerprints[0]: encode_placement(_locals()[0].placement)}
    replies = (
        Reply(Status.FINISH, ("r",), ("q",), "no", told),
        Reply(Status.ERROR, err_msg="no", kvferry=ReplyExtension(VERSION, side, 7, reason="unauthorized")),
        Reply(Status.FINISH, ("r",), (), None),
        Reply(Status.FINISH, kvferry=LayoutAnswer(VERSION, 3, placements)),
        Reply(Status.FINISH, kvferry=QuietAnswer(VERSION, 3, True)),
        make_hello_answer(side, transport="cma", transport_address="cma:1:2:3:x:7f00"),
    )
    return tuple(encode(one) for one in replies)


def _registration(**card: str) -> Registration:
    kvferry = RankCard(VERSION, "e1", 1, 1, "f" * 64, "m", "cma", "cma:1:2:3:x:7f00", ("abort",), **card)
    return Registration("p", 0, 0, 0, "tcp://127.0.0.1:7000", kvferry)


# --------------------------------------------------------------------------------------------------- the readers


def read_inbound(data: bytes) -> None:
    """What a producer's listener gets, up to the descriptors that would be written."""
    message = decode_inbound(data, max_bytes=1 << 20)
    if not isinstance(message, Pull) or isinstance(message.kvferry, Hello):
        return
    producer, consumer = _locals()
    plans = Plans((*producer.placements, *consumer.placements))
    admitted = admit(message, producer, plans, transport="memory")
    check_numeric_target(admitted.address, PRIVATE_NETWORKS)
    source = (Table(0, (2,)), Table(None, (1,)))
    for wanted in requests_of(message):
        if wanted.span is None:
            continue
        check_covered(wanted.span, Span(0, 16), producer.placement)
        request = request_for(wanted.span, source, wanted.tables)
        admitted.plan.check(request)
        pair = admitted.plan.pair(0, admitted.consumer)
        if pair is not None:
            rows = pair.bind(request, src=producer.binding, dst=admitted.binding, max_descriptors=MAX_DESCRIPTORS)
            check_descriptors(rows, RegionTable.of(producer.regions), RegionTable.of(admitted.regions))


def read_upstream(data: bytes) -> None:
    """A pull in the form of vLLM's own connector, where such peers are welcome."""
    message = decode_inbound(data, max_bytes=1 << 20)
    if not isinstance(message, Pull) or message.kvferry is not None:
        return
    here = _upstream_local()
    peers = UpstreamPeers(everywhere=True)
    admitted = UpstreamCounter(here, Plans(here.placements), peers).admit(message, transport="mooncake")
    check_numeric_target(admitted.address, PRIVATE_NETWORKS)
    published = Span(0, 32)
    for wanted in requests_of(message):
        placed = wanted if admitted.lists is None else admitted.lists(wanted, published, published.stop)
        if placed.span is None:
            continue
        check_covered(placed.span, published, here.placement)
        request = request_for(placed.span, (Table(0, (1, 2)),), placed.tables)
        admitted.plan.check(request)
        pair = admitted.plan.pair(admitted.producer, admitted.consumer)
        if pair is not None:
            rows = pair.bind(request, src=here.binding, dst=admitted.binding, max_descriptors=MAX_DESCRIPTORS)
            check_descriptors(rows, RegionTable.of(here.regions), RegionTable.of(admitted.regions))


@cache
def _upstream_local() -> Local:
    pages = [page(f"model.layers.{n}.attn", heads=(0, 2, 2), tokens=16, nbytes=64) for n in range(2)]
    layout = worker(side_by_side(pages, base=4096))
    bound = bind_layout(layout)
    caches = caches_of(layout, block_size=16)
    return Local(PRODUCER, "m", 0, bound.binding, (bound.placement,), 1, 1, caches)


def _upstream_pulls() -> tuple[bytes, ...]:
    caches = _upstream_local().caches
    assert caches is not None
    receiver = receiver_of(caches, "127.0.0.1:15000")
    fetches: dict[str, tuple[str, list[list[int]]]] = {"r": ("t" * 32, [[3, 4]])}
    releases: dict[str, tuple[str, list[list[int]]]] = {"r": ("t", [[]]), "q": ("u", [[1]])}
    return tuple(encode(pull_of(receiver, one)) for one in (fetches, releases))


def read_reply(data: bytes) -> None:
    """What comes to a consumer's pull."""
    reply = decode_reply(data, max_bytes=1 << 20)
    for upstream in (False, True):
        verdict = judge(reply, RequestId("r"), PRODUCER, upstream=upstream)
        coverage = Coverage(Span(0, 16), groups=2)
        for part in verdict.parts:
            coverage.add(part)
    if isinstance(reply.kvferry, LayoutAnswer):
        plans = Plans()
        for name, placement in reply.kvferry.placements.items():
            plans.learn(name, placement)
    check_greeting(reply, "tcp://127.0.0.1:1")


def read_registration(data: bytes) -> None:
    """What a bootstrap service is told, and what its clients then read of it."""
    directory = Directory()
    directory.register(_registration())
    directory.register(decode_body(data, Registration))
    read_listing(msgspec.json.encode(directory.listing()), "http://127.0.0.1:1")


def read_order_header(data: bytes) -> None:
    """The header of a signed order, as Starlette gives it."""
    verifier = Verifier(_secret(), clock=lambda: 1_800_000_000.0)
    verifier.check(data.decode("latin-1"), method="POST", path="/register", body=b"{}")


def read_door_question(data: bytes) -> None:
    """What libzmq asks about a connection: parts divided by NUL bytes."""
    address, _, rest = data.partition(b"\0")
    credentials = [rest[at : at + 32] for at in range(0, len(rest), 32)]
    for guard in (SecureDoor(_keys()), ListedDoor(PRIVATE_NETWORKS)):
        for mechanism in (b"CURVE", b"NULL", data[:20]):
            guard.refusal(address.decode("ascii", "replace"), mechanism, credentials)


def read_addresses(data: bytes) -> None:
    """Addresses as peers and operators spell them: each kind, so that one refusal does not hide the others."""
    text = data.decode("utf-8", "replace")
    outcomes: list[FerryError] = []
    for read in (
        lambda: CmaAddress.parse(text),
        lambda: check_numeric_target(text, PRIVATE_NETWORKS),
        lambda: check_endpoint(text),
        lambda: Networks.parse([text], option="write_targets"),
    ):
        try:
            read()
        except FerryError as error:
            outcomes.append(error)
    if outcomes:
        raise outcomes[0]


def read_story(data: bytes) -> None:
    """A line to the debug door, and an answer to the command."""
    read_line(data)
    try:
        msgspec.json.decode(data, type=Answer)
    except msgspec.MsgspecError:
        return  # what the command does with it


@cache
def _secret() -> Secret:
    return Secret.of(b"0123456789abcdef0123456789abcdef", source="fuzz")


@cache
def _keys() -> CurveKeys:
    return CurveKeys.of(_secret())


@cache
def targets() -> tuple[Target, ...]:
    """All of them."""
    layouts = (encode_layout(hybrid()), encode_layout(token_major(0, 2, 4096)))
    placements = tuple(encode_placement(bind_layout(parse_layout(one)).placement) for one in layouts)
    request = TransferRequest(0, 16, (BlockTable.of([1, None], first_token=0),), (BlockTable.of([2]),))
    signer = Signer(_secret(), clock=lambda: 1_800_000_000.0)
    directory = Directory()
    for card in ({}, {"secure": "tcp://127.0.0.1:9", "keys": "0" * 16}):
        directory.register(_registration(**card))
    listing = msgspec.json.encode(directory.listing())
    release = msgspec.json.encode({"engine_id": "p", "transfer_ids": ["t"], "reason": "x"})
    header = signer.headers("POST", "/register", b"{}")[HEADER].encode()
    addresses = (
        b"127.0.0.1:80",
        b"[fd00::1]:80",
        b"tcp://[::1]:5",
        b"cma:12:34:56:boot:7f00",
        b"10.0.0.0/8",
        b"fe80::/10",
    )
    story = msgspec.json.encode(Answer("p", "e", "producer", 0, "t", ()))
    return (
        Target("pull", read_inbound, _pulls()),
        Target("upstream pull", read_upstream, _upstream_pulls()),
        Target("note", read_inbound, _notes()),
        Target("reply", read_reply, _replies()),
        Target("placement", decode_placement, placements),
        Target("registration", read_registration, (msgspec.json.encode(_registration()),), form="json"),
        Target("release", lambda data: decode_body(data, Release), (release,), form="json"),
        Target("listing", lambda data: read_listing(data, "http://x:1"), (listing,), form="json"),
        Target("layout file", _read_layout, layouts, form="json"),
        Target("request file", parse_request, (encode_request(request),), form="json"),
        Target("signed order", read_order_header, (header,), form="text"),
        Target("door", read_door_question, (b"127.0.0.1\0" + bytes(32), b"::1\0"), form="text"),
        Target("address", read_addresses, addresses, form="text"),
        Target("story", read_story, (story,), form="json"),
    )


def _read_layout(data: bytes) -> None:
    bind_layout(parse_layout(data))
