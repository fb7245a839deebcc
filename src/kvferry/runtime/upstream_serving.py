"""Serving a consumer of vLLM's own MooncakeConnector: its pull, checked and turned into one like ours.

A pull comes with no engine, no life, no positions and no layouts. What is missing is supposed
(:mod:`kvferry.runtime.upstream_layout`) or worked out (:mod:`kvferry.protocol.upstream`); from there on it is planned,
proven, written and answered as any other. Which ranks pull from which is upstream's rule, not ours: so the plan is made
between the one consumer rank and exactly those producer ranks that it pulls from, and each of them answers, also one
that has nothing to send.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.layout import BoundLayout, regions_of
from kvferry.protocol import Pull, PulledRequest, Span
from kvferry.protocol.upstream import check_kept, paired_ranks, place_lists, pulls_awaited, span_of
from kvferry.runtime.admission import Admitted
from kvferry.runtime.options import UpstreamPeers
from kvferry.runtime.plans import Plans, Recent
from kvferry.runtime.sides import Local
from kvferry.runtime.upstream_caches import OwnCaches, rules_of, upstream_tokens
from kvferry.runtime.upstream_layout import shares_layers, suppose_consumer

logger = logging.getLogger(__name__)

MAX_SUPPOSED: Final = 256
TRANSPORT: Final = "mooncake"
"""What such peers receive and write with."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a consumer rank shows of itself, the same in all its pulls."""

    fields: tuple[object, ...]
    blocks: int
    """Bits of the largest block id listed so far: it bounds how many blocks are supposed."""


class UpstreamCounter:
    """Where a producer rank takes in pulls of vLLM's own connector."""

    def __init__(self, local: Local, plans: Plans, peers: UpstreamPeers) -> None:
        self._local = local
        self._plans = plans
        self._peers = peers
        self._supposed: Recent[_Shown, BoundLayout] = Recent(MAX_SUPPOSED)
        self._warned: Recent[str, None] = Recent(MAX_SUPPOSED)

    def admit(self, pull: Pull, *, transport: str) -> Admitted:
        """As :func:`kvferry.runtime.admission.admit`; raises the same."""
        own = check_own(self._local, self._peers, pull.remote_hostname, transport=transport)
        local, consumer = self._local, pull.remote_tp_rank
        paired = paired_ranks(local.tp_rank, local.tp_size, others=pull.remote_tp_size)
        if consumer not in paired:
            raise RemoteProtocolError(
                ProtocolReason.INCOMPATIBLE_PEER,
                f"tensor rank {consumer} of {pull.remote_tp_size} is not paired with rank {local.tp_rank} of "
                f"{local.tp_size} here",
            )
        self._warn(pull.remote_hostname, own)
        expected = pulls_awaited(len(paired), consumer_stages=pull.remote_pp_size, producer_stages=local.pp_size)
        if pull.remote_pp_size != local.pp_size and not shares_layers(pull, own):
            return self._idle(pull, expected)
        supposed = self._suppose(pull)
        sources = self._sources(pull)
        return Admitted(
            extension=None,
            plan=self._plans.of([local.placements[index] for index in sources], [supposed.placement]),
            producer=sources.index(local.index),
            consumer=0,
            binding=supposed.binding,
            regions=regions_of(supposed.placement, supposed.binding),
            address=f"{pull.remote_hostname}:{pull.remote_port}",
            peer=f"upstream:{pull.remote_hostname}",
            expected=expected,
            lists=self._reader(own),
        )

    def _idle(self, pull: Pull, expected: int) -> Admitted:
        """A pull of a stage that has none of our layers. It is counted and answered; nothing is planned or written."""
        local = self._local
        return Admitted(
            extension=None,
            plan=self._plans.of(local.placements, local.placements),
            producer=local.index,
            consumer=local.index,
            binding=local.binding,
            regions=local.regions,
            address=f"{pull.remote_hostname}:{pull.remote_port}",
            peer=f"upstream:{pull.remote_hostname}",
            expected=expected,
            idle=True,
        )

    def _sources(self, pull: Pull) -> list[int]:
        """Ranks of this stage that the consumer rank pulls from."""
        local = self._local
        stage = local.index - local.tp_rank
        tensor = paired_ranks(pull.remote_tp_rank, pull.remote_tp_size, others=local.tp_size)
        return [stage + rank for rank in tensor]

    def _suppose(self, pull: Pull) -> BoundLayout:
        largest = max((b for _, lists in pull.req_blocks.values() for blocks in lists for b in blocks), default=0)
        shown = _Shown(
            (
                pull.remote_tp_size,
                pull.remote_tp_rank,
                pull.remote_pp_size,
                pull.kv_caches_base_addr,
                pull.block_lens,
                pull.kv_block_lens,
                pull.registered_layer_names,
                pull.registered_layer_indices,
                pull.registered_group_indices,
                pull.registered_shared_group_ids,
                pull.registered_row_offsets,
            ),
            largest.bit_length(),
        )
        found = self._supposed.get(shown)
        if found is None:
            found = suppose_consumer(pull, self._local)
            self._supposed.put(shown, found)
        return found

    def _reader(self, own: OwnCaches) -> Callable[[PulledRequest, Span, int], PulledRequest]:
        groups = self._local.placement.groups
        rules = rules_of(groups, block_size=own.peer_block_size)

        def read(wanted: PulledRequest, published: Span, prompt_tokens: int) -> PulledRequest:
            tokens = upstream_tokens(groups, stop=published.stop, prompt_tokens=prompt_tokens)
            lists = [[block or 0 for block in table.blocks] for table in wanted.tables]
            tables = place_lists(lists, rules, tokens)
            span = span_of(tables, rules, published)
            # Also what it found in its own cache: it gives that back with the rest when it asks for this.
            check_kept(rules, Span(0, span.stop), tokens=tokens, side="decode")
            return replace(wanted, tables=tables, span=span)

        return read

    def _warn(self, host: str, own: OwnCaches) -> None:
        if host not in self._warned:
            self._warned.put(host, None)
            warn_of_assumptions(f"consumer at {host}", own)


def check_own(local: Local, peers: UpstreamPeers, host: str, *, transport: str) -> OwnCaches:
    """What this rank knows of its caches in upstream's terms; refuses where such a peer is not wanted, or not known."""
    if not peers.admits(host):
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER,
            f"vLLM's own MooncakeConnector at {host} is refused as a peer: option upstream_peers",
        )
    if local.caches is None:
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER, "this rank does not know its caches in the terms of vLLM's own connector"
        )
    if transport != TRANSPORT:
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER,
            f"vLLM's own MooncakeConnector moves bytes by {TRANSPORT!r}, this engine by {transport!r}",
        )
    local.caches.check_declared()
    return local.caches


def warn_of_assumptions(peer: str, own: OwnCaches) -> None:
    """Say once what is taken for granted about a peer."""
    if not own.declared.missing:
        logger.info("upstream %s: block size, kernel block size, cache type and layout are as declared", peer)
        return
    logger.warning(
        "upstream %s shows neither the meaning of its blocks nor their content; assumed: %s. Wrong "
        "assumptions give wrong answers: declare what the peer has with option upstream_peer, or refuse it with "
        "option upstream_peers",
        peer,
        own.assumptions(),
    )
