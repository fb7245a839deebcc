"""vLLM's own connector as a scripted peer, both ways: real sockets, real Mooncake engines, no vLLM."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvferry.control import BootstrapService, Registration
from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import Fate, FetchEnded, ProducerLimits, Source, Span, Status, Table, Ticket, encode
from kvferry.runtime import ConsumerRuntime, Fetch, Local, ProducerRuntime, Publication, RuntimeOptions
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.options import UpstreamPeers
from kvferry.runtime.stories import ask_stories
from kvferry.runtime.upstream_caches import Declared
from kvferry.testing.ports import free_port
from kvferry.testing.upstream_peer import Deed, Held, ScriptedConsumer, ScriptedProducer, caches_of, pull_of

from .over_sockets import OverSockets
from .paired import wait_until
from .worlds import BLOCK, LAYERS, World, local_side, options_for

pytestmark = pytest.mark.mooncake

TOKENS = 40
P_BLOCKS, D_BLOCKS = (3, 9, 4), (7, 1, 12)
P_STATE, D_STATE = 5, 6


def side(world: World, engine: str, *, declared: Declared | None = None, whole: bool = False) -> Local:
    local = local_side(world, engine=engine, epoch="e")
    caches = caches_of(world.layout, block_size=BLOCK, declared=declared)
    return replace(local, caches=replace(caches, whole_blocks=whole))


def allowing(options: RuntimeOptions) -> RuntimeOptions:
    return replace(options, upstream_peers=UpstreamPeers.parse("allow"))


@contextmanager
def lines_of(logger: str) -> Iterator[list[logging.LogRecord]]:
    """What is logged there, also where a connector in this process has sent kvferry's lines another way."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger(logger).removeHandler(handler)


def warned(records: list[logging.LogRecord]) -> list[str]:
    """Warnings of what is assumed about a peer."""
    said = [one.getMessage() for one in records if one.levelno == logging.WARNING]
    return [text for text in said if "assumed" in text]


SERVING = "kvferry.runtime.upstream_serving"
"""The logger of these, both ways."""


# ------------------------------------------------------------------------------------ our producer, their consumer


class Serving:
    """Our producer, and a scripted consumer rank."""

    def __init__(self, options: RuntimeOptions, *, declared: Declared | None = None, whole: bool = False) -> None:
        heads = 1 if whole else 2  # of two heads a plan writes the rest along, since that takes fewer copies
        self.source, self.target = World.build("small", seed=1, heads=heads), World.build("small", heads=heads)
        self.runtime = ProducerRuntime(side(self.source, "p", declared=declared, whole=whole), options)
        self.consumer = ScriptedConsumer(self.target.layout, caches_of(self.target.layout, block_size=BLOCK))

    def publish(self, transfer: str, ticket: int = 1, prompt_tokens: int | None = None) -> None:
        tables = (Table(0, P_BLOCKS), Table(None, (P_STATE,)))
        self.runtime.publish(
            Publication(
                Ticket(ticket),
                RequestId("p"),
                TransferId(transfer),
                TOKENS,
                tables,
                prompt_tokens=prompt_tokens,
            )
        )

    def ask(self, lists: tuple[tuple[int, ...], ...], transfer: str = "t") -> "tuple[Status, list[str], list[str]]":
        socket = self.consumer.pull(self.runtime.address, pull_of(self.consumer.receiver, {"d": (transfer, lists)}))
        replies = self.consumer.replies(socket, within=15)
        assert replies
        ok = [name for one in replies for name in one.ok_reqs or ()]
        err = [name for one in replies for name in one.err_reqs or ()]
        return replies[-1].status, ok, err

    def close(self) -> None:
        self.consumer.vanish()
        self.runtime.close()


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving(allowing(options_for("mooncake")))
    yield made
    made.close()


def test_a_pull_gets_the_right_pages(serving: Serving) -> None:
    serving.publish("t", prompt_tokens=TOKENS + 1)
    assert serving.ask((D_BLOCKS, (D_STATE,))) == (Status.FINISH, ["d"], [])
    for layer in range(LAYERS):
        for p, d in zip(P_BLOCKS[:2], D_BLOCKS[:2], strict=True):
            assert np.array_equal(serving.source.page(layer, p), serving.target.page(layer, d))
    assert np.array_equal(serving.source.state(P_STATE), serving.target.state(D_STATE))
    untouched = [b for b in range(64) if b not in D_BLOCKS]
    assert not any(serving.target.page(0, block).any() for block in untouched)
    wait_until(lambda: serving.runtime.take_quiet() == [Ticket(1)], seconds=5)


def test_the_last_block_goes_whole_where_vllm_clears_blocks() -> None:
    """The prompt ends in the middle of it."""
    serving = Serving(allowing(options_for("mooncake")), whole=True)
    try:
        serving.publish("t", prompt_tokens=TOKENS + 1)
        assert serving.ask((D_BLOCKS, (D_STATE,))) == (Status.FINISH, ["d"], [])
        for layer in range(LAYERS):
            assert np.array_equal(serving.source.page(layer, P_BLOCKS[2]), serving.target.page(layer, D_BLOCKS[2]))
        assert np.array_equal(serving.source.state(P_STATE), serving.target.state(D_STATE))
    finally:
        serving.close()


def test_a_consumer_that_has_the_beginning_gets_the_end(serving: Serving) -> None:
    serving.publish("t")
    assert serving.ask((D_BLOCKS[2:], (D_STATE,))) == (Status.FINISH, ["d"], [])
    assert not serving.target.page(0, D_BLOCKS[0]).any()
    rows = 8 * serving.source.row  # positions 32 to 39 of the first head
    assert np.array_equal(serving.source.page(1, P_BLOCKS[2])[:rows], serving.target.page(1, D_BLOCKS[2])[:rows])


def test_what_is_assumed_of_a_consumer_is_said_once(serving: Serving) -> None:
    with lines_of(SERVING) as records:
        for ticket, transfer in enumerate(("t", "u"), 1):
            serving.publish(transfer, ticket=ticket)
            assert serving.ask((D_BLOCKS, (D_STATE,)), transfer) == (Status.FINISH, ["d"], [])
    (said,) = warned(records)
    assert said.startswith("upstream consumer at 127.0.0.1 shows neither")


def test_of_a_consumer_that_is_declared_nothing_is_assumed() -> None:
    all_of_it = Declared(block_size=BLOCK, kernel_block_size=BLOCK, cache_dtype="float32", layout="LBHNC")
    serving = Serving(allowing(options_for("mooncake")), declared=all_of_it)
    try:
        serving.publish("t")
        with lines_of(SERVING) as records:
            assert serving.ask((D_BLOCKS, (D_STATE,))) == (Status.FINISH, ["d"], [])
        assert warned(records) == []
    finally:
        serving.close()


def test_empty_lists_release(serving: Serving) -> None:
    serving.publish("t")
    assert serving.ask(((), ())) == (Status.FINISH, ["d"], [])
    wait_until(lambda: serving.runtime.take_quiet() == [Ticket(1)], seconds=5)
    assert not serving.target.bytes.any()


def test_a_newer_consumer_that_leaves_its_regions_out_is_asked_for_them(serving: Serving) -> None:
    """vLLM 0.33 believes that the producer keeps them: another one had this address before us."""
    serving.publish("t")
    pull = pull_of(serving.consumer.receiver, {"d": ("t", (D_BLOCKS, (D_STATE,)))})
    whole = {**msgspec.msgpack.decode(encode(pull)), "layout_id": 2**62 + 1}
    bare = {name: value for name, value in whole.items() if not name.startswith("registered_")}
    bare |= {key: [] for key in ("kv_caches_base_addr", "block_lens", "kv_block_lens")}
    (missed,) = serving.consumer.replies(
        serving.consumer.send(serving.runtime.address, msgspec.msgpack.encode(bare)), within=15
    )
    assert (missed.status, missed.ok_reqs, missed.err_reqs) == (Status.LAYOUT_MISS, None, None)
    assert not serving.target.bytes.any()
    socket = serving.consumer.send(serving.runtime.address, msgspec.msgpack.encode(whole))
    assert serving.consumer.replies(socket, within=15)[-1].ok_reqs == ("d",)
    assert np.array_equal(serving.source.page(1, P_BLOCKS[0]), serving.target.page(1, D_BLOCKS[0]))
    wait_until(lambda: serving.runtime.take_quiet() == [Ticket(1)], seconds=5)


def test_a_pull_that_waits_is_kept_alive_by_empty_answers(serving: Serving) -> None:
    serving.runtime.expect(TransferId("t"))
    pull = pull_of(serving.consumer.receiver, {"d": ("t", (D_BLOCKS, (D_STATE,)))})
    socket = serving.consumer.pull(serving.runtime.address, pull)
    waiting = serving.consumer.replies(socket, within=4.5)
    assert [one.status for one in waiting] == [Status.CONTINUE] * 2
    assert not any(one.ok_reqs or one.err_reqs for one in waiting)
    serving.publish("t")
    assert serving.consumer.replies(socket, within=10)[-1].ok_reqs == ("d",)


def test_what_may_still_land_is_never_named() -> None:
    """Such a consumer frees its blocks on either word, and on a FINISH. It gives up in its own time."""
    limits = ProducerLimits(write_timeout=0.3, stop_timeout=0.1, fence_after=0.1, keep_alive=0.2, lost_grace=0.1)
    options = allowing(options_for("mooncake"))
    serving = Serving(replace(options, make_transport=lambda: OverSockets("mooncake"), producer_limits=limits))
    try:
        serving.publish("t")
        pull = pull_of(serving.consumer.receiver, {"d": ("t", (D_BLOCKS, (D_STATE,)))})
        socket = serving.consumer.pull(serving.runtime.address, pull)
        wait_until(lambda: serving.runtime.take_quiet() == [Ticket(1)], seconds=10)
        replies = serving.consumer.replies(socket, within=1)
        assert {one.status for one in replies} == {Status.CONTINUE}
        assert not any(one.ok_reqs or one.err_reqs for one in replies)
        assert serving.runtime.take_interval().counts["engines_renewed"] == 1
    finally:
        serving.close()


def test_each_request_of_a_pull_is_named_once_by_its_finish(serving: Serving) -> None:
    lists = {
        name: (f"t-{name}", (blocks, (state,))) for name, blocks, state in (("a", (1, 2, 3), 4), ("b", (5, 6, 7), 8))
    }
    released = {"c": ("t-c", ())}
    for name in ("a", "b", "c"):
        serving.runtime.expect(TransferId(f"t-{name}"))
    socket = serving.consumer.pull(serving.runtime.address, pull_of(serving.consumer.receiver, lists | released))
    quiet: list[Ticket] = []
    for ticket, name in enumerate(("b", "c", "a"), 1):
        serving.publish(f"t-{name}", ticket=ticket)
        wait_until(lambda: quiet.extend(serving.runtime.take_quiet()) or len(quiet) == ticket, seconds=10)  # noqa: B023
    replies = serving.consumer.replies(socket, within=10)
    named = [name for one in replies for name in (*(one.ok_reqs or ()), *(one.err_reqs or ()))]
    assert sorted(named) == ["a", "b", "c"]
    assert [one.status for one in replies].count(Status.FINISH) == 1
    for p, d in zip(P_BLOCKS[:2], (5, 6), strict=True):
        assert np.array_equal(serving.source.page(2, p), serving.target.page(2, d))


@pytest.mark.parametrize(
    "lists",
    [(D_BLOCKS,), ((1, 2, 3, 4), (D_STATE,)), ((1, 1, 2), (D_STATE,)), ((1, 2, 70), (D_STATE,)), ((1,), (5, 6))],
    ids=["too few groups", "more blocks than the prompt has", "a block twice", "no such block", "two states"],
)
def test_lists_that_contradict_the_prompt_are_named_as_failed(
    serving: Serving, lists: tuple[tuple[int, ...], ...]
) -> None:
    serving.publish("t")
    assert serving.ask(lists) == (Status.FINISH, [], ["d"])
    assert not serving.target.bytes.any()


def test_what_the_fields_contradict_is_refused_before_a_byte_moves(serving: Serving) -> None:
    serving.publish("t")
    right = pull_of(serving.consumer.receiver, {"d": ("t", (D_BLOCKS, (D_STATE,)))})
    names, lens = right.registered_layer_names, right.kv_block_lens
    wrong = {
        "another layer": {"registered_layer_names": ("other", *names[1:])},
        "another number": {"registered_layer_indices": (8, *right.registered_layer_indices[1:])},
        "another group": {"registered_group_indices": (1, *right.registered_group_indices[1:])},
        "longer pages": {
            "kv_block_lens": (lens[0] + 64, *lens[1:]),
            "block_lens": (lens[0] + 64, *right.block_lens[1:]),
        },
        "shorter states": {"kv_block_lens": (*lens[:-1], lens[-1] - 1)},
        "an unpaired rank": {"remote_tp_rank": 1, "remote_tp_size": 1},
        "states of another tensor parallel size": {"remote_tp_rank": 1, "remote_tp_size": 2},
        "lists of unequal length": {"block_lens": right.block_lens[1:]},
    }
    for what, fields in wrong.items():
        values = {name: getattr(right, name) for name in right.__struct_fields__} | fields
        socket = serving.consumer.pull(serving.runtime.address, type(right)(**values))
        replies = serving.consumer.replies(socket, within=10)
        assert [one.status for one in replies] == [Status.ERROR], what
    assert not serving.target.bytes.any()
    assert serving.ask((D_BLOCKS, (D_STATE,))) == (Status.FINISH, ["d"], [])


def test_a_consumer_that_vanishes_leaves_nothing_held() -> None:
    with tempfile.TemporaryDirectory(prefix="kvferry-") as debug:
        serving = Serving(allowing(options_for("mooncake", debug_dir=debug)))

        def has_come(event: str) -> bool:
            (told,) = ask_stories(debug, TransferId("t"))
            return event in [one.event for one in told.events]

        try:
            serving.runtime.expect(TransferId("t"))
            pull = pull_of(serving.consumer.receiver, {"d": ("t", (D_BLOCKS, ()))})
            serving.consumer.pull(serving.runtime.address, pull)
            wait_until(lambda: has_come("PullArrived"), seconds=10)
            serving.consumer.vanish()
            wait_until(lambda: has_come("ConsumerLost"), seconds=10)
            serving.publish("t")
            wait_until(lambda: serving.runtime.take_quiet() == [Ticket(1)], seconds=15)
        finally:
            serving.close()


@pytest.mark.parametrize(
    ("peers", "declared", "said"),
    [
        ("refuse", None, "upstream_peers"),
        (("10.9.0.0/16",), None, "upstream_peers"),
        ("allow", Declared(cache_dtype="bfloat16"), "declared as bfloat16"),
        ("allow", Declared(layout="LBNHC"), "order of heads and tokens"),
        ("allow", Declared(kernel_block_size=32), "do not divide"),
    ],
)
def test_a_peer_that_is_not_wanted_is_refused_by_name(
    peers: str | tuple[str, ...], declared: Declared | None, said: str
) -> None:
    options = replace(options_for("mooncake"), upstream_peers=UpstreamPeers.parse(peers))  # type: ignore[arg-type]
    serving = Serving(options, declared=declared)
    try:
        serving.publish("t")
        pull = pull_of(serving.consumer.receiver, {"d": ("t", (D_BLOCKS, (D_STATE,)))})
        (reply,) = serving.consumer.replies(serving.consumer.pull(serving.runtime.address, pull), within=10)
        assert reply.status is Status.ERROR
        assert said in (reply.err_msg or "")
        assert not serving.target.bytes.any()
    finally:
        serving.close()


# ------------------------------------------------------------------------------------ their producer, our consumer


class Pulling:
    """Our consumer, a scripted producer rank, and the service that lists it."""

    def __init__(self, *, deed: Deed = "serve", declared: Declared | None = None) -> None:
        self.source, self.target = World.build("small", seed=1), World.build("small")
        self.producer = ScriptedProducer(self.source.layout, caches_of(self.source.layout, block_size=BLOCK), deed=deed)
        self.thread = LoopThread("service")
        self.service = BootstrapService(lambda *_: None)
        port = self.thread.run(self.service.start("127.0.0.1", free_port()), timeout=10)
        self.service.directory.register(Registration("p", 0, 0, 0, self.producer.address))
        self.origin = Source(EngineId("p"), f"http://127.0.0.1:{port}")
        self.runtime = ConsumerRuntime(side(self.target, "d", declared=declared), allowing(options_for("mooncake")))
        self.producer.held["t"] = Held((P_BLOCKS, (0, P_STATE)))

    def fetch(
        self,
        ticket: int = 1,
        transfer: str = "t",
        request: str = "d",
        *,
        blocks: tuple[int, ...] = D_BLOCKS,
        state: int = D_STATE,
    ) -> None:
        tables = (Table(0, blocks), Table(32, (state,)))
        self.runtime.fetch(
            Fetch(Ticket(ticket), RequestId(request), TransferId(transfer), self.origin, Span(0, TOKENS), tables)
        )

    def end(self, seconds: float = 15) -> FetchEnded:
        found: list[FetchEnded] = []
        wait_until(lambda: bool(found.extend(self.runtime.take_ended()) or found), seconds=seconds)
        return found[0]

    def close(self) -> None:
        self.runtime.close()
        self.producer.close()
        self.thread.run(self.service.close(), timeout=10)
        self.thread.close()


@pytest.fixture
def make_pulling() -> Iterator[Callable[..., Pulling]]:
    made: list[Pulling] = []

    def make(**options: object) -> Pulling:
        made.append(Pulling(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_fetch_brings_the_right_pages_by_one_plain_pull(make_pulling: Callable[..., Pulling]) -> None:
    pulling = make_pulling()
    pulling.fetch()
    assert pulling.end().outcome.fate is Fate.DONE
    for layer in range(LAYERS):
        for p, d in zip(P_BLOCKS, D_BLOCKS, strict=True):
            assert np.array_equal(pulling.source.page(layer, p), pulling.target.page(layer, d))
    assert np.array_equal(pulling.source.state(P_STATE), pulling.target.state(D_STATE))
    (pull,) = pulling.producer.pulls
    assert pull.kvferry is None
    assert pull.req_blocks == {"d": ("t", (D_BLOCKS, (D_STATE,)))}
    assert set(pulling.producer.frames) == {1}
    wait_until(lambda: pulling.runtime.take_quiet() == [Ticket(1)], seconds=5)


def test_a_producer_is_greeted_once(make_pulling: Callable[..., Pulling]) -> None:
    pulling = make_pulling()
    for number, transfer in enumerate(("t", "u", "v"), 1):
        pulling.producer.held[transfer] = pulling.producer.held["t"]
        pulling.fetch(ticket=number, transfer=transfer)
        assert pulling.end().outcome.fate is Fate.DONE
    assert (pulling.producer.hellos, len(pulling.producer.pulls)) == (1, 3)


def test_what_is_assumed_of_a_producer_is_said_once(make_pulling: Callable[..., Pulling]) -> None:
    pulling = make_pulling()
    pulling.producer.held["u"] = pulling.producer.held["t"]
    with lines_of(SERVING) as records:
        for ticket, transfer in enumerate(("t", "u"), 1):
            pulling.fetch(ticket=ticket, transfer=transfer)
            assert pulling.end().outcome.fate is Fate.DONE
    (said,) = warned(records)
    assert said.startswith("upstream producer p@")


def test_an_engine_whose_ranks_are_still_registering_is_asked_for_again(
    make_pulling: Callable[..., Pulling],
) -> None:
    pulling = make_pulling()
    pulling.service.directory.register(Registration("p", 0, 1, 0, "tcp://127.0.0.1:9"))
    partial = pulling.service.directory.listing()[0]
    pulling.fetch()
    wait_until(lambda: pulling.producer.hellos == 1, seconds=10)
    pulling.service.directory.register(Registration("p", 0, 2, 0, "tcp://127.0.0.1:11"))
    pulling.service.directory.register(Registration("p", 0, 3, 0, "tcp://127.0.0.1:12"))
    assert len(partial.worker_addr) == 2
    ended = pulling.end(20)
    assert ended.outcome.reason is ProtocolReason.INCOMPATIBLE_PEER
    assert "tensor parallel sizes differ" in ended.outcome.detail
    assert pulling.producer.pulls == []
    assert pulling.producer.hellos == 2


@pytest.mark.parametrize("deed", ["err", "refuse"])
def test_a_failure_holds_the_blocks_until_its_engine_is_destroyed(
    deed: Deed, make_pulling: Callable[..., Pulling]
) -> None:
    pulling = make_pulling(deed=deed)
    pulling.fetch()
    ended = pulling.end()
    assert (ended.outcome.fate, ended.outcome.reason) == (Fate.FAILED, ProtocolReason.PEER_FAILED)
    assert pulling.runtime.take_quiet() == []
    first = pulling.producer.pulls[0].remote_port
    wait_until(lambda: pulling.runtime.take_quiet() == [Ticket(1)], seconds=15)
    pulling.producer.deed = "serve"
    pulling.producer.held["u"] = pulling.producer.held["t"]
    pulling.fetch(ticket=2, transfer="u")
    assert pulling.end().outcome.fate is Fate.DONE
    assert [pull.remote_port for pull in pulling.producer.pulls][1] != first
    assert len(pulling.producer.pulls) == 2, "nothing was sent again"


def test_a_finish_without_us_means_expired(make_pulling: Callable[..., Pulling]) -> None:
    pulling = make_pulling(deed="omit")
    pulling.fetch()
    ended = pulling.end()
    assert (ended.outcome.fate, ended.outcome.reason) == (Fate.FAILED, ProtocolReason.EXPIRED)
    wait_until(lambda: pulling.runtime.take_quiet() == [Ticket(1)], seconds=1)


def test_a_producer_that_dies_is_noticed_and_its_blocks_come_back(make_pulling: Callable[..., Pulling]) -> None:
    pulling = make_pulling(deed="mute")
    pulling.fetch()
    wait_until(lambda: len(pulling.producer.pulls) == 1, seconds=10)
    began = time.monotonic()
    pulling.producer.close()
    ended = pulling.end(10)
    assert (ended.outcome.fate, ended.outcome.reason) == (Fate.FAILED, ProtocolReason.PEER_LOST)
    assert time.monotonic() - began < 10
    wait_until(lambda: pulling.runtime.take_quiet() == [Ticket(1)], seconds=15)


def test_an_abort_sends_nothing_more(make_pulling: Callable[..., Pulling]) -> None:
    pulling = make_pulling(deed="mute")
    pulling.fetch()
    wait_until(lambda: len(pulling.producer.pulls) == 1, seconds=10)
    pulling.runtime.cancel(Ticket(1))
    assert pulling.end().outcome.fate is Fate.ABORTED
    pulling.fetch(ticket=2, transfer="u", request="e", blocks=(2, 3, 5), state=8)
    wait_until(lambda: len(pulling.producer.pulls) == 2, seconds=10)
    assert [list(pull.req_blocks) for pull in pulling.producer.pulls] == [["d"], ["e"]]
    assert len(pulling.producer.frames) == 3, "a hello and two pulls"
    assert pulling.runtime.take_quiet() == []


def test_a_release_is_a_pull_of_empty_lists(make_pulling: Callable[..., Pulling]) -> None:
    pulling = make_pulling()
    pulling.runtime.release(TransferId("t"), RequestId("d"), pulling.origin)
    wait_until(lambda: len(pulling.producer.pulls) == 1, seconds=10)
    assert pulling.producer.pulls[0].req_blocks == {"d": ("t", ((), ()))}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (Declared(block_size=32), "do not divide ours"),
        (Declared(block_size=8), "pages of a state"),
        (Declared(kernel_block_size=8), "cannot be cut"),
        (Declared(cache_dtype="float16"), "declared as float16"),
    ],
)
def test_a_producer_whose_copies_could_be_wrong_is_refused_before_it_is_asked(
    declared: Declared, said: str, make_pulling: Callable[..., Pulling]
) -> None:
    pulling = make_pulling(declared=declared)
    pulling.fetch()
    ended = pulling.end()
    assert ended.outcome.reason is ProtocolReason.INCOMPATIBLE_PEER
    assert said in ended.outcome.detail
    assert pulling.producer.pulls == []
    wait_until(lambda: pulling.runtime.take_quiet() == [Ticket(1)], seconds=5)
