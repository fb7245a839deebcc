"""Integrity on request: right transfers pass and are counted, every wrong one is found, named, and fails its fetch."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.errors import ConfigError, ProtocolReason
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout import Group, Layout, Region, bind_layout
from kvferry.plan import BlockTable, TransferRequest, compile_plan
from kvferry.protocol import (
    ConsumerLimits,
    Fate,
    FetchEnded,
    PullExtension,
    PullKey,
    ReplyExtension,
    Span,
    Table,
    VerifyAsk,
    decode_inbound,
    decode_reply,
    encode,
)
from kvferry.runtime import verify, verify_pages
from kvferry.runtime.page_reading import HostPages
from kvferry.runtime.report import Side
from kvferry.runtime.sides import Local
from kvferry.runtime.tally import Interval
from kvferry.runtime.verify import digests_of
from kvferry.runtime.verify_hashing import DIGEST_BYTES, Digests
from kvferry.runtime.verify_pages import Job
from kvferry.testing.faulty import Corrupt, Misdeed, Misdeeds, SwapTargets, WrongSource
from kvferry.testing.layouts import page, side_by_side, state, worker

from .loopback import Joined, Memory, fetch, join, next_end, publication
from .paired import wait_until

BLOCK, NBYTES, BLOCKS = 16, 8, 16
P_TABLES = (Table(0, (3, 5, 9)), Table(0, (5,)))
D_TABLES = (Table(0, (8, 2, 11)), Table(0, (7,)))
TOKENS = 40


def hybrid(*, heads: tuple[int, int, int] = (0, 2, 2), channels: tuple[int, int, int] = (0, 4, 4)) -> Layout:
    """Two attention layers and a state."""
    parts = [page(f"l{i}", heads=heads, tokens=BLOCK, nbytes=NBYTES, num_blocks=BLOCKS) for i in range(2)]
    parts.append(state("l2", part=channels, nbytes=NBYTES, num_blocks=BLOCKS, group=1))
    return worker(side_by_side(parts, base=0), groups=[Group("attention", BLOCK), Group("state", 4096)])


@contextmanager
def pair(
    producers: list[Layout] | None = None,
    consumer: Layout | None = None,
    *,
    misdeed: Misdeed | None = None,
    **more: Any,
) -> Iterator[Joined]:
    joined = join(
        producers or [hybrid()],
        consumer or hybrid(),
        verify=more.get("verify", "full"),
        consumer_limits=more.get("consumer_limits"),
        misdeeds=Misdeeds(*([misdeed] if misdeed else [])),
        read_device=more.get("read_device", HostPages),
        enter_thread=more.get("enter_thread"),
    )
    for index, memory in enumerate(joined.source):
        memory.bytes[:] = np.random.default_rng(index + 1).integers(0, 256, memory.bytes.size, np.uint8)
    yield joined
    joined.close()


def run(
    joined: Joined, p_tables: tuple[Table, ...] = P_TABLES, d_tables: tuple[Table, ...] = D_TABLES
) -> tuple[FetchEnded, Interval]:
    for index, producer in enumerate(joined.producers):
        joined.call(producer.publish, publication(index + 1, "t1", TOKENS, *p_tables))
    joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, TOKENS), *d_tables))
    end = next_end(joined)
    assert joined.consumer.quiet.get(timeout=5) == 11
    return end, joined.received.take()


def test_a_right_transfer_is_done_and_its_pages_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.transfer")
    with pair() as joined:
        end, counted = run(joined)
    assert end.outcome.fate is Fate.DONE
    moved = 2 * TOKENS * 2 * NBYTES + 4 * NBYTES
    assert dict(counted.counts) == {"verified_pages": 2 * 3 + 1, "verified_bytes": moved}
    assert any(f"verified 7 pages ({moved} bytes)" in record.message for record in caplog.records)


def test_off_asks_for_nothing() -> None:
    with pair(verify="off") as joined:
        end, counted = run(joined)
    assert end.outcome.fate is Fate.DONE
    assert not counted.counts


def test_a_sample_has_a_page_of_every_component() -> None:
    with pair(verify="sample") as joined:
        end, counted = run(joined)
    assert end.outcome.fate is Fate.DONE
    assert counted.counts["verified_pages"] == 3


@pytest.mark.parametrize(
    "misdeed", [Corrupt(nbytes=1), Corrupt(nbytes=64, row=3), SwapTargets(), WrongSource()], ids=str
)
def test_what_is_wrong_at_the_target_fails_the_fetch_by_name(
    misdeed: Misdeed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry.transfer")
    with pair(misdeed=misdeed) as joined:
        end, counted = run(joined)
        assert joined.producers[0].quiet.get(timeout=5) == 1
    assert end.outcome.fate is Fate.FAILED
    assert end.outcome.reason is ProtocolReason.VERIFY_MISMATCH
    assert "layer l" in end.outcome.detail
    assert "at the producer; " in end.outcome.detail
    assert counted.counts["verify_mismatches"] == 1
    assert counted.ends.total() == 1
    assert any(record.levelno == logging.ERROR and "what producer rank 0 wrote is wrong" in record.message
               for record in caplog.records)  # fmt: skip


def test_the_named_page_is_the_wrong_one() -> None:
    """Row 0 of the sorted descriptors begins at the lowest source address: layer 0, block 3, positions 0 to 15."""
    with pair(misdeed=Corrupt(nbytes=1, row=0)) as joined:
        end, _ = run(joined)
    assert "layer l0 component kv block 8 (positions 0 to 15) is " in end.outcome.detail
    assert end.outcome.detail.endswith("; 1 of 7 digests differ")


def test_a_wrong_state_is_named() -> None:
    with pair(misdeed=Corrupt(nbytes=1, row=-1)) as joined:
        end, _ = run(joined)
    assert f"layer l2 component ssm block 7 (position {TOKENS}) is " in end.outcome.detail


def test_a_sample_finds_what_spoils_every_page() -> None:
    """Half of each layer's one sampled page may be right, so everything is spoilt: a producer with another content."""
    with pair(verify="sample") as joined:
        for memory in joined.source:
            memory.bytes[:] = 7
        spoil_digests(joined, lambda digest: bytes(len(digest)))
        end, counted = run(joined)
    assert end.outcome.reason is ProtocolReason.VERIFY_MISMATCH
    assert "; 3 of 3 digests differ" in end.outcome.detail
    assert counted.counts["verify_mismatches"] == 1


def spoil_digests(joined: Joined, spoil: Callable[[bytes], bytes]) -> None:
    """Change the digests of every reply on its way."""
    send = joined.wire.send

    def changed(connection: bytes, data: bytes) -> None:
        reply = decode_reply(data)
        if isinstance(reply.kvferry, ReplyExtension) and reply.kvferry.digests:
            digests = {name: spoil(digest) for name, digest in reply.kvferry.digests.items()}
            reply = msgspec.structs.replace(reply, kvferry=msgspec.structs.replace(reply.kvferry, digests=digests))
        send(connection, encode(reply))

    joined.wire.send = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [lambda _: b"", lambda d: d[:-16], lambda d: d + bytes(16), lambda d: d[:-3]])
def test_an_answer_without_the_digests_is_a_mismatch(spoil: Callable[[bytes], bytes]) -> None:
    """Verification never silently does not happen: too few, too many, cut off, none at all."""
    with pair() as joined:
        spoil_digests(joined, spoil)
        end, _ = run(joined)
    assert end.outcome.reason is ProtocolReason.VERIFY_MISMATCH


def test_a_producer_that_cannot_is_refused_before_a_byte() -> None:
    with pair() as joined:
        joined.wire.features = ("abort", "layouts", "release")
        end, counted = run(joined)
        assert not joined.target.bytes.any()
    assert end.outcome.reason is ProtocolReason.INCOMPATIBLE_PEER
    assert "verify is 'full' here" in end.outcome.detail
    assert "verified_pages" not in counted.counts


def test_a_producer_that_cannot_is_still_told_of_a_release() -> None:
    with pair() as joined:
        joined.wire.features = ()
        joined.call(joined.producers[0].publish, publication(1, "t1", TOKENS, *P_TABLES))
        one = fetch(11, "t1", Span(0, TOKENS), *D_TABLES)
        joined.call(joined.consumer.release, one.transfer, one.request, one.source)
        assert joined.producers[0].quiet.get(timeout=5) == 1


# ------------------------------------------------------------------------------------------------- pages on a device


def on_device(layout: Layout) -> Layout:
    region = Region(layout.regions[0].address, layout.regions[0].nbytes, "cuda:0")
    return msgspec.structs.replace(layout, regions=(region,))


def asked(joined: Joined) -> list[VerifyAsk]:
    """Of the producers, from now on."""
    found: list[VerifyAsk] = []
    deliver = joined.wire.pull

    def seen(key: PullKey, address: str, data: bytes, *, number: int | None) -> None:
        extension = decode_inbound(data).kvferry
        assert isinstance(extension, PullExtension)
        assert extension.verify is not None
        found.append(extension.verify)
        deliver(key, address, data, number=number)

    joined.wire.pull = seen  # type: ignore[method-assign]
    return found


ENDS = {
    "from host to device": ([hybrid()], on_device(hybrid())),
    "from device to host": ([on_device(hybrid())], hybrid()),
    "device at both ends": ([on_device(hybrid())], on_device(hybrid())),
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("wrong", [False, True])
def test_pages_on_a_device_are_compared_by_their_sums(ends: str, wrong: bool) -> None:
    with pair(*ENDS[ends], misdeed=Corrupt(nbytes=1) if wrong else None) as joined:
        asks = asked(joined)
        end, counted = run(joined)
    assert {ask.sums for ask in asks} == {True}
    assert end.outcome.reason is (ProtocolReason.VERIFY_MISMATCH if wrong else None)
    assert wrong or counted.counts["verified_bytes"] == 2 * TOKENS * 2 * NBYTES + 4 * NBYTES


def test_bytes_are_compared_where_all_is_in_memory_of_the_cpu() -> None:
    with pair() as joined:
        asks = asked(joined)
        run(joined)
    assert {ask.sums for ask in asks} == {False}


@pytest.mark.parametrize("ends", ENDS)
def test_where_one_version_knows_no_sums_the_bytes_are_compared(ends: str) -> None:
    """Of a producer that does not say that it knows them; an older consumer asks in the same way."""
    with pair(*ENDS[ends]) as joined:
        joined.wire.features = tuple(one for one in joined.wire.features if one != "verify-sums")
        asks = asked(joined)
        end, _ = run(joined)
    assert {ask.sums for ask in asks} == {False}
    assert end.outcome.fate is Fate.DONE


def test_memory_that_nobody_can_read_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="'full', but the cache of rank 0 lies on a device that nobody here reads"):
        join([hybrid()], on_device(hybrid()), verify="full", read_device=None)


def test_a_producer_whose_memory_nobody_can_read_says_so() -> None:
    assert not {"verify", "verify-sums"} & set(verify.features_of(local_of(on_device(hybrid()))))
    with pair(*ENDS["from device to host"], read_device=None) as joined:
        end, _ = run(joined)
        assert not joined.target.bytes.any()
    assert end.outcome.reason is ProtocolReason.INCOMPATIBLE_PEER
    assert "lie on a device that nobody here reads" in end.outcome.detail


def local_of(layout: Layout) -> Local:
    bound = bind_layout(Memory.of(layout).layout)
    return Local(Incarnation(EngineId("p"), "e"), "m", 0, bound.binding, (bound.placement,), 1, 1)


class BrokenPages(HostPages):
    """A device that has no memory left for what reading takes."""

    def rows(self, *_: Any) -> NDArray[np.uint8]:
        raise MemoryError("out of device memory")


BROKEN = {
    "from host to device": "the pages that came cannot be read to be compared: out of device memory",
    "from device to host": "the producer's pages cannot be read to be compared, its log says how",
}


@pytest.mark.parametrize("ends", BROKEN)
def test_pages_that_cannot_be_read_fail_their_fetch_at_once(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for a peer that is alive: who could not read says so; what its device says is for its own log."""
    with pair(*ENDS[ends], read_device=BrokenPages) as joined:
        end, counted = run(joined)
        assert joined.producers[0].quiet.get(timeout=5) == 1
    assert end.outcome.reason is ProtocolReason.DEVICE_FAILED
    assert end.outcome.detail.endswith(BROKEN[ends])
    assert not counted.counts["verified_pages"]
    assert "MemoryError: out of device memory" in caplog.text


@pytest.mark.parametrize("ends", ENDS)
def test_every_thread_that_reads_a_device_has_entered_it(ends: str) -> None:
    """What is current on a device is kept for each thread; one that did not choose would work on another one."""
    entered, read = set[int](), set[int]()

    class Watched(HostPages):
        def rows(self, *of: Any) -> NDArray[np.uint8]:
            read.add(threading.get_native_id())
            return super().rows(*of)

    enter = lambda: entered.add(threading.get_native_id())  # noqa: E731
    with pair(*ENDS[ends], read_device=Watched, enter_thread=enter) as joined:
        run(joined)
    assert read
    assert read <= entered


def test_a_producer_that_closes_while_digests_are_made_gives_all_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are under way are waited for, since their memory may go; those that wait for a thread are not made."""
    monkeypatch.setattr("kvferry.runtime.verify.HASHERS", 1)
    entered, held = threading.Event(), threading.Event()

    class Slow(HostPages):
        def rows(self, *of: Any) -> NDArray[np.uint8]:
            entered.set()
            held.wait(20)
            return super().rows(*of)

    with pair(*ENDS["from device to host"], read_device=Slow) as joined, ThreadPoolExecutor(1) as other:
        producer = joined.producers[0]
        for number in (1, 2):
            joined.call(producer.publish, publication(number, f"t{number}", TOKENS, *P_TABLES))
            joined.call(joined.consumer.fetch, fetch(10 + number, f"t{number}", Span(0, TOKENS), *D_TABLES))
        assert entered.wait(10)
        joined.call(producer.closing)
        closed = other.submit(joined.thread.run, producer.close(), timeout=20)
        wait_until(lambda: producer.quiet.qsize() == 1)
        assert not closed.done()
        held.set()
        closed.result(20)
        wait_until(lambda: producer.quiet.qsize() == 2)


# ---------------------------------------------------------------------------------------- unequal ends, right and wrong


def shards() -> list[Layout]:
    return [hybrid(heads=(rank, 1, 2), channels=(2 * rank, 2, 4)) for rank in range(2)]


def other_blocks() -> Layout:
    """Blocks of 32 in kernel blocks of 8, token-major."""
    parts = [
        page(f"l{i}", heads=(0, 2, 2), tokens=8, nbytes=NBYTES, num_blocks=BLOCKS, kernel_blocks=4, order="token-major")
        for i in range(2)
    ]
    parts.append(state("l2", part=(0, 4, 4), nbytes=NBYTES, num_blocks=BLOCKS, group=1))
    return worker(side_by_side(parts, base=0), groups=[Group("attention", 32), Group("state", 4096)])


def latent(blocks: int) -> Layout:
    """MLA: one head of one, rows of 64 latent bytes and 16 of scales that belong together and to no axis."""
    rows = [page("l0", tokens=blocks, nbytes=80, num_blocks=BLOCKS, component="mla")]
    return worker(rows, groups=[Group("attention", blocks)])


def opaque() -> Layout:
    """A backend that nobody knows: rows of 4 tokens that are moved whole."""
    rows = [page("l0", tokens=BLOCK, nbytes=128, num_blocks=BLOCKS, component="rows", row_tokens=4)]
    return worker(rows, groups=[Group("attention", BLOCK)])


ONE = (P_TABLES[:1], D_TABLES[:1])
WIDE = (P_TABLES, (Table(0, (8, 2)), Table(0, (7,))))
CASES = {
    "two producer shards": (shards(), hybrid(), (P_TABLES, D_TABLES)),
    "other blocks and kernel blocks": ([hybrid()], other_blocks(), WIDE),
    "shards to other blocks": (shards(), other_blocks(), WIDE),
    "latent replicas": ([latent(BLOCK), latent(BLOCK)], latent(BLOCK), ONE),
    "latent to other blocks": ([latent(BLOCK)], latent(32), (P_TABLES[:1], (Table(0, (8, 2)),))),
    "opaque rows": ([opaque()], opaque(), ONE),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrong", [False, True])
def test_unequal_ends_agree_exactly_when_the_bytes_are_right(name: str, wrong: bool) -> None:
    producers, consumer, tables = CASES[name]
    with pair(producers, consumer, misdeed=Corrupt(row=1) if wrong else None) as joined:
        end, counted = run(joined, *tables)
    assert end.outcome.reason is (ProtocolReason.VERIFY_MISMATCH if wrong else None)
    assert counted.counts["verify_mismatches"] == wrong
    assert wrong or counted.counts["verified_pages"] > 0


def test_a_comparison_that_takes_long_is_not_taken_for_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer has said its last word; the machine must hear something, or it would call the producer lost."""
    monkeypatch.setattr("kvferry.runtime.consumer.CHECK_PAUSE", 0.01)
    held = threading.Event()
    hash_pages = verify.hash_pages

    def slow(listed: Sequence[verify_pages.Pages], *, side: Side, **how: Any) -> Digests:
        if side == "consumer":
            held.wait(20)
        return hash_pages(listed, side=side, **how)

    monkeypatch.setattr(verify, "hash_pages", slow)
    limits = ConsumerLimits(silence=1.5)
    with pair(consumer_limits=limits) as joined:
        for index, producer in enumerate(joined.producers):
            joined.call(producer.publish, publication(index + 1, "t1", TOKENS, *P_TABLES))
        joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, TOKENS), *D_TABLES))
        with pytest.raises(queue.Empty):
            joined.consumer.ended.get(timeout=3.0)
        assert joined.consumer.quiet.empty()
        held.set()
        assert next_end(joined).outcome.fate is Fate.DONE


def test_pages_that_were_given_back_while_they_were_compared_are_not_called_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, held, over = threading.Event(), threading.Event(), threading.Event()
    hash_pages = verify.hash_pages

    def slow(listed: Sequence[verify_pages.Pages], *, side: Side, **how: Any) -> Digests:
        if side == "consumer":
            entered.set()
            held.wait(20)
        return hash_pages(listed, side=side, **how)

    monkeypatch.setattr(verify, "hash_pages", slow)
    with pair() as joined:
        check = joined.consumer._check

        async def watched(*of: Any) -> None:
            await check(*of)
            over.set()

        monkeypatch.setattr(joined.consumer, "_check", watched)
        joined.call(joined.producers[0].publish, publication(1, "t1", TOKENS, *P_TABLES))
        joined.call(joined.consumer.fetch, fetch(11, "t1", Span(0, TOKENS), *D_TABLES))
        assert entered.wait(10)
        joined.call(joined.consumer.on_lost, PullKey(TransferId("t1"), 0))
        assert next_end(joined).outcome.reason is ProtocolReason.PEER_LOST
        assert joined.consumer.quiet.get(timeout=10) == 11
        joined.target.bytes[:] = 0  # they are another request's now
        held.set()
        assert over.wait(10)
        assert "verify_mismatches" not in joined.received.take().counts


# ----------------------------------------------------------------------------------------------- how much is looked at


def job_of(layout: Layout, every: int, seed: int) -> Job:
    placement = bind_layout(layout).placement
    tables = (BlockTable.of(range(BLOCKS), first_token=0), BlockTable.of([5]))
    request = TransferRequest(0, BLOCKS * BLOCK, tables, tables)
    return Job(compile_plan([placement], [placement]), (0, 0), request, VerifyAsk(every=every, seed=seed))


def split(digests: Digests) -> list[bytes]:
    return [digests.data[i : i + DIGEST_BYTES] for i in range(0, len(digests.data), DIGEST_BYTES)]


def test_a_sample_is_a_part_of_the_whole_and_the_seed_moves_it() -> None:
    memory = Memory.of(hybrid())
    memory.bytes[:] = np.random.default_rng(1).integers(0, 256, memory.bytes.size, np.uint8)
    reader = HostPages(bind_layout(memory.layout).binding)

    def of(every: int, seed: int) -> list[bytes]:
        return split(digests_of(job_of(memory.layout, every, seed), side="consumer", reader=reader))

    whole = of(1, 7)
    assert len(set(whole)) == 2 * BLOCKS + 1
    samples = [of(5, seed) for seed in range(60)]
    assert {len(sample) for sample in samples} == {2 * 4 + 1}
    assert all(set(sample) <= set(whole) for sample in samples)
    assert set().union(*samples) == set(whole)
    assert of(5, 3) == samples[3]
    memory.bytes[:] = 7
    assert len(set(of(1, 7))) == 2 * BLOCKS + 1, "equal bytes at other positions, or of other layers, are another page"


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_several_threads_make_the_digests_of_one(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.runtime.verify.HASHERS", threads)
    memory = Memory.of(hybrid())
    memory.bytes[:] = np.random.default_rng(1).integers(0, 256, memory.bytes.size, np.uint8)
    where: dict[str, Any] = {"side": "consumer", "reader": HostPages(bind_layout(memory.layout).binding)}
    job = job_of(memory.layout, 1, 7)

    async def together() -> Digests:
        hashers = verify.Hashers()
        try:
            return await hashers.digests(job, **where)
        finally:
            await hashers.close()

    assert asyncio.run(together()) == digests_of(job, **where)


def test_a_large_transfer_has_fewer_digests_than_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.runtime.verify_pages.MAX_DIGESTS", 4)
    with pair() as joined:
        end, counted = run(joined)
    assert end.outcome.fate is Fate.DONE
    assert counted.counts["verified_pages"] == 7
    with pair(misdeed=Corrupt(row=1)) as joined:
        end, _ = run(joined)
    assert end.outcome.reason is ProtocolReason.VERIFY_MISMATCH
    assert "(positions 0 to 39)" in end.outcome.detail
    assert end.outcome.detail.endswith("; 1 of 3 digests differ")
