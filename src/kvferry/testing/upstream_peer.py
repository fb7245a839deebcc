"""vLLM's own MooncakeConnector as a scripted peer: real sockets, a real Mooncake engine, no vLLM.

A consumer that pulls in upstream's form and can vanish at any point; a producer that lists itself in a bootstrap
service without our card, answers a hello as upstream does, and serves, fails, forgets or dies as it is told. It writes
by upstream's own rule: the last blocks of both lists, in order, whole kernel blocks at ``base + block * block_len``.
"""

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import zmq

from kvferry.layout import Layout, Region
from kvferry.plan import Descriptors
from kvferry.protocol import Pull, Receiver, Reply, Status, decode_inbound, encode
from kvferry.runtime.upstream_caches import CacheRegion, Declared, OwnCaches
from kvferry.transport import MooncakeTransport
from kvferry.transport.base import SubmissionState, wait

Deed = Literal["serve", "err", "omit", "refuse", "mute"]
"""What the producer does with a pull: write and name it ok; name it as failed; finish without naming it; answer with
an error; say nothing."""

POLL_MS: Final = 50


def caches_of(layout: Layout, *, block_size: int, declared: Declared | None = None) -> OwnCaches:
    """The regions that upstream would register for a layout of compact pages, one component or more for a layer."""
    regions: dict[str, CacheRegion] = {}
    for one in layout.components:
        base = min(other.address for other in layout.components if other.layer == one.layer)
        stride = one.page_stride if one.pages > 1 else one.block_stride
        live = sum(other.live_bytes // other.pages for other in layout.components if other.layer == one.layer)
        regions[one.layer] = CacheRegion(one.layer, one.layer_index, one.group, base, stride, live, (one.group,))
    pages = max((one.pages for one in layout.components), default=1)
    return OwnCaches(
        regions=tuple(regions.values()),
        block_size=block_size,
        kernel_block_size=block_size // pages,
        cache_dtype="float32",
        layout="LBHNC",
        declared=declared or Declared(),
    )


def receiver_of(caches: OwnCaches, session: str, *, tp_rank: int = 0, tp_size: int = 1) -> Receiver:
    """How a rank with these caches shows itself in a pull."""
    host, _, port = session.rpartition(":")
    regions = caches.regions
    return Receiver(
        hostname=host,
        port=int(port),
        tp_rank=tp_rank,
        tp_size=tp_size,
        base_addresses=tuple(one.base for one in regions),
        block_lens=tuple(one.block_len for one in regions),
        kv_block_lens=tuple(one.kv_block_len for one in regions),
        layer_names=tuple(one.layer for one in regions),
        layer_indices=tuple(one.index for one in regions),
        group_indices=tuple(one.group for one in regions),
        shared_group_ids=tuple(one.groups for one in regions),
        row_offsets=tuple(one.row_offset for one in regions),
    )


def pull_of(receiver: Receiver, requests: Mapping[str, tuple[str, Sequence[Sequence[int]]]]) -> Pull:
    """A pull: by request, the transfer and the blocks of each group."""
    return Pull(
        remote_hostname=receiver.hostname,
        remote_port=receiver.port,
        remote_tp_size=receiver.tp_size,
        remote_tp_rank=receiver.tp_rank,
        req_blocks={name: (transfer, tuple(map(tuple, lists))) for name, (transfer, lists) in requests.items()},
        kv_caches_base_addr=receiver.base_addresses,
        block_lens=receiver.block_lens,
        kv_block_lens=receiver.kv_block_lens,
        registered_layer_names=receiver.layer_names,
        registered_layer_indices=receiver.layer_indices,
        registered_group_indices=receiver.group_indices,
        registered_shared_group_ids=receiver.shared_group_ids,
        registered_row_offsets=receiver.row_offsets,
        remote_pp_size=receiver.pp_size,
    )


class ScriptedConsumer:
    """A rank that pulls. Used from one thread."""

    def __init__(self, layout: Layout, caches: OwnCaches) -> None:
        self.engine = MooncakeTransport("127.0.0.1")
        self.engine.register(layout.regions)
        self.receiver = receiver_of(caches, self.engine.address())
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def pull(self, address: str, message: Pull) -> "zmq.Socket[bytes]":
        """Send a pull on a connection of its own."""
        return self.send(address, encode(message))

    def send(self, address: str, data: bytes) -> "zmq.Socket[bytes]":
        """The same, of bytes: a newer release writes fields that our record does not have."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(data)
        self._sockets.append(socket)
        return socket

    def replies(self, socket: "zmq.Socket[bytes]", *, within: float) -> list[Reply]:
        """All replies up to one that ends the pull, or that come in time."""
        found: list[Reply] = []
        deadline = time.monotonic() + within
        while not (found and found[-1].status is not Status.CONTINUE) and time.monotonic() < deadline:
            if socket.poll(POLL_MS):
                frames = socket.recv_multipart()
                assert len(frames) == 1, "upstream reads one frame"
                found.append(msgspec.msgpack.decode(frames[0], type=Reply))
        return found

    def vanish(self) -> None:
        """Gone: connections and engine."""
        for socket in self._sockets:
            socket.close()
        self._context.destroy(linger=0)
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Held:
    """A computed prompt: the blocks of each group."""

    lists: tuple[tuple[int, ...], ...]


class ScriptedProducer:
    """A rank that is pulled from, in a thread of its own."""

    def __init__(self, layout: Layout, caches: OwnCaches, *, deed: Deed = "serve") -> None:
        self.engine = MooncakeTransport("127.0.0.1")
        self.engine.register(layout.regions)
        self.deed: Deed = deed
        self.held: dict[str, Held] = {}
        self.pulls: list[Pull] = []
        """All that came, hellos left out."""
        self.hellos = 0
        self.frames: list[int] = []
        """How many frames each message had: a second one would have killed upstream's listener."""
        self._caches = caches
        self._stop = threading.Event()
        self._ready: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="scripted producer", daemon=True)
        self._thread.start()
        self.address = self._ready.get(timeout=10)

    def close(self) -> None:
        """Gone: connections and engine. Safe to call twice."""
        self._stop.set()
        self._thread.join(10)
        self.engine.close()

    def _listen(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1", min_port=15_000, max_port=32_000)
        self._ready.put(f"tcp://127.0.0.1:{port}")
        while not self._stop.is_set():
            if socket.poll(POLL_MS):
                frames = socket.recv_multipart()
                self.frames.append(len(frames) - 1)
                for reply in self._answers(frames[1]):
                    socket.send_multipart([frames[0], encode(reply)])
        socket.close()
        context.destroy(linger=0)

    def _answers(self, data: bytes) -> list[Reply]:
        message = decode_inbound(data)
        assert isinstance(message, Pull), "upstream knows pulls only"
        if message.remote_tp_rank != 0:
            self.hellos += 1
            return [Reply(Status.ERROR, err_msg="This D tp_rank is not paired with P tp_rank 0.")]
        self.pulls.append(message)
        names = tuple(message.req_blocks)
        match self.deed:
            case "serve":
                failed = tuple(name for name in names if not self._write(message, name))
                ok = tuple(name for name in names if name not in failed)
                return [Reply(Status.FINISH, ok_reqs=ok or None, err_reqs=failed or None)]
            case "err":
                return [Reply(Status.FINISH, err_reqs=names, err_msg="Mooncake transfer engine returned -1")]
            case "omit":
                return [Reply(Status.FINISH)]
            case "refuse":
                return [Reply(Status.ERROR, err_msg="refused")]
            case "mute":
                return []

    def _write(self, pull: Pull, name: str) -> bool:
        transfer, lists = pull.req_blocks[name]
        if not any(lists):
            return True
        held = self.held[transfer].lists
        if any(len(sent) < len(wanted) for sent, wanted in zip(held, lists, strict=True)):
            return False
        rows = [
            (region.base + sent * region.block_len, base + wanted * stride, region.kv_block_len)
            for region, base, stride in zip(
                self._caches.regions, pull.kv_caches_base_addr, pull.block_lens, strict=True
            )
            for sent, wanted in self._paired(held[region.group], lists[region.group])
        ]
        src, dst, nbytes = zip(*rows, strict=True)
        reach = Region(min(dst), max(dst) + max(nbytes) - min(dst))
        peer = self.engine.open_peer(f"{pull.remote_hostname}:{pull.remote_port}", [reach])
        submission = self.engine.submit(peer, Descriptors.of(src, dst, nbytes))
        return wait(submission, timeout_s=20) is SubmissionState.DONE

    def _paired(self, sent: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int]]:
        """Kernel blocks of both sides: the last blocks of the longer list, both expanded by this side's ratio."""
        ratio = self._caches.block_size // self._caches.kernel_block_size
        last = sent[len(sent) - len(wanted) :]
        return [(p * ratio + q, d * ratio + q) for p, d in zip(last, wanted, strict=True) for q in range(ratio)]
