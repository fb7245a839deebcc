"""What vLLM's own MooncakeConnector makes of a pair of deployments: its code, from registration to descriptors.

A side is an engine whose ranks are here one after the other (:class:`kvferry.vllm.dump.RanksInTurn`) and whose workers
hold upstream's connector in kvferry's place. It has registered vLLM's real tensors; the transfer engine beneath it
does nothing. A consumer's pull is built from the fields that upstream's receiver sends, and answered by upstream's
``send_kv_to_decode``; what it would hand to the engine is caught.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.v1.engine.core import EngineCore

from kvferry.vllm.dump import RanksInTurn, engine_config

Tables = Sequence[Sequence[int]]
"""Block ids of each group, 0 where there is none, as vLLM's scheduler gives them."""


@dataclass(frozen=True, slots=True)
class Side:
    """One deployment under upstream's connector."""

    workers: tuple[Any, ...]
    """By tensor parallel rank."""
    scheduler: Any

    def storage(self, rank: int) -> int:
        """Where the one storage of a rank began."""
        (address,) = self.workers[rank].seen_base_addresses
        return int(address)


@dataclass(frozen=True, slots=True)
class Moves:
    """What one producer rank would send to one consumer rank: addresses in the two processes, or why nothing."""

    producer: int
    consumer: int
    src: tuple[int, ...] = ()
    dst: tuple[int, ...] = ()
    nbytes: tuple[int, ...] = ()
    error: str | None = None


def start_side(engine_args: Mapping[str, Any]) -> Side:
    """Build the ranks of an engine with upstream's connector, far enough to have registered."""
    upstream.TransferEngine = _IdleEngine
    torch.accelerator.current_device_index = lambda: 0  # upstream asks for it, and torch has none on a CPU
    config = engine_config(engine_args, kv_transfer=_CONNECTOR, executor=_UpstreamRanks)
    core = EngineCore(config, _UpstreamRanks, log_stats=False)
    return Side(tuple(core.model_executor.workers), core.scheduler.connector.connector_scheduler)


def moves(producer: Side, consumer: Side, *, send: Tables, receive: Tables) -> list[Moves]:
    """All that the producer would send for one request, its blocks ``send``, into the consumer's ``receive``."""
    sent = producer.scheduler.get_sw_clipped_blocks([list(ids) for ids in send])
    wanted = consumer.scheduler.get_sw_clipped_blocks([list(ids) for ids in receive])
    found = []
    for rank, worker in enumerate(consumer.workers):
        pull = _pull(worker, wanted)
        for target in worker.transfer_topo.handshake_target_ranks(len(producer.workers)):
            found.append(asyncio.run(_serve(producer.workers[target], pull, sent, pair=(target, rank))))
    return found


_CONNECTOR: Final = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "engine_id": "upstream"}
"""A consumer opens no sockets when it registers; what a producer does for a pull does not depend on the role."""

_REQUEST, _TRANSFER = "request", "transfer"


class _UpstreamRanks(RanksInTurn):
    """Keeps each rank's connector."""

    def after_registration(self) -> None:
        self.workers: list[Any] = [
            *getattr(self, "workers", ()),
            kv_transfer_state._KV_CONNECTOR_AGENT.connector_worker,
        ]
        kv_transfer_state._KV_CONNECTOR_AGENT = None


class _IdleEngine:
    """Takes what Mooncake's engine takes at registration."""

    def initialize(self, *address: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        return 0


def _pull(worker: Any, blocks: Tables) -> Any:
    return upstream.MooncakeXferMetadata(
        remote_hostname="consumer",
        remote_port=1,
        remote_tp_size=worker.tp_size,
        remote_tp_rank=worker.tp_rank,
        remote_pp_size=worker.pp_size,
        req_blocks={_REQUEST: (_TRANSFER, [list(ids) for ids in blocks])},
        kv_caches_base_addr=worker.kv_caches_base_addr,
        block_lens=worker.block_len_per_layer,
        kv_block_lens=worker.kv_block_len_per_layer,
        registered_layer_names=worker.registered_layer_names,
        registered_layer_indices=worker.registered_layer_indices,
        registered_group_indices=worker.registered_group_indices,
        registered_shared_group_ids=[list(groups) for groups in worker.region_shared_groups],
        registered_row_offsets=worker.region_row_offsets,
    )


class _ReplySocket:
    """Where the producer's answer goes."""

    def __init__(self) -> None:
        self.replies: list[Any] = []

    async def send_multipart(self, frames: tuple[bytes, bytes]) -> None:
        self.replies.append(msgspec.msgpack.decode(frames[1], type=upstream.MooncakeXferResponse))


async def _serve(worker: Any, pull: Any, blocks: Tables, *, pair: tuple[int, int]) -> Moves:
    caught: list[tuple[list[int], list[int], list[int]]] = []

    def send_blocks(session: str, src: list[int], dst: list[int], nbytes: list[int]) -> int:
        caught.append((src, dst, nbytes))
        return 0

    entry = upstream.SendBlockMeta("prefill", _TRANSFER, [list(ids) for ids in blocks], asyncio.Event())
    entry.ready.set()
    worker.reqs_need_send = {_TRANSFER: entry}
    worker.sender_loop, worker._sender_executor, worker._send_blocks = asyncio.get_running_loop(), None, send_blocks
    socket = _ReplySocket()
    try:
        await worker.send_kv_to_decode(b"", socket, pull)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the answer that is asked for
        return Moves(*pair, error=f"{type(error).__name__}: {error}")
    refusals = [reply.err_msg for reply in socket.replies if reply.err_msg]
    if refusals or not caught:
        return Moves(*pair, error=refusals[0] if refusals else None)
    src, dst, nbytes = caught[0]
    return Moves(*pair, tuple(src), tuple(dst), tuple(nbytes))
