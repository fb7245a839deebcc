"""Doors over real sockets, with strangers in a process of their own."""

import asyncio
import subprocess
import sys

import pytest
import zmq
import zmq.asyncio

from kvferry.control import (
    CurveKeys,
    Guard,
    Keyring,
    Links,
    ListedDoor,
    Listener,
    Networks,
    Secret,
    SecureDoor,
    SocketOptions,
)
from kvferry.control.doors import Gatekeeper
from kvferry.errors import ProtocolReason, RemoteProtocolError

from .test_exchange import HOST, Consumer, Producer, reply, run, until

TEXT = b"5b3f0d6a9c1e47b28d5502f0a7e6c4d1"
OTHER = b"1d4c6e7a0f2055d82b74e1c9a6d0f3b5"
KEYS = CurveKeys.of(Secret.of(TEXT, source="test"))

STRANGER = """
import sys, zmq
address, mode, server = sys.argv[1:]
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
if mode == "own keys":
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
    public, hidden = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, hidden)
elif mode == "password":
    socket.setsockopt(zmq.PLAIN_USERNAME, b"kvferry")
    socket.setsockopt(zmq.PLAIN_PASSWORD, b"x" * 200)
socket.connect(address)
for _ in range(20):
    try:
        socket.send(b"let me in", zmq.NOBLOCK)
    except zmq.Again:  # the door has hung up
        pass
    if socket.poll(50):
        print("answered", flush=True)
print("over", flush=True)
"""


def stranger(*arguments: str) -> bytes:
    """What a process that tries to get in for a second has to say."""
    command = [sys.executable, "-c", STRANGER, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout


def listener(producer: Producer, guard: Guard | None) -> Listener:
    def heard(connection: bytes, data: bytes) -> None:
        producer.heard.append((connection, data))
        made.send(connection, reply(1))

    made = Listener(on_message=heard, on_lost=producer.lost.append, options=SocketOptions(), guard=guard)
    return made


def links(consumer: Consumer, keys: Keyring | None) -> Links[str]:
    return Links(
        on_reply=lambda key, data: consumer.replies.append((key, data)),
        on_lost=consumer.lost.append,
        options=SocketOptions(),
        keys=keys,
    )


def ring(text: bytes) -> Keyring:
    return Keyring(Secret.of(text, source="test"))


def test_holders_of_the_secret_speak_through_the_secure_door() -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        door, side = listener(producer, SecureDoor(KEYS)), links(consumer, ring(TEXT))
        address = await door.start(HOST)
        side.pull("a", address, b"x" * 100_000, number=1)
        await until(lambda: consumer.replies)
        assert producer.heard[0][1] == b"x" * 100_000
        assert await side.ask(address, b"q", timeout=5) == reply(1)
        assert door.refused == 0
        await side.close()
        await door.close()

    run(main)


@pytest.mark.parametrize("secret", [None, OTHER], ids=["no secret", "another secret"])
def test_links_without_its_secret_are_lost_and_nothing_is_heard(secret: bytes | None) -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        door, side = listener(producer, SecureDoor(KEYS)), links(consumer, ring(secret) if secret else None)
        address = await door.start(HOST)
        side.pull("a", address, b"pull", number=1)
        await until(lambda: consumer.lost)
        with pytest.raises(RemoteProtocolError) as caught:
            await side.ask(address, b"q", timeout=5)
        assert caught.value.reason is ProtocolReason.PEER_LOST
        assert not producer.heard
        await side.close()
        await door.close()

    run(main)


def test_a_door_is_knocked_at_with_the_keys_that_it_takes() -> None:
    """While a secret is changed some doors take the old keys, others the new ones; one may change at its address."""

    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        keys = ring(OTHER + b"\n" + TEXT)
        old, new, side = (
            listener(producer, SecureDoor(KEYS)),
            listener(producer, SecureDoor(keys.used)),
            links(consumer, keys),
        )
        at = await old.start(HOST)
        assert keys.learn([at], KEYS.name)
        assert await side.ask(at, b"q", timeout=5) == reply(1)
        side.pull("a", at, b"pull", number=1)
        await until(lambda: consumer.replies)
        await old.close()
        await until(lambda: consumer.lost)
        await new.start(HOST, int(at.rpartition(":")[2]))
        assert keys.learn([at], keys.used.name)
        side.pull("b", at, b"pull", number=1)
        await until(lambda: len(consumer.replies) == 2)
        assert (old.refused, new.refused) == (0, 0)
        await side.close()
        await new.close()

    run(main)


def test_keys_of_which_nothing_is_known_are_those_in_use_and_doors_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.control.doors.MAX_ADDRESSES", 2)
    keys = ring(OTHER + b"\n" + TEXT)
    assert keys.of("a").name == keys.used.name == CurveKeys.of(Secret.of(OTHER, source="test")).name
    assert not keys.learn(["a"], "0" * 16)
    assert keys.learn(["a", "b"], KEYS.name)
    assert keys.learn(["a", "c"], KEYS.name)
    assert [keys.of(one).name == KEYS.name for one in "abc"] == [True, False, True]


def test_a_link_with_keys_never_falls_back_to_plain() -> None:
    """A producer without a door, or somebody in its place, hears nothing of a consumer that has a secret."""

    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        door, side = listener(producer, None), links(consumer, ring(TEXT))
        address = await door.start(HOST)
        side.pull("a", address, b"pull", number=1)
        side.note(address, b"note")
        await until(lambda: consumer.lost)
        assert not producer.heard
        assert await side.ask(address, b"for upstream", timeout=5, plain=True) == reply(1)
        side.pull("b", address, b"pull upstream", number=None)
        await until(lambda: len(producer.heard) == 2)
        await side.close()
        await door.close()

    run(main)


@pytest.mark.parametrize("mode", ["plain", "own keys", "password"])
def test_a_stranger_in_another_process_is_not_heard(mode: str) -> None:
    """Also one that knows the public key of the server, and holds keys of its own."""

    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        door, side = listener(producer, SecureDoor(KEYS)), links(consumer, ring(TEXT))
        address = await door.start(HOST)
        said = await asyncio.to_thread(stranger, address, mode, KEYS.server.public.decode())
        assert said == b"over\n"
        assert not producer.heard
        assert door.refused >= (mode == "own keys")
        side.pull("a", address, b"mine", number=1)
        await until(lambda: consumer.replies)
        await side.close()
        await door.close()

    run(main)


def test_a_stranger_is_heard_by_a_door_that_is_open() -> None:
    """The control of the test above."""

    async def main() -> None:
        producer = Producer()
        door = listener(producer, None)
        address = await door.start(HOST)
        said = await asyncio.to_thread(stranger, address, "plain", "-")
        assert b"answered" in said
        assert producer.heard
        await door.close()

    run(main)


@pytest.mark.parametrize(
    ("networks", "heard"),
    [(["127.0.0.0/8"], True), (["127.0.0.1"], True), (["10.0.0.0/8", "::1"], False), (["127.0.0.2"], False)],
)
def test_the_listed_door_goes_by_the_address_of_the_connection(networks: list[str], heard: bool) -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        door = listener(producer, ListedDoor(Networks.parse(networks, option="upstream_peers")))
        side = links(consumer, None)
        address = await door.start(HOST)
        side.pull("a", address, b"pull", number=1)
        await until(lambda: consumer.replies or consumer.lost)
        assert bool(producer.heard) is heard
        assert bool(consumer.lost) is not heard
        assert bool(door.refused) is not heard
        if heard:
            assert door.address_of(producer.heard[0][0]) == HOST
        await side.close()
        await door.close()

    run(main)


def test_junk_bytes_do_not_stop_the_secure_door() -> None:
    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        door, side = listener(producer, SecureDoor(KEYS)), links(consumer, ring(TEXT))
        address = await door.start(HOST)
        port = int(address.rpartition(":")[2])
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
        hello = b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)
        for junk in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 4096,
            greeting,
            greeting + hello,
            greeting + b"\x06" + b"\xff" * 8,
        ):
            _, writer = await asyncio.open_connection(HOST, port)
            writer.write(junk)
            await writer.drain()
            writer.close()
        side.pull("a", address, b"mine", number=1)
        await until(lambda: consumer.replies)
        assert [data for _, data in producer.heard] == [b"mine"]
        await side.close()
        await door.close()

    run(main)


def test_a_silent_gatekeeper_lets_nobody_in() -> None:
    """libzmq's default, when nobody answers its question, is to let everybody in: the door insists."""

    async def main() -> None:
        producer, consumer = Producer(), Consumer()
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        SecureDoor(KEYS).arm(socket)
        port = socket.bind_to_random_port(f"tcp://{HOST}")
        side = links(consumer, ring(TEXT))
        side.pull("a", f"tcp://{HOST}:{port}", b"pull", number=1)
        await until(lambda: consumer.lost)
        assert not producer.heard
        assert not await socket.poll(100)
        await side.close()
        context.destroy(linger=0)

    run(main)


def test_a_crowd_of_strangers_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        keeper = Gatekeeper(context, SecureDoor(KEYS))
        for _ in range(1000):
            keeper._judge([b"1.0", b"1", b"kvferry", b"10.6.6.6", b"", b"CURVE", bytes(32)])
        assert keeper.refused == 1000
        await keeper.close()
        context.destroy(linger=0)

    run(main)
    lines = [record.getMessage() for record in caplog.records]
    assert 8 <= len(lines) <= 20
    assert "10.6.6.6" in lines[0]
    assert "(512 so far)" in lines[-1]


@pytest.mark.parametrize("credentials", [[], [b""], [b"x" * 31], [bytes(32)], [bytes(33)], [bytes(32), bytes(32)]])
def test_keys_of_any_length_are_judged(credentials: list[bytes]) -> None:
    assert SecureDoor(KEYS).refusal("10.6.6.6", b"CURVE", credentials) is not None
