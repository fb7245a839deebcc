"""Faults of the field that live in the message channel, each by its id."""

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from kvferry.control import Links, Listener, SocketOptions

HOST: Final = "127.0.0.1"
ESTABLISHED: Final = "01"
SENDERS: Final = 10
EACH: Final = 1000


def reply(number: int) -> bytes:
    return msgspec.msgpack.encode({"status": 0, "kvferry": {"kind": "reply", "pull": number}})


def connections_to(port: int) -> Counter[str]:
    """TCP connections of this machine to a local port, by their state in the kernel's table."""
    found: Counter[str] = Counter()
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    for line in (one for table in tables for one in table):
        _, _, remote, state, *_ = line.split()
        if int(remote.rpartition(":")[2], 16) == port:
            found[state] += 1
    return found


class Peer:
    """A producer's door that answers each pull at once."""

    def __init__(self) -> None:
        self.heard = 0
        self.connections: set[bytes] = set()
        self.listener = Listener(on_message=self._answer, on_lost=lambda _: None, options=SocketOptions())

    def _answer(self, connection: bytes, data: bytes) -> None:
        self.heard += 1
        self.connections.add(connection)
        self.listener.send(connection, reply(int(data)))


def test_s06_ten_thousand_small_pulls_by_ten_senders_take_one_connection_and_survive_a_restart() -> None:
    async def main() -> None:
        first, second = Peer(), Peer()
        address = await first.listener.start(HOST)
        port = int(address.rpartition(":")[2])
        waiting: dict[int, asyncio.Future[None]] = {}
        lost: list[int] = []
        most: Counter[str] = Counter()

        def on_reply(key: int, data: bytes) -> None:
            waiting.pop(key).set_result(None)

        links: Links[int] = Links(on_reply=on_reply, on_lost=lost.append, options=SocketOptions())

        async def send(key: int) -> None:
            waiting[key] = asyncio.get_running_loop().create_future()
            done = waiting[key]
            links.pull(key, address, str(key).encode(), number=key)
            async with asyncio.timeout(20):
                await done
            links.forget(key)

        async def sender(which: int, part: int) -> None:
            for index in range(EACH // 2):
                await send((part * SENDERS + which) * EACH + index)
                if not index % 100:
                    for state, count in connections_to(port).items():
                        most[state] = max(most[state], count)

        await asyncio.gather(*(sender(which, 0) for which in range(SENDERS)))
        assert len(links) == 1
        files = len(os.listdir("/proc/self/fd"))
        await first.listener.close()
        async with asyncio.timeout(10):
            while len(links):  # noqa: ASYNC110 - what it waits for is a socket
                await asyncio.sleep(0.005)
        assert await second.listener.start(HOST, port) == address
        await send(999_999)  # the first after the restart: by a new connection, and answered
        await asyncio.gather(*(sender(which, 1) for which in range(SENDERS)))
        assert first.heard + second.heard == SENDERS * EACH + 1
        assert (len(first.connections), len(second.connections)) == (1, 1)
        assert not lost, "nothing was under way when the peer restarted"
        assert most[ESTABLISHED] == 1, most
        assert sum(most.values()) <= 3, "connections pile up in the kernel"
        assert len(os.listdir("/proc/self/fd")) <= files + 2
        await links.close()
        await second.listener.close()

    asyncio.run(main())
