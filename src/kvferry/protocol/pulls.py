"""Between a pull on the wire and what the machines speak of: tables, spans, pullers, statuses.

A block list on the wire keeps upstream's form, integers only. Here it is joined with its positions, so that the rest
of the code never sees one without the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.protocol.messages import (
    FEATURES,
    NULL_BLOCK,
    UNPAIRED_RANK,
    VERSION,
    Failed,
    Hello,
    HelloAnswer,
    PartDone,
    Positions,
    Pull,
    PullExtension,
    Reply,
    ReplyExtension,
    Side,
    Status,
)
from kvferry.protocol.producer_events import Answer, Failure, PulledRequest
from kvferry.protocol.values import Puller, Span, Table


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one request of a pull asks for: positions, and the consumer's blocks for them."""

    request: RequestId
    transfer: TransferId
    span: Span
    tables: tuple[Table, ...]
    prompt: str | None = None
    """Digest of the prompt's tokens up to ``span.stop``."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """The sending rank as upstream's record describes it. The region lists stay empty toward a kvferry peer."""

    hostname: str
    port: int
    tp_rank: int
    tp_size: int
    pp_size: int = 1
    base_addresses: tuple[int, ...] = ()
    block_lens: tuple[int, ...] = ()
    kv_block_lens: tuple[int, ...] = ()
    layer_names: tuple[str, ...] = ()
    layer_indices: tuple[int, ...] = ()
    group_indices: tuple[int, ...] = ()
    shared_group_ids: tuple[tuple[int, ...], ...] = ()
    row_offsets: tuple[int, ...] = ()


def make_pull(receiver: Receiver, wanted: Sequence[Wanted], extension: PullExtension | None = None) -> Pull:
    """The pull for these requests. ``extension.requests`` is filled in here."""
    blocks = {
        str(one.request): (str(one.transfer), tuple(_wire_blocks(table) for table in one.tables)) for one in wanted
    }
    if extension is not None:
        extension = structs.replace(extension, requests={one.request: positions_of(one) for one in wanted})
    return _shaped(receiver, blocks, extension)


def make_hello(receiver: Receiver, nonce: str) -> Pull:
    """Asks a peer of unknown kind who it is. ``nonce``: a fresh unguessable id, which no transfer has."""
    shown = Receiver(hostname=receiver.hostname, port=receiver.port, tp_rank=UNPAIRED_RANK, tp_size=receiver.tp_size)
    return _shaped(shown, {nonce: (nonce, ())}, Hello(version=VERSION, features=FEATURES))


def positions_of(wanted: Wanted) -> Positions:
    """The parallel record of the positions of one request's block lists."""
    nulls = tuple(tuple(index for index, block in enumerate(table.blocks) if block is None) for table in wanted.tables)
    return Positions(
        start=wanted.span.start,
        stop=wanted.span.stop,
        first_tokens=tuple(table.first_token for table in wanted.tables),
        nulls=nulls if any(nulls) else (),
        prompt=wanted.prompt,
    )


def requests_of(pull: Pull) -> tuple[PulledRequest, ...]:
    """What a pull asks for. A request without a block is a release."""
    extension = pull.kvferry if isinstance(pull.kvferry, PullExtension) else None
    return tuple(
        _pulled(request, transfer, blocks=blocks, positions=extension.requests[request] if extension else None)
        for request, (transfer, blocks) in pull.req_blocks.items()
    )


def puller_of(pull: Pull) -> Puller:
    """Who pulls. Upstream tells no engine id: its receive engine's address tells the ranks apart."""
    if isinstance(pull.kvferry, PullExtension):
        return puller_of_side(pull.kvferry.consumer)
    return Puller(
        side=f"upstream:tp{pull.remote_tp_size}:pp{pull.remote_pp_size}",
        rank=f"{pull.remote_hostname}:{pull.remote_port}:{pull.remote_tp_rank}",
    )


def puller_of_side(side: Side) -> Puller:
    """The same for a kvferry rank, also where it sends no pull."""
    return Puller(side=f"{side.engine_id}@{side.epoch}", rank=str(side.index))


def incarnation_of(side: Side) -> Incarnation:
    """The life of the engine that a side names."""
    return Incarnation(engine_id=EngineId(side.engine_id), epoch=side.epoch)


def make_reply(action: Answer, pull: Pull, producer: Side) -> Reply:
    """The reply that a producer's machine asked for, in the form that the pull's sender reads."""
    extension = None
    if isinstance(pull.kvferry, PullExtension):
        settled = [_failed(one, quiet=not one.landing) for one in action.err]
        pending = [_failed(one, quiet=False) for one in action.failed]
        extension = ReplyExtension(
            version=VERSION,
            producer=producer,
            pull=pull.kvferry.pull,
            parts=tuple(part for request in action.ok for part in _parts(pull.kvferry, request)),
            failed=(*settled, *pending),
        )
    return Reply(
        status=Status.FINISH if action.finish else Status.CONTINUE,
        ok_reqs=action.ok or None,
        err_reqs=tuple(one.request for one in action.err) or None,
        err_msg="; ".join(dict.fromkeys(_said(one) for one in action.err))[:4096] or None,
        kvferry=extension,
    )


def make_refusal(
    reason: ProtocolReason,
    message: str,
    *,
    pull: Pull | None = None,
    producer: Side | None = None,
    missing: tuple[str, ...] = (),
) -> Reply:
    """Refuses a whole pull before anything of it was done.

    Toward upstream a layout miss is only ever the answer to a ``layout_id``, so the peer can read its status.
    """
    extension = pull.kvferry if pull and isinstance(pull.kvferry, PullExtension) else None
    stored = reason is ProtocolReason.LAYOUT_MISS and extension is None
    ours = producer and ReplyExtension(
        version=VERSION,
        producer=producer,
        pull=extension.pull if extension else None,
        reason=reason.value,
        missing=missing,
    )
    return Reply(
        status=Status.LAYOUT_MISS if stored else Status.ERROR,
        err_msg=f"{reason.value}: {message}"[:4096],
        kvferry=ours or None,
    )


def numbered(refusal: Reply, number: int | None) -> Reply:
    """The same refusal, for a pull of which only the number could be read."""
    if number is None or not isinstance(refusal.kvferry, ReplyExtension):
        return refusal
    return structs.replace(refusal, kvferry=structs.replace(refusal.kvferry, pull=number))


def make_hello_answer(
    producer: Side, *, transport: str = "", transport_address: str = "", features: tuple[str, ...] = FEATURES
) -> Reply:
    """The answer to a hello: an ERROR, as upstream would give, with who we are."""
    answer = HelloAnswer(
        version=VERSION,
        producer=producer,
        features=features,
        transport=transport,
        transport_address=transport_address,
    )
    return Reply(status=Status.ERROR, err_msg="no transfer: this rank is not paired", kvferry=answer)


def _shaped(
    receiver: Receiver,
    blocks: Mapping[str, tuple[str, tuple[tuple[int, ...], ...]]],
    extension: PullExtension | Hello | None,
) -> Pull:
    return Pull(
        remote_hostname=receiver.hostname,
        remote_port=receiver.port,
        remote_tp_size=receiver.tp_size,
        remote_tp_rank=receiver.tp_rank,
        req_blocks=dict(blocks),
        kv_caches_base_addr=receiver.base_addresses,
        block_lens=receiver.block_lens,
        kv_block_lens=receiver.kv_block_lens,
        registered_layer_names=receiver.layer_names,
        registered_layer_indices=receiver.layer_indices,
        registered_group_indices=receiver.group_indices,
        registered_shared_group_ids=receiver.shared_group_ids,
        registered_row_offsets=receiver.row_offsets,
        remote_pp_size=receiver.pp_size,
        kvferry=extension,
    )


def _wire_blocks(table: Table) -> tuple[int, ...]:
    return tuple(NULL_BLOCK if block is None else block for block in table.blocks)


def _pulled(
    request: str, transfer: str, *, blocks: tuple[tuple[int, ...], ...], positions: Positions | None
) -> PulledRequest:
    if positions is None:
        tables = tuple(Table(first_token=None, blocks=group) for group in blocks)
    else:
        nulls = positions.nulls or ((),) * len(blocks)
        tables = tuple(
            _table(group, first, holes)
            for group, first, holes in zip(blocks, positions.first_tokens, nulls, strict=True)
        )
    return PulledRequest(
        request=RequestId(request),
        transfer=TransferId(transfer),
        span=Span(positions.start, positions.stop) if positions else None,
        tables=tables,
        prompt=positions.prompt if positions else None,
        release=not any(block is not None for table in tables for block in table.blocks),
    )


def _table(group: tuple[int, ...], first: int | None, holes: tuple[int, ...]) -> Table:
    if not holes:
        return Table(first_token=first, blocks=group)
    if max(holes) >= len(group):
        raise RemoteProtocolError(
            ProtocolReason.MALFORMED, f"entry {max(holes)} of a list of {len(group)} blocks is said to be empty"
        )
    held: list[int | None] = list(group)
    for index in holes:
        held[index] = None
    return Table(first_token=first, blocks=tuple(held))


def _parts(extension: PullExtension, request: str) -> tuple[PartDone, ...]:
    positions = extension.requests[request]
    return (PartDone(request=request, start=positions.start, stop=positions.stop),)


def _failed(failure: Failure, *, quiet: bool) -> Failed:
    return Failed(request=failure.request, reason=failure.reason.value, quiet=quiet, detail=failure.detail[:4096])


def _said(failure: Failure) -> str:
    return f"{failure.reason.value}: {failure.detail}" if failure.detail else failure.reason.value
