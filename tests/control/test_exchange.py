"""Listener and links over real sockets: one frame each way, losses told once, nothing left behind."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvferry.control import Links, Listener, SocketOptions
from kvferry.errors import ConfigError, ProtocolReason, RemoteProtocolError

HOST = "127.0.0.1"


def reply(number: int, text: str = "") -> bytes:
    return msgspec.msgpack.encode({"status": 1, "err_msg": text, "kvferry": {"kind": "reply", "pull": number}})


@dataclass
class Producer:
    """What a listener heard."""

    heard: list[tuple[bytes, bytes]] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)

    def listener(self, **options: Any) -> Listener:
        return Listener(
            on_message=lambda connection, data: self.heard.append((connection, data)),
            on_lost=self.lost.append,
            options=SocketOptions(**options),
        )


@dataclass
class Consumer:
    """What came to the pulls of a consumer."""

    replies: list[tuple[str, bytes]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def links(self, **options: Any) -> Links[str]:
        return Links(
            on_reply=lambda key, data: self.replies.append((key, data)),
            on_lost=self.lost.append,
            options=SocketOptions(**options),
        )


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what it waits for is another process, or a socket
            await asyncio.sleep(0.01)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run, and see that no task and no thread is left."""

    async def checked() -> None:
        await main()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    threads = threading.active_count()
    asyncio.run(checked(), debug=False)
    assert threading.active_count() == threads


def test_pulls_share_a_connection_and_get_their_own_replies() -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        listener, links = producer.listener(), consumer.links()
        address = await listener.start(HOST)
        assert address.startswith(f"tcp://{HOST}:")
        links.pull("a", address, b"pull a", number=1)
        links.pull("b", address, b"pull b", number=2)
        await until(lambda: len(producer.heard) == 2)
        assert [data for _, data in producer.heard] == [b"pull a", b"pull b"]
        (connection,) = {one for one, _ in producer.heard}
        assert len(links) == 1
        listener.send(connection, reply(2))
        listener.send(connection, reply(1))
        listener.send(connection, reply(3))
        await until(lambda: len(consumer.replies) == 2)
        assert consumer.replies == [("b", reply(2)), ("a", reply(1))]
        links.forget("a")
        listener.send(connection, reply(1))
        listener.send(connection, reply(2))
        await until(lambda: len(consumer.replies) == 3)
        assert consumer.replies[-1] == ("b", reply(2))
        await links.close()
        await listener.close()
        assert not consumer.lost

    run(main)


def test_a_pull_sent_again_hears_only_replies_to_its_new_number() -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        listener, links = producer.listener(), consumer.links()
        address = await listener.start(HOST)
        links.pull("a", address, b"first", number=1)
        links.pull("a", address, b"again", number=2)
        await until(lambda: len(producer.heard) == 2)
        connection = producer.heard[0][0]
        listener.send(connection, reply(1))
        listener.send(connection, reply(2))
        await until(lambda: consumer.replies)
        assert consumer.replies == [("a", reply(2))]
        await links.close()
        await listener.close()

    run(main)


def test_a_pull_to_upstream_has_a_connection_of_its_own() -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        listener, links = producer.listener(), consumer.links()
        address = await listener.start(HOST)
        links.pull("a", address, b"pull a", number=None)
        links.pull("b", address, b"pull b", number=None)
        await until(lambda: len(producer.heard) == 2)
        connections = {data: connection for connection, data in producer.heard}
        assert len(set(connections.values())) == len(links) == 2
        listener.send(connections[b"pull b"], b"an error that names nobody")
        await until(lambda: consumer.replies)
        assert consumer.replies == [("b", b"an error that names nobody")]
        links.forget("b")
        await until(lambda: len(links) == 1)
        await links.close()
        await listener.close()

    run(main)


def test_a_closed_port_is_a_loss_and_nothing_is_sent_later() -> None:
    """What was queued for a dead process never reaches the next one at its port."""

    async def main() -> None:
        probe = socket.create_server((HOST, 0))
        port = probe.getsockname()[1]
        probe.close()
        producer, consumer = Producer(), Consumer()
        links = consumer.links()
        links.pull("a", f"tcp://{HOST}:{port}", b"old", number=1)
        links.pull("b", f"tcp://{HOST}:{port}", b"old", number=None)
        await until(lambda: len(consumer.lost) == 2, 2.0)
        assert sorted(consumer.lost) == ["a", "b"]
        listener = producer.listener()
        await listener.start(HOST, port)
        links.pull("a", listener.address, b"new", number=2)
        await until(lambda: producer.heard)
        assert [data for _, data in producer.heard] == [b"new"]
        await links.close()
        await listener.close()

    run(main)


def test_a_process_that_has_no_more_files_is_told_so_and_goes_on_when_it_has() -> None:
    async def main() -> None:
        consumer, listener = Consumer(), Producer().listener()
        address = await listener.start(HOST)
        links = consumer.links()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(RemoteProtocolError, match="Too many open files") as refused:
                links.pull("a", address, b"x", number=1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert refused.value.reason is ProtocolReason.PEER_LOST
        links.pull("a", address, b"x", number=1)
        assert links.is_open(address)
        await links.close()
        await listener.close()

    run(main)


def test_a_mute_port_is_a_loss() -> None:
    async def main() -> None:
        consumer = Consumer()
        links = consumer.links(connect=0.5)
        with socket.create_server((HOST, 0)) as mute:
            links.pull("a", f"tcp://{HOST}:{mute.getsockname()[1]}", b"hello?", number=1)
            await until(lambda: consumer.lost == ["a"], 3.0)
            await links.close()

    run(main)


def test_a_listener_that_closes_is_lost_to_each_of_its_pulls_once() -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        listener, links = producer.listener(), consumer.links()
        address = await listener.start(HOST)
        for number, key in enumerate("abc"):
            links.pull(key, address, b"x", number=number)
        await until(lambda: len(producer.heard) == 3)
        links.forget("b")
        await listener.close()
        await until(lambda: len(consumer.lost) == 2)
        assert sorted(consumer.lost) == ["a", "c"]
        assert len(links) == 0
        await links.close()

    run(main)


def test_answering_a_consumer_that_is_gone_tells_of_its_loss() -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        listener, links = producer.listener(), consumer.links()
        links.pull("a", await listener.start(HOST), b"x", number=1)
        await until(lambda: producer.heard)
        connection = producer.heard[0][0]
        await links.close()

        def answered() -> bool:
            listener.send(connection, reply(1))
            return bool(producer.lost)

        await until(answered, 2.0)
        assert producer.lost[0] == connection
        await listener.close()

    run(main)


def test_messages_of_another_shape_do_not_stop_the_listener() -> None:
    """Upstream's listener dies of a second frame; ours must not."""

    async def main() -> None:
        producer = Producer()
        listener = producer.listener(max_message=1 << 16)
        address = await listener.start(HOST)
        context = zmq.asyncio.Context()
        for frames in ([b"one", b"two"], [b"", b"delimited"], [b"x" * (1 << 17)], [b"good"]):
            peer = context.socket(zmq.DEALER)
            peer.linger = 1000
            peer.connect(address)
            await peer.send_multipart(frames)
            await until(lambda want=frames: listener.malformed or producer.heard or len(want[0]) > 1000)
            peer.close()
        await until(lambda: producer.heard)
        assert [data for _, data in producer.heard] == [b"good"]
        assert listener.malformed == 2
        await listener.close()
        context.term()

    run(main)


def test_a_fault_of_the_callback_does_not_stop_the_listener() -> None:
    async def main() -> None:
        heard: list[bytes] = []
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

        def on_message(_: bytes, data: bytes) -> None:
            if data == b"bad":
                raise ValueError(data)
            heard.append(data)

        listener = Listener(on_message=on_message, on_lost=heard.append)
        links = Consumer().links()
        address = await listener.start(HOST)
        links.note(address, b"bad")
        links.note(address, b"good")
        await until(lambda: heard)
        assert heard == [b"good"]
        assert len(faults) == 1
        await links.close()
        await listener.close()

    run(main)


def test_ask_gets_one_answer_or_says_who_does_not_answer() -> None:
    async def main() -> None:
        producer = Producer()
        listener, links = producer.listener(), Consumer().links()
        address = await listener.start(HOST)
        asking = asyncio.create_task(links.ask(address, b"who?", timeout=5))
        await until(lambda: producer.heard)
        listener.send(producer.heard[0][0], b"me")
        assert await asking == b"me"
        for silent, seconds in ((address, 0.2), (f"tcp://{HOST}:1", 5)):
            with pytest.raises(RemoteProtocolError) as caught:
                await links.ask(silent, b"who?", timeout=seconds)
            assert caught.value.reason is ProtocolReason.PEER_LOST
        await links.close()
        await listener.close()

    run(main)


@pytest.mark.parametrize(
    "address", ["", "http://h:1", "tcp://h", "tcp://h:0", "tcp://h:99999", "ipc:///x", "tcp://u@h:1"]
)
def test_only_tcp_addresses_are_connected_to(address: str) -> None:
    async def main() -> None:
        links = Consumer().links()
        with pytest.raises(RemoteProtocolError) as caught:
            links.pull("a", address, b"x", number=1)
        assert caught.value.reason is ProtocolReason.MALFORMED
        await links.close()

    run(main)


def test_a_taken_port_is_a_configuration_error() -> None:
    async def main() -> None:
        listener = Producer().listener()
        with socket.create_server((HOST, 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
            await listener.start(HOST, taken.getsockname()[1])
        await listener.close()

    run(main)


def test_an_idle_connection_is_closed_and_made_again() -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        listener, links = producer.listener(), consumer.links(idle=0.2)
        address = await listener.start(HOST)
        links.pull("a", address, b"1", number=1)
        await until(lambda: producer.heard)
        links.forget("a")
        await until(lambda: len(links) == 0, 3.0)
        links.pull("b", address, b"2", number=2)
        await until(lambda: len(producer.heard) == 2)
        assert not consumer.lost
        await links.close()
        await listener.close()

    run(main)


CHILD = """
import asyncio, sys
from kvferry.control import Listener
async def main():
    listener = Listener(on_message=lambda c, d: None, on_lost=lambda c: None)
    print(await listener.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def start() -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("sign", "seconds"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 8.0)])
def test_a_dead_or_stopped_producer_is_noticed_in_seconds(sign: signal.Signals, seconds: float) -> None:
    async def main() -> None:
        child = start()
        try:
            assert child.stdout is not None
            address = await asyncio.to_thread(child.stdout.readline)
            consumer = Consumer()
            links = consumer.links()
            links.pull("a", address.strip(), b"x", number=1)
            assert not consumer.lost
            os.kill(child.pid, sign)
            await until(lambda: consumer.lost == ["a"], seconds)
            await links.close()
        finally:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        await asyncio.get_running_loop().shutdown_default_executor()

    run(main)
