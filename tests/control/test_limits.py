"""Queues of the message sockets are bounded by their options: who takes nothing is lost, and nobody waits for it."""

import asyncio
import socket
import threading

import msgspec
import zmq
import zmq.asyncio

from kvferry.control import Links, Listener, SocketOptions

HOST = "127.0.0.1"


def reply(number: int, text: str = "") -> bytes:
    return msgspec.msgpack.encode({"status": 1, "err_msg": text, "kvferry": {"kind": "reply", "pull": number}})


def test_more_pulls_than_may_be_queued_for_a_peer_that_takes_none_are_a_loss() -> None:
    async def main() -> None:
        lost: list[int] = []
        options = SocketOptions(max_queued=5, connect=60.0)
        links: Links[int] = Links(on_reply=lambda *_: None, on_lost=lost.append, options=options)
        with socket.create_server((HOST, 0)) as mute:
            address = f"tcp://{HOST}:{mute.getsockname()[1]}"
            for number in range(5):
                links.pull(number, address, b"pull", number=number)
            await asyncio.sleep(0)
            assert lost == []
            links.pull(5, address, b"pull", number=5)
            async with asyncio.timeout(5):
                while len(lost) < 6:  # noqa: ASYNC110 - a callback of the loop
                    await asyncio.sleep(0.001)
            assert sorted(lost) == list(range(6))
            await links.close()

    asyncio.run(main())


def test_a_consumer_that_reads_nothing_is_lost_to_its_producer_and_others_are_served() -> None:
    async def main() -> None:
        heard: dict[bytes, bytes] = {}
        lost: list[bytes] = []
        listener = Listener(
            on_message=lambda connection, data: heard.update({data: connection}),
            on_lost=lost.append,
            options=SocketOptions(max_queued=5),
        )
        address = await listener.start(HOST)
        context = zmq.asyncio.Context()
        idle, busy = (context.socket(zmq.DEALER) for _ in range(2))
        idle.setsockopt(zmq.RCVHWM, 1)
        for one, name in ((idle, b"idle"), (busy, b"busy")):
            one.setsockopt(zmq.LINGER, 0)
            one.connect(address)
            await one.send(name)
        async with asyncio.timeout(10):
            while len(heard) < 2:  # noqa: ASYNC110 - what it waits for is a socket
                await asyncio.sleep(0.005)
            sent = 0
            while not lost:
                listener.send(heard[b"idle"], reply(1, "x" * 60_000))
                sent += 1
                await asyncio.sleep(0)
        assert set(lost) == {heard[b"idle"]}
        assert sent < 2_000, "kernel buffers and the queue, and no more"
        listener.send(heard[b"busy"], reply(2))
        async with asyncio.timeout(5):
            assert await busy.recv() == reply(2)
        context.destroy(linger=0)
        await listener.close()

    asyncio.run(main())


def test_a_producer_that_is_thousands_of_pulls_behind_is_not_lost() -> None:
    """Heartbeats are read behind what came before them, so the queue of unread pulls must not fill in an overload."""
    options = SocketOptions(heartbeat=0.1, silence=0.5)
    heard: list[bytes] = []
    go_on, listening, over = (threading.Event() for _ in range(3))
    found: list[str] = []

    def take(connection: bytes, data: bytes) -> None:
        heard.append(data)
        if len(heard) == 1:
            go_on.wait(30)  # the loop is busy: nothing is read meanwhile

    async def serve() -> None:
        listener = Listener(on_message=take, on_lost=lambda _: None, options=options)
        found.append(await listener.start(HOST))
        listening.set()
        while not over.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        await listener.close()

    async def pull() -> None:
        lost: list[int] = []
        links: Links[int] = Links(on_reply=lambda *_: None, on_lost=lost.append, options=options)
        for number in range(5_000):
            links.pull(number, found[0], b"pull", number=number)
            if number % 100 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(4 * options.silence)
        assert lost == []
        go_on.set()
        async with asyncio.timeout(30):
            while len(heard) < 5_000:  # noqa: ASYNC110 - filled by another thread
                await asyncio.sleep(0.01)
        assert lost == []
        await links.close()

    server = threading.Thread(target=asyncio.run, args=(serve(),))
    server.start()
    try:
        assert listening.wait(10)
        asyncio.run(pull())
    finally:
        go_on.set()
        over.set()
        server.join(10)
