"""Pulling from a producer of vLLM's own MooncakeConnector: which ranks, whether its writes would be right, the pull.

Such a producer computes every address itself, from a few numbers that the pull shows, and shows nothing of its own. So
the proof that a copy is right cannot be made here; what can be made is a list of conditions under which upstream's
arithmetic is right for a producer as declared, and everything else is refused before anything is sent. They are: equal
element types and order inside a page; kernel blocks that ours can be cut into; blocks that divide ours; equal tensor
parallel sizes, or pages in which heads are the outermost axis, all of them cut and none copied.
"""

import logging
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from msgspec import structs

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.layout import Placed, Placement
from kvferry.protocol import Pull, Receiver, Span, Table, Wanted, make_pull
from kvferry.protocol.upstream import check_kept, list_blocks, paired_ranks, paired_stages
from kvferry.runtime.options import UpstreamPeers
from kvferry.runtime.plans import Recent
from kvferry.runtime.producers import RemoteEngine
from kvferry.runtime.pulling import Pulled
from kvferry.runtime.sides import Local
from kvferry.runtime.upstream_caches import CacheRegion, OwnCaches, rules_of, upstream_tokens
from kvferry.runtime.upstream_pages import check_heads, is_outermost, of_rank
from kvferry.runtime.upstream_serving import TRANSPORT, check_own, warn_of_assumptions
from kvferry.transport import Transport

logger = logging.getLogger(__name__)

MAX_WARNED: Final = 256


class UpstreamPuller:
    """Makes the pulls of one consumer rank to such producers."""

    def __init__(self, local: Local, peers: UpstreamPeers) -> None:
        self._local = local
        self._peers = peers
        self._warned: Recent[str, None] = Recent(MAX_WARNED)

    def targets(self, engine: RemoteEngine, wanted: Span) -> dict[int, bool]:
        """The ranks that upstream would pull from; raises ``RemoteProtocolError`` where a copy could be wrong."""
        grid = engine.grid
        assert grid is not None, "only engines of upstream's have a grid"  # noqa: S101
        local = self._local
        own = check_own(local, self._peers, _host_of(engine), transport=TRANSPORT)
        _check_blocks(own, local.placement)
        if wanted.start < wanted.stop:
            rules = rules_of(local.placement.groups, block_size=own.peer_block_size)
            check_kept(rules, wanted, tokens=self._computed(wanted.stop), side="prefill")
        tensor = paired_ranks(local.tp_rank, local.tp_size, others=grid.tp_size)
        if local.tp_size != grid.tp_size:
            _check_cut(own, local.placement, most_ranks=max(local.tp_size, grid.tp_size))
        stages = paired_stages(local.index // local.tp_size, local.pp_size, others=grid.pp_size)
        if str(engine.incarnation) not in self._warned:
            self._warned.put(str(engine.incarnation), None)
            warn_of_assumptions(f"producer {engine.incarnation} at {_host_of(engine)}", own)
        return {stage * grid.tp_size + rank: True for stage in stages for rank in tensor}

    def pull(self, pulled: Pulled, *, receiver: Transport) -> Pull:
        """A pull in upstream's form, for any of the ranks."""
        local, own = self._local, self._local.caches
        assert own is not None, "checked when the ranks were chosen"  # noqa: S101
        host, _, port = receiver.address().rpartition(":")
        regions = _as_cut(own)
        shown = Receiver(
            hostname=host,
            port=int(port),
            tp_rank=local.tp_rank,
            tp_size=local.tp_size,
            pp_size=local.pp_size,
            base_addresses=tuple(region.base for region in regions),
            block_lens=tuple(region.block_len for region in regions),
            kv_block_lens=tuple(region.kv_block_len for region in regions),
            layer_names=tuple(region.layer for region in regions),
            layer_indices=tuple(region.index for region in regions),
            group_indices=tuple(region.group for region in regions),
            shared_group_ids=tuple(region.groups for region in regions),
            row_offsets=tuple(region.row_offset for region in regions),
        )
        lists = self._lists(pulled, own)
        tables = tuple(Table(None, blocks) for blocks in lists)
        return make_pull(shown, [Wanted(pulled.request, pulled.transfer, pulled.span, tables)], None)

    def sources(self, engine: RemoteEngine, ranks: Iterable[int]) -> dict[int, Placement]:
        """What the ranks are taken to hold, for digests in a report, each only once.

        Of copies the first rank writes. Of stages it is not known which has which layers: one stands for all.
        """
        grid, here = engine.grid, self._local.placement
        assert grid is not None, "only engines of upstream's have a grid"  # noqa: S101
        found: dict[tuple[Placed, ...], int] = {}
        for rank in ranks:
            placed = here.placed
            if grid.tp_size != self._local.tp_size:
                placed = _as_held(here, rank=rank % grid.tp_size, size=grid.tp_size)
            found.setdefault(placed, rank)
        return {rank: Placement(here.groups, here.storages, placed) for placed, rank in found.items()}

    def _lists(self, pulled: Pulled, own: OwnCaches) -> tuple[tuple[int, ...], ...]:
        if not any(table.blocks for table in pulled.tables):
            return tuple(() for _ in pulled.tables)
        groups = self._local.placement.groups
        pieces = own.block_size // own.peer_block_size
        tables = [
            table if group.kind == "state" else _in_pieces(table, pieces)
            for table, group in zip(pulled.tables, groups, strict=True)
        ]
        rules = rules_of(groups, block_size=own.peer_block_size)
        return list_blocks(tables, rules, tokens=self._computed(pulled.span.stop))

    def _computed(self, stop: int) -> int:
        """How many tokens upstream has computed of a prompt of which we fetch ``stop``."""
        groups = self._local.placement.groups
        left_one = any(group.kind == "state" or group.sliding_window or group.chunk for group in groups)
        return upstream_tokens(groups, stop=stop, prompt_tokens=stop + left_one)


# --------------------------------------------------------------------------------------- blocks of another size


def _in_pieces(table: Table, pieces: int) -> Table:
    """A table of our blocks as one of the producer's, which are ``pieces`` times smaller."""
    if pieces == 1:
        return table
    blocks: list[int | None] = []
    for block in table.blocks:
        blocks += [None] * pieces if block is None else range(block * pieces, (block + 1) * pieces)
    return Table(table.first_token, tuple(blocks))


def _as_cut(own: OwnCaches) -> list[CacheRegion]:
    """Our regions, as if our kernel blocks were of the producer's size."""
    pieces = own.kernel_block_size // own.peer_kernel_block_size
    if pieces == 1:
        return list(own.regions)
    return [
        CacheRegion(
            region.layer,
            region.index,
            region.group,
            region.base,
            region.block_len // pieces,
            region.kv_block_len // pieces,
            region.groups,
            region.row_offset,
        )
        for region in own.regions
    ]


def _check_blocks(own: OwnCaches, placement: Placement) -> None:
    theirs, kernel = own.peer_block_size, own.peer_kernel_block_size
    if own.block_size % theirs:
        raise _refused(f"its blocks of {theirs} tokens do not divide ours of {own.block_size}")
    if theirs != own.block_size and any(group.kind == "state" for group in placement.groups):
        raise _refused(
            f"its blocks of {theirs} tokens are not ours of {own.block_size}, and the pages of a state grow with them"
        )
    if own.kernel_block_size % kernel:
        raise _refused(f"its kernel blocks of {kernel} tokens do not divide ours of {own.kernel_block_size}")
    if own.kernel_block_size != kernel:
        _check_rows(own, placement, kernel)


def _check_rows(own: OwnCaches, placement: Placement, kernel: int) -> None:
    """Kernel blocks can be cut only where tokens are the outermost axis of a page and nothing lies between pages."""
    pages = {component.layer: 0 for component in placement.components}
    for component in placement.components:
        pages[component.layer] += 1
    loose = [region.layer for region in own.regions if region.block_len != region.kv_block_len]
    inner = [one.layer for one in placement.components if pages[one.layer] > 1 or not is_outermost("token", one)]
    for layer in (*loose, *inner):
        raise _refused(
            f"its kernel blocks of {kernel} tokens are smaller than ours of {own.kernel_block_size}, and a page of "
            f"layer {layer!r} cannot be cut into such pieces"
        )


# --------------------------------------------------------------------------------------- other tensor parallel sizes


def _check_cut(own: OwnCaches, placement: Placement, *, most_ranks: int) -> None:
    """Upstream cuts a page into equal runs: right where the runs are heads, each held by one rank only."""
    if any(group.kind == "state" for group in placement.groups):
        raise _refused("the tensor parallel sizes differ, and it would cut the states wrongly")
    for region in own.regions:
        page = [component for component in placement.components if component.layer == region.layer]
        base = min(component.address for component in page)
        check_heads(region.layer, [(one.address - base, one) for one in page], most_ranks=most_ranks)


def _as_held(placement: Placement, *, rank: int, size: int) -> tuple[Placed, ...]:
    """Our components, as a producer rank holds them whose heads were checked."""
    return tuple(
        structs.replace(one, component=of_rank(one.component, rank=rank, size=size)) for one in placement.placed
    )


def _host_of(engine: RemoteEngine) -> str:
    return urlsplit(engine.ranks[0].address).hostname or ""


def _refused(said: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        ProtocolReason.INCOMPATIBLE_PEER, f"vLLM's own connector as a producer: {said} (option upstream_peer)"
    )
