"""The digest says equal for equal contents under different layouts, and differs for every byte that matters."""

import numpy as np
import pytest

from kvferry.layout import (
    Axis,
    Component,
    Content,
    ContextParallel,
    Group,
    Layout,
    Parallel,
    Region,
    bind_layout,
)
from kvferry.plan import BlockTable, TransferRequest
from kvferry.runtime.digest import page_digest
from kvferry.runtime.page_reading import HostPages

HEADS, DIM = 4, 8
ALONE = Parallel(0, 1, 0, 1, 0, 1)


class Worker:
    """One rank's cache in real memory: ``[block, kernel block, head, token, dim]`` or keys by column."""

    def __init__(
        self,
        *,
        block_tokens: int,
        kernel_tokens: int,
        heads: tuple[int, int] = (0, HEADS),
        by_column: bool = False,
        window: int | None = None,
        share: ContextParallel | None = None,
        num_blocks: int = 12,
    ) -> None:
        self.block_tokens, self.kernel_tokens, self.heads = block_tokens, kernel_tokens, heads
        self.by_column, self.share = by_column, share
        count = heads[1] - heads[0]
        pages = block_tokens // kernel_tokens
        self.memory = np.zeros(num_blocks * pages * count * kernel_tokens * DIM, np.uint8)
        inner = (DIM, kernel_tokens) if by_column else (kernel_tokens, DIM)
        self.cells = self.memory.reshape(num_blocks, pages, count, *inner)
        if by_column:
            self.cells = self.cells.swapaxes(3, 4)
        page = count * kernel_tokens * DIM
        axes = (
            Axis("head", heads[0], count, HEADS, kernel_tokens * DIM),
            Axis("token", 0, kernel_tokens, kernel_tokens, 1 if by_column else DIM),
            Axis("dim", 0, DIM, DIM, kernel_tokens if by_column else 1),
        )
        component = Component(
            layer="l.0",
            layer_index=0,
            component="k",
            group=0,
            address=self.memory.ctypes.data,
            num_blocks=num_blocks,
            block_stride=pages * page,
            kernel_blocks=pages,
            kernel_stride=page,
            tokens_per_row=1,
            axes=axes,
            content=Content(1, "uint8"),
        )
        group = Group("attention", block_tokens, sliding_window=window, context_parallel=share)
        region = Region(self.memory.ctypes.data, self.memory.nbytes)
        self.layout = bind_layout(Layout("e", ALONE, (region,), (group,), (component,)))

    def place(self, position: int, first_token: int, blocks: list[int | None]) -> tuple[int, int, int]:
        size, deal = (self.share.size, self.share.interleave) if self.share else (1, 1)
        entry, inside = divmod(position - first_token, self.block_tokens * size)
        local = inside // (deal * size) * deal + inside % deal if self.share else inside
        block = blocks[entry]
        assert block is not None
        return (block, *divmod(local, self.kernel_tokens))

    def fill(self, positions: list[int], first_token: int, blocks: list[int | None]) -> None:
        for p in positions:
            if self.share and (p // self.share.interleave) % self.share.size != self.share.rank:
                continue
            block, page, row = self.place(p, first_token, blocks)
            for head in range(*self.heads):
                self.cells[block, page, head - self.heads[0], row] = (p * 31 + head * 7 + np.arange(DIM)) % 251


def digests(
    producer: Worker,
    consumer: Worker,
    tables: tuple[list[int | None], list[int | None]],
    span: tuple[int, int],
    first: int = 0,
) -> tuple[str, str]:
    request = TransferRequest(
        *span, (BlockTable.of(tables[0], first_token=0),), (BlockTable.of(tables[1], first_token=first),)
    )
    found = []
    for side, worker in (("producer", producer), ("consumer", consumer)):
        result = page_digest(
            producer.layout.placement,
            consumer.layout.placement,
            request,
            side=side,  # type: ignore[arg-type]
            reader=HostPages(worker.layout.binding),
        )
        found.append(result.digest)
    return found[0], found[1]


def test_equal_contents_in_unequal_layouts() -> None:
    """Other block sizes, other kernel blocks, keys by row against keys by column, a head share, a later start."""
    producer = Worker(block_tokens=16, kernel_tokens=4)
    consumer = Worker(block_tokens=24, kernel_tokens=8, heads=(1, 3), by_column=True)
    producer.fill(list(range(70)), 0, [3, 1, 4, 10, 5])
    consumer.fill(list(range(24, 70)), 24, [7, 2])
    one, other = digests(producer, consumer, ([3, 1, 4, 10, 5], [7, 2]), (24, 70), first=24)
    assert one == other


@pytest.mark.parametrize("position", [24, 47, 48, 69])
def test_one_wrong_byte_shows(position: int) -> None:
    producer = Worker(block_tokens=16, kernel_tokens=4)
    consumer = Worker(block_tokens=24, kernel_tokens=8)
    producer.fill(list(range(70)), 0, [3, 1, 4, 10, 5])
    consumer.fill(list(range(24, 70)), 24, [7, 2])
    block, page, row = consumer.place(position, 24, [7, 2])
    consumer.cells[block, page, 2, row, 5] ^= 1
    one, other = digests(producer, consumer, ([3, 1, 4, 10, 5], [7, 2]), (24, 70), first=24)
    assert one != other


def test_what_is_outside_the_request_does_not_matter() -> None:
    """Positions before the window, after the stop, and in entries that the consumer does not list."""
    producer = Worker(block_tokens=16, kernel_tokens=16, window=30)
    consumer = Worker(block_tokens=16, kernel_tokens=16, window=30)
    producer.fill(list(range(64)), 0, [3, 1, 4, 10])
    consumer.fill(list(range(32, 60)), 0, [None, None, 6, 7])
    tables: tuple[list[int | None], list[int | None]] = ([3, 1, 4, 10], [None, None, 6, 7])
    one, other = digests(producer, consumer, tables, (0, 60))
    assert one == other
    consumer.cells[7, 0, 0, 11, 0] ^= 1  # position 59, the last one needed
    assert digests(producer, consumer, tables, (0, 60))[1] != one


def test_context_parallel_ranks_hash_what_both_hold() -> None:
    share = ContextParallel(rank=1, size=2, interleave=4)
    producer = Worker(block_tokens=8, kernel_tokens=8, share=share)
    consumer = Worker(block_tokens=16, kernel_tokens=8)
    producer.fill(list(range(40)), 0, [5, 9, 2])
    consumer.fill(list(range(40)), 0, [1, 6, 8])
    one, other = digests(producer, consumer, ([5, 9, 2], [1, 6, 8]), (0, 40))
    assert one == other
    block, page, row = consumer.place(5, 0, [1, 6, 8])
    consumer.cells[block, page, 0, row, 0] ^= 1  # position 5 is on the rank
    assert digests(producer, consumer, ([5, 9, 2], [1, 6, 8]), (0, 40))[1] != one
    consumer.cells[block, page, 0, row, 0] ^= 1
    block, page, row = consumer.place(3, 0, [1, 6, 8])
    consumer.cells[block, page, 0, row, 0] ^= 1  # position 3 is on the other rank
    assert digests(producer, consumer, ([5, 9, 2], [1, 6, 8]), (0, 40))[1] == one


def state_worker(states: np.ndarray) -> tuple[object, object]:
    component = Component(
        layer="l.1",
        layer_index=1,
        component="conv",
        group=0,
        address=states.ctypes.data,
        num_blocks=len(states),
        block_stride=states.shape[1],
        axes=(Axis("channel", 0, 6, 6, 4),),
        content=Content(4, "float32"),
    )
    layout = Layout("e", ALONE, (Region(states.ctypes.data, states.nbytes),), (Group("state", 16),), (component,))
    bound = bind_layout(layout)
    return bound.placement, bound.binding


def test_a_state_is_its_last_entry() -> None:
    """The entry that holds ``stop - 1``; one block without positions on the other side; padding is left out."""
    source = np.arange(8 * 32, dtype=np.uint8).reshape(8, 32)
    target = np.zeros((4, 40), np.uint8)
    target[2, :24] = source[5, :24]
    placements = [state_worker(source), state_worker(target)]
    request = TransferRequest(16, 40, (BlockTable.of([1, 3, 5], first_token=0),), (BlockTable.of([2]),))
    one, other = (
        page_digest(placements[0][0], placements[1][0], request, side=side, reader=HostPages(mine[1]))  # type: ignore[arg-type]
        for side, mine in (("producer", placements[0]), ("consumer", placements[1]))
    )
    assert one == other
    assert one.pages == 1
    target[2, 23] ^= 1
    changed = page_digest(
        placements[0][0], placements[1][0], request, side="consumer", reader=HostPages(placements[1][1])
    )  # type: ignore[arg-type]
    assert changed != one
