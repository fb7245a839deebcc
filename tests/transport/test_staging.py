"""The staged form on transports: gather, one write of long runs, scatter; the same bytes as the direct form."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvferry.layout import BoundLayout, Region, bind_layout
from kvferry.plan import BlockTable, Descriptors, TransferRequest, compile_plan
from kvferry.plan.staging import StagingBuffers, stage
from kvferry.testing.layouts import page, side_by_side, worker
from kvferry.testing.transport_benches import MemoryBench, cma_bench
from kvferry.testing.transport_conformance import Bench, Receiver, done
from kvferry.transport import CmaTransport, Transport

TOKENS, HEAD, BLOCKS, LAYERS, RANKS = 16, 128, 12, 2, 2
CACHE = RANKS * HEAD * TOKENS * BLOCKS * LAYERS
"""Bytes of the consumer's cache; a producer's is half."""
CHUNK = 4096
SPARE = 0xEE


def cache_at(address: int, heads: tuple[int, int, int]) -> BoundLayout:
    """Token-major pages: the heads of a token lie behind each other, so a head split has runs of one head."""
    pages = [
        page(f"l{i}", heads=heads, tokens=TOKENS, nbytes=HEAD, num_blocks=BLOCKS, order="token-major")
        for i in range(LAYERS)
    ]
    return bind_layout(worker(side_by_side(pages, base=address)))


@dataclass
class Stand:
    """Two producers and a consumer. The second half of the consumer's memory is its staging buffer."""

    bench: Bench
    copier: Callable[[], Transport]
    """A transport of this process, for copies inside one worker's memory."""
    _copiers: list[Transport] = field(default_factory=list)

    def receiver(self) -> Receiver:
        receiver = self.bench.start_receiver(2 * CACHE)
        receiver.memory[:] = SPARE
        receiver.admit(self.bench.writer.address())
        return receiver

    def send(self, receiver: Receiver, rows: Descriptors) -> None:
        peer = self.bench.writer.open_peer(receiver.address, receiver.regions)
        assert done(self.bench.writer.submit(peer, rows))

    def copy_inside(self, memory: np.ndarray, rows: Descriptors) -> None:
        """What a worker does in its own memory, before or after the write."""
        local = self.copier()
        self._copiers.append(local)
        region = Region(memory.ctypes.data, memory.nbytes)
        local.register([region])
        local.admit(local.address())
        assert done(local.submit(local.open_peer(local.address(), [region]), rows))

    def end(self) -> None:
        for local in self._copiers:
            local.close()


@pytest.fixture(params=["memory", "cma"])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    if request.param == "memory":
        bench = MemoryBench()
        stand = Stand(bench, bench.hub.transport)
        yield stand
        stand.end()
        return
    processes = cma_bench(tmp_path)
    stand = Stand(processes, CmaTransport)
    yield stand
    stand.end()
    processes.end()


def moved(base: int, consumer: BoundLayout, rank: int) -> Descriptors:
    """What producer ``rank``, whose cache begins at ``base``, writes directly."""
    sides = [cache_at(base if r == rank else 1 << 50, (r, 1, RANKS)) for r in range(RANKS)]
    plan = compile_plan([side.placement for side in sides], [consumer.placement])
    blocks = [BlockTable.of(np.random.default_rng(s).permutation(BLOCKS)[:9].tolist(), first_token=0) for s in (1, 2)]
    request = TransferRequest(5, 9 * TOKENS - 3, (blocks[0],), (blocks[1],))
    plan.check(request)
    pair = plan.pair(rank, 0)
    assert pair is not None
    return pair.bind(request, src=sides[rank].binding, dst=consumer.binding, verify="paranoid")


def shifted(rows: Descriptors, distance: int) -> Descriptors:
    """The same rows where the memory is mapped ``distance`` bytes further on."""
    return Descriptors.of(rows.src + distance, rows.dst + distance, rows.nbytes)


def test_staged_and_direct_leave_the_same_bytes(stand: Stand) -> None:
    direct, staged = stand.receiver(), stand.receiver()
    expected = np.full(2 * CACHE, SPARE, np.uint8)
    for rank in range(RANKS):
        memory = np.random.default_rng(rank).integers(0, 256, CACHE, np.uint8)
        base, half = memory.ctypes.data, CACHE // 2
        stand.bench.writer.register([Region(base, CACHE)])
        for receiver in (direct, staged):
            target = receiver.regions[0].address
            rows = moved(base, cache_at(target, (0, RANKS, RANKS)), rank)
            assert rows.count > 200
            assert set(rows.nbytes.tolist()) == {HEAD}
            if receiver is direct:
                stand.send(receiver, rows)
                for src, dst, nbytes in zip(rows.src - base, rows.dst - target, rows.nbytes, strict=True):
                    expected[dst : dst + nbytes] = memory[src : src + nbytes]
                continue
            steps = stage(rows, StagingBuffers(base + half, target + CACHE, half), chunk=CHUNK)
            assert steps.wire.count == -(-rows.total_bytes // CHUNK)
            stand.copy_inside(memory, steps.gather)
            stand.send(receiver, steps.wire)
            here = receiver.memory.ctypes.data
            stand.copy_inside(receiver.memory, shifted(steps.scatter, here - target))
    assert np.array_equal(direct.memory, expected)
    assert np.array_equal(staged.memory[:CACHE], expected[:CACHE])
    assert (staged.memory[CACHE:] != SPARE).any()
