"""What landed at a decode engine of vLLM's own connector, read from its memory and reported as kvferry reports.

That connector tells no digest. So what a request is to fetch is noted where vLLM's scheduler orders it
(:class:`Landings`), and each worker reads its own memory when it says that the request's pulls are done
(:class:`LandedPages`). The scheduler hears of it after that, so nothing has been computed into those blocks yet. What
is hashed is what a kvferry consumer would hash: the positions that were missing, without the last one of a prompt where
that is left to the decode engine, of all blocks that vLLM lists for the request and not of those that were pulled for.

Both layouts are as kvferry reads them: the engine's own from vLLM, the producer's from the files that kvferry prefill
engines write beside the report (:func:`kvferry.testing.transfer_report.layouts_beside`). Of what another producer sent
nothing is reported.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.layout import BoundLayout, Parallel, Placed, Placement, bind_layout, parse_layout
from kvferry.plan import BlockTable, TransferRequest
from kvferry.protocol import Span, Table
from kvferry.protocol.upstream import paired_ranks, paired_stages
from kvferry.runtime.binding import block_tables
from kvferry.runtime.digest import page_digest, rows_of_pair
from kvferry.runtime.page_reading import HostPages, cells_of
from kvferry.runtime.report import Line, Report
from kvferry.testing.transfer_report import layouts_beside
from kvferry.vllm.layout_file import worker_number
from kvferry.vllm.layouts.extract import layout_of_worker, parallel_of_this_process
from kvferry.vllm.tables import read_cache_shape

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Landing:
    """What a request is to fetch, and where to."""

    request: str
    transfer: str
    producer: str
    """Its engine id."""
    span: Span
    tables: tuple[Table, ...]


class Landings:
    """The scheduler's half: notes what is ordered, for the workers."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self._shape = read_cache_shape(kv_cache_config, vllm_config)
        self._cached: dict[str, int] = {}
        self._fresh: list[Landing] = []

    def on_matched(self, request: "Request", cached: int) -> None:
        """So many tokens of a request that wants to fetch are there already."""
        self._cached[request.request_id] = cached

    def on_allocated(self, request: "Request", blocks: "KVCacheBlocks") -> None:
        """The blocks for the others are allocated."""
        tokens = request.num_prompt_tokens
        # Of a prompt of one token a prefill engine has nothing to leave out.
        span = Span(self._cached.pop(request.request_id), max(1, self._shape.movable_tokens(tokens)))
        if span.start < span.stop:
            asked = request.kv_transfer_params or {}
            tables = self._shape.cut(blocks.get_block_ids(), span)
            name, producer = str(asked.get("transfer_id")), str(asked.get("remote_engine_id"))
            self._fresh.append(Landing(request.request_id, name, producer, span, tables))

    def take(self) -> tuple[Landing, ...]:
        """Those of this step."""
        fresh, self._fresh = self._fresh, []
        return tuple(fresh)


class LandedPages:
    """A worker's half: reads its memory and writes lines of the transfer report."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", report: str, *, flip: bool = False
    ) -> None:
        """``flip``: change one byte of what landed before it is read, for a test of the tests."""
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._report = Report(report)
        self._layouts = layouts_beside(report)
        self._flip = flip
        self._engine = str(vllm_config.kv_transfer_config.engine_id)
        self._parallel: Parallel | None = None
        self._bound: BoundLayout | None = None
        self._number = 0
        self._waiting: dict[str, tuple[Landing, Any]] = {}
        self._sources: dict[str, dict[int, Placement]] = {}

    def register(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Read the layout of this worker."""
        self._parallel = parallel_of_this_process(self._vllm_config)
        layout = layout_of_worker(
            kv_caches,
            self._kv_cache_config,
            vllm_config=self._vllm_config,
            engine_id=self._engine,
            parallel=self._parallel,
        )
        self._bound = bind_layout(layout)
        self._number = worker_number(layout)

    def expect(self, landing: Landing, pull: Any) -> None:
        """``pull``: vLLM's own record of it, which says whether it failed."""
        self._waiting[landing.request] = landing, pull

    def on_received(self, requests: Iterable[str]) -> None:
        """This worker's pulls for these requests are done, and vLLM's scheduler has not heard of it."""
        for request in requests:
            if (found := self._waiting.pop(request, None)) is not None:
                landing, pull = found
                for line in self._failed(landing) if pull.failed else self._read(landing):
                    self._report.write(line)

    def _failed(self, landing: Landing) -> Iterator[Line]:
        yield self._line(landing, 0).with_end(status="failed", reason="the pull failed", transport="mooncake")

    def _read(self, landing: Landing) -> Iterator[Line]:
        if self._bound is None:
            raise RuntimeError("a receive is done, and no cache was registered")
        for rank, producer in self._producers(landing.producer).items():
            # Only the producer's shapes are used on this side, not its tables.
            nothing = tuple(BlockTable.empty() for _ in producer.groups)
            request = TransferRequest(landing.span.start, landing.span.stop, nothing, block_tables(landing.tables))
            if self._flip:
                _flip_a_byte(producer, self._bound, request)
            here = self._bound
            digest = page_digest(producer, here.placement, request, side="consumer", reader=HostPages(here.binding))
            if digest.pages:  # of another stage's layers nothing comes
                told = {"digest": digest.digest, "pages": digest.pages}
                yield self._line(landing, rank).with_end(status="done", transport="mooncake", **told)

    def _line(self, landing: Landing, rank: int) -> Line:
        return Line(
            transfer_id=landing.transfer,
            request_id=landing.request,
            side="consumer",
            engine_id=self._engine,
            peer_engine_id=landing.producer,
            producer_rank=rank,
            consumer_rank=self._number,
            start=landing.span.start,
            stop=landing.span.stop,
        )

    def _producers(self, engine: str) -> dict[int, Placement]:
        """The ranks that this worker pulls from; of copies, one."""
        if engine not in self._sources:
            found: dict[tuple[Placed, ...], int] = {}
            placements = dict(self._paired(engine))
            for rank, placement in placements.items():
                found.setdefault(placement.placed, rank)
            self._sources[engine] = {rank: placements[rank] for rank in found.values()}
        return self._sources[engine]

    def _paired(self, engine: str) -> Iterator[tuple[int, Placement]]:
        here = self._parallel
        if here is None:
            raise RuntimeError("a receive is done, and no cache was registered")
        path = Path(self._layouts)
        for file in sorted(path.parent.glob("*.json")):
            layout = parse_layout(file.read_bytes())
            there = layout.parallel
            ranks = paired_ranks(here.tp_rank, here.tp_size, others=there.tp_size)
            stages = paired_stages(here.pp_rank, here.pp_size, others=there.pp_size)
            if layout.engine_id == engine and there.tp_rank in ranks and there.pp_rank in stages:
                yield worker_number(layout), bind_layout(layout).placement


def _flip_a_byte(producer: Placement, here: BoundLayout, request: TransferRequest) -> None:
    """Of the last position that came."""
    theirs = {placed.component.key: placed.component for placed in producer.placed}
    for placed in here.placement.placed:
        component = placed.component
        sides = (producer, theirs[component.key]), (here.placement, component)
        rows, _ = rows_of_pair("consumer", *sides, request)
        if rows.block.size:
            cells = cells_of(component, here.binding.bases[placed.storage] + component.address)
            cells[rows.block[-1], rows.kernel_block[-1], rows.row[-1]].flat[0] ^= 1
            return
