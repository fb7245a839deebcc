"""The scheduler half: turns what happens to requests into orders for the workers, and keeps their blocks held.

Life of a transfer here. Producer: *expect* when the request has been here for a step, since its consumer may be told to
fetch at the same time and a prompt may wait long for its turn; *publish* when the request has ended with its prompt
computed (by length, stop or end-of-sequence alike), *withdraw* when it ended otherwise. Consumer: *pull* when vLLM has
allocated blocks for the tokens that are missing, *cancel* when the request ends before its cache came, *release* when
nothing is needed after all (a full prefix hit, a request that reads no cache, one that ended in the queue). Every block
of a publish or a pull is held (:mod:`kvferry.vllm.holds`) until all ranks say it is quiet; so vLLM may drop its own
references at once, and no request waits for a send.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvferry.errors import RemoteProtocolError
from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import Span, Table, Ticket
from kvferry.protocol.upstream import check_kept
from kvferry.runtime import new_epoch
from kvferry.runtime.upstream_caches import rules_of, upstream_tokens
from kvferry.vllm.holds import BlockHolds, HeldBlocks
from kvferry.vllm.metadata import (
    Cancel,
    Expect,
    FerryMetadata,
    FerryWorkerMetadata,
    Order,
    Publish,
    Pull,
    Release,
    Siblings,
    Withdraw,
)
from kvferry.vllm.request import (
    Origin,
    drop_other_parameters,
    has_plain_prompt,
    leave_last_token,
    mark_dealt_with,
    name_for_peers,
    origin_of,
    prompt_digest,
    prompt_marks,
    transfer_of,
    wants_decode,
    wants_prefill,
)
from kvferry.vllm.tables import CacheShape

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

PUBLISHED = frozenset({RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED})
"""Ends of a prefill request after which its cache is whole."""

REMEMBERED = 4096
"""Transfers of which a consumer knows whose they are. One transfer's requests come close together."""

LOGGED = 400
"""Characters of a client's parameters that the log shows."""


class FerryScheduler:
    """Scheduler half of the connector; called by vLLM's scheduler, on its thread."""

    def __init__(
        self,
        shape: CacheShape,
        holds: BlockHolds,
        *,
        produces: bool,
        consumes: bool,
        upstream_block: int | None = None,
    ) -> None:
        self._shape = shape
        self._upstream_rules = rules_of(shape.kinds, block_size=upstream_block)
        self._upstream: dict[EngineId, None] = {}
        """Producers that are known to run vLLM's own connector."""
        self._holds = holds
        self._produces = produces
        self._consumes = consumes
        self._tickets = itertools.count(1)
        self._orders: list[Order | Callable[[], Order]] = []
        """For the next step; some are made only then, after the answer to their request."""
        self._announced: list[Expect] = []
        """Of requests that came in since the last step, for the next step but one. Most prompts are computed in one
        step, and are published then without ever being expected: telling the transfer thread of each while its prompt
        is computed would make the first token late."""
        self._expected: dict[str, TransferId] = {}
        """Request ids whose *expect* was given and whose end has not been seen, with their transfer."""
        self._published: dict[TransferId, None] = {}
        """The latest that were published: a request that bears the same id and ends otherwise does not undo it."""
        self._cut: set[str] = set()
        """Request ids whose last prompt token was left to the consumer, and whose end has not been seen."""
        self._pulling: dict[str, Ticket] = {}
        """Request ids that wait for a pull, with its ticket."""
        self._told = ""
        """The latest request of which it was said why nothing is fetched: vLLM asks anew in each step that it waits."""
        self._said_holds = HeldBlocks(0, 0)
        self._claimed: dict[TransferId, str] = {}
        """The latest transfers, with the id of the one request that fetches or releases each. Routers that give one
        id to all prompts of a batch mean one cache only, the first prompt's."""

    # -- what vLLM asks and tells, in the order of a request's life ------------------------------------------

    def introduce(self, placements: Sequence[bytes]) -> None:
        """Tell every worker who this engine is: a new life of it, and the placements of all ranks in rank order."""
        self._orders.append(Siblings(new_epoch(), tuple(placements)))

    def on_new_request(self, request: "Request") -> None:
        """Producer: tell of its transfer, and stop the prompt one token early where the N-1 rule holds."""
        if drop_other_parameters(request):
            logger.warning("request %s: kv_transfer_params are no table and are ignored", request.request_id)
        if not self._produces or not wants_decode(request):
            return
        self._expect(request)
        if self._shape.leaves_last_token and leave_last_token(request):
            self._cut.add(request.request_id)

    def missing_tokens(self, request: "Request", cached: int) -> int:
        """How many tokens after the first ``cached`` ones can be fetched from the producer."""
        origin = origin_of(request) if self._consumes and wants_prefill(request) else None
        if origin is None:
            return 0
        if request.skip_reading_prefix_cache or not has_plain_prompt(request):
            return 0
        if not self._is_first(request, origin.transfer):
            return 0
        if cached and request.num_prompt_tokens - cached <= 1:
            return 0  # a full hit: the last token vLLM computes anew, also where it was fetched
        stop = self._shape.movable_tokens(request.num_prompt_tokens)
        if origin.source.engine in self._upstream and not self._is_kept(Span(min(cached, stop), stop), request):
            return 0
        return max(0, stop - cached)

    def _is_kept(self, wanted: Span, request: "Request") -> bool:
        """Whether vLLM's own connector still has all that this prompt's last token looks at; else the whole prompt is
        computed here, since a fetch would be refused."""
        computed = upstream_tokens(self._shape.kinds, stop=wanted.stop, prompt_tokens=request.num_prompt_tokens)
        try:
            check_kept(self._upstream_rules, wanted, tokens=computed, side="prefill")
        except RemoteProtocolError as error:
            if self._told != request.request_id:
                logger.info("request %s: its prompt is computed here: %s", request.request_id, error.message)
            self._told = request.request_id
            return False
        return True

    def on_allocated(self, request: "Request", blocks: "KVCacheBlocks", missing: int) -> None:
        """Blocks were allocated; ``missing`` of the request's tokens are to be fetched."""
        if wants_prefill(request):
            origin = origin_of(request) if self._consumes else None
            mark_dealt_with(request)
            if origin is None:
                self._warn_of_parameters(request)
            elif not self._claim(request, origin.transfer):
                logger.warning(
                    "request %s: transfer %s was given to another request too, so its prompt is computed here",
                    request.request_id,
                    origin.transfer,
                )
            elif missing > 0:
                self._pull(request, origin, blocks.get_block_ids(), missing)
            else:
                self._release(request, origin)

    def on_finished(self, request: "Request", blocks: Sequence[Sequence[int]]) -> None:
        """The request has ended, for whatever reason; vLLM drops its own references to ``blocks`` after this."""
        if (ticket := self._pulling.get(request.request_id)) is not None:
            self._orders.append(Cancel(ticket))
        elif wants_prefill(request):
            origin = origin_of(request) if self._consumes else None
            mark_dealt_with(request)
            if origin is not None and self._claim(request, origin.transfer):
                self._release(request, origin)
        transfer = self._expected.pop(request.request_id, None)
        if transfer is not None:
            self._end_prefill(request, transfer, blocks)
        self._cut.discard(request.request_id)

    def take_orders(self) -> FerryMetadata:
        """The orders of this step."""
        orders, self._orders, self._announced = self._orders, [*self._announced], []
        return FerryMetadata(tuple(order() if callable(order) else order for order in orders))

    def on_worker_output(self, output: "KVConnectorOutput") -> None:
        """What all ranks reported in a step: receives that ended, tickets that are quiet."""
        for request_id in output.failed_recving or ():
            if (ticket := self._pulling.get(request_id)) is not None:
                self._holds.doubt(ticket)
        for request_id in output.finished_recving or ():
            self._pulling.pop(request_id, None)
        meta = output.kv_connector_worker_meta
        if isinstance(meta, FerryWorkerMetadata):
            self._holds.settle(meta.quiet)
            self._upstream.update(dict.fromkeys(meta.upstream))
            while len(self._upstream) > REMEMBERED:
                del self._upstream[next(iter(self._upstream))]

    def changed_holds(self) -> HeldBlocks | None:
        """How many blocks are held, when that differs from what was said last."""
        now = self._holds.count
        if now == self._said_holds:
            return None
        self._said_holds = now
        return now

    def has_work(self) -> bool:
        """Whether the engine must go on stepping although no request is left."""
        return bool(self._orders or self._announced) or len(self._holds) > 0

    # -- steps of the above ----------------------------------------------------------------------------------

    def _pull(self, request: "Request", origin: Origin, blocks: Sequence[Sequence[int]], missing: int) -> None:
        stop = self._shape.movable_tokens(request.num_prompt_tokens)
        span = Span(stop - missing, stop)
        tables = self._shape.cut(blocks, span)
        ticket = self._hold(tables)
        self._pulling[request.request_id] = ticket
        self._orders.append(
            Pull(
                ticket,
                RequestId(request.request_id),
                origin.transfer,
                origin.source,
                span,
                tables,
                prompt_digest(request, stop),
                origin.alternatives,
            )
        )

    def _claim(self, request: "Request", transfer: TransferId) -> bool:
        """Make ``transfer`` this request's own; says no when it is another's."""
        if not self._is_first(request, transfer):
            return False
        self._claimed[transfer] = request.request_id
        while len(self._claimed) > REMEMBERED:
            del self._claimed[next(iter(self._claimed))]
        return True

    def _is_first(self, request: "Request", transfer: TransferId) -> bool:
        return self._claimed.get(transfer, request.request_id) == request.request_id

    def _release(self, request: "Request", origin: Origin) -> None:
        name = name_for_peers(request.request_id)
        self._orders.append(Release(origin.transfer, name, origin.source))
        for one in origin.alternatives:
            self._orders.append(Release(one.transfer, name, one.source))

    def _expect(self, request: "Request") -> None:
        transfer = transfer_of(request)
        if transfer is None:
            logger.warning("request %s: no transfer_id, so its cache is not published", request.request_id)
            return
        self._expected[request.request_id] = transfer
        self._announced.append(Expect(transfer))

    def _end_prefill(self, request: "Request", transfer: TransferId, blocks: Sequence[Sequence[int]]) -> None:
        tokens = request.num_prompt_tokens
        if request.status not in PUBLISHED or request.num_computed_tokens < tokens:
            self._withdraw(transfer, f"the prefill request ended as {request.status.name}")
        elif self._shape.leaves_last_token and request.num_computed_tokens > tokens:
            moved = f"its state has moved on to {request.num_computed_tokens} tokens, the prompt has {tokens}"
            self._withdraw(transfer, moved)
        else:
            self._publish(request, transfer, blocks)

    def _publish(self, request: "Request", transfer: TransferId, blocks: Sequence[Sequence[int]]) -> None:
        tokens = request.num_prompt_tokens
        tables = self._shape.cut(blocks, Span(0, tokens))
        ticket = self._hold(tables)
        whole = tokens + (request.request_id in self._cut)
        self._leave_unannounced(transfer)
        self._orders.append(partial(_publication, request, ticket, transfer, tables, whole))
        self._published[transfer] = None
        while len(self._published) > REMEMBERED:
            del self._published[next(iter(self._published))]

    def _withdraw(self, transfer: TransferId, why: str) -> None:
        """Unless another request of that id has brought the cache, or still may."""
        if transfer not in self._published and transfer not in self._expected.values():
            self._leave_unannounced(transfer)
            self._orders.append(Withdraw(transfer, why))

    def _leave_unannounced(self, transfer: TransferId) -> None:
        """What is known of it now says more than that it is expected."""
        expect = Expect(transfer)
        self._announced = [order for order in self._announced if order != expect]
        self._orders = [order for order in self._orders if order != expect]

    def _hold(self, tables: Sequence[Table]) -> Ticket:
        ticket = Ticket(next(self._tickets))
        self._holds.hold(ticket, tables)
        return ticket

    def _warn_of_parameters(self, request: "Request") -> None:
        logger.warning(
            "request %s: kv_transfer_params name no source that this engine can fetch from (%s); its prompt is "
            "computed here",
            request.request_id,
            repr(request.kv_transfer_params)[:LOGGED],
        )


def _publication(
    request: "Request", ticket: Ticket, transfer: TransferId, tables: tuple[Table, ...], prompt_tokens: int
) -> Publish:
    """Of a request that has ended, so that nothing of it changes any more."""
    tokens = request.num_prompt_tokens
    marks = prompt_marks(request, tokens)
    return Publish(ticket, RequestId(request.request_id), transfer, tokens, tables, marks, prompt_tokens)
