"""The doors of a rank inside one process: what is open, what is counted, what a message may say at which."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvferry.control import BootstrapService, Listener, Registration, Secret, SocketOptions
from kvferry.errors import ConfigError, ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId
from kvferry.protocol import (
    VERSION,
    Hello,
    Note,
    Pull,
    QuietAsk,
    Reply,
    Side,
    Source,
    Status,
    encode,
    make_hello_answer,
    make_refusal,
)
from kvferry.runtime import ProducerRuntime, RuntimeOptions, Timing
from kvferry.runtime.doors import PLAIN, SECURE, Doors, check_door, check_upstream_peer
from kvferry.runtime.network import ConsumerNetwork
from kvferry.runtime.options import UpstreamPeers
from kvferry.runtime.producers import RemoteEngine
from kvferry.testing.ports import free_port

from .worlds import World, local_side, options_for

SECRET = Secret.of(b"5b3f0d6a9c1e47b28d5502f0a7e6c4d1", source="test")
HOST = "127.0.0.1"
NETWORKS = UpstreamPeers.parse(("127.0.0.0/8",))


def doors(**more: Any) -> Doors:
    options = RuntimeOptions(host=HOST, make_transport=lambda: None, **more)  # type: ignore[arg-type,return-value]
    return Doors(on_message=print, on_lost=print, options=options, sockets=SocketOptions())


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "open_doors"),
    [
        ({}, {PLAIN}),
        ({"upstream_peers": NETWORKS}, {PLAIN}),
        ({"secret": SECRET}, {SECURE}),
        ({"secret": SECRET, "upstream_peers": UpstreamPeers.parse("allow")}, {SECURE}),
        ({"secret": SECRET, "upstream_peers": UpstreamPeers.parse("refuse")}, {SECURE}),
        ({"secret": SECRET, "upstream_peers": NETWORKS}, {SECURE, PLAIN}),
    ],
)
def test_which_doors_are_open(options: dict[str, Any], open_doors: set[bytes]) -> None:
    async def main() -> None:
        made = doors(**options)
        await made.open()
        assert set(made._listeners) == open_doors
        assert bool(made.secure_address) == (SECURE in open_doors)
        assert (made.address == made.secure_address) == (open_doors == {SECURE})
        assert made.ferry_address == (made.secure_address or made.address)
        await made.close()
        await made.close()

    run(main)


def test_ports_are_those_of_the_options() -> None:
    async def main() -> None:
        one, two = free_port(), free_port()
        for options, plain, secure in (
            ({"port": one}, one, None),
            ({"port": one, "secret": SECRET}, None, one),
            ({"port": one, "secret": SECRET, "secure_port": two}, None, two),
            ({"port": one, "secret": SECRET, "secure_port": two, "upstream_peers": NETWORKS}, one, two),
        ):
            made = doors(**options)  # type: ignore[arg-type]
            await made.open()
            ports = {made.address.rpartition(":")[2], made.secure_address.rpartition(":")[2]} - {""}
            assert ports == {str(port) for port in (plain, secure) if port}
            await made.close()

    run(main)


def test_a_port_that_is_taken_is_refused_and_leaves_no_door() -> None:
    async def main() -> None:
        with socket.create_server((HOST, 0)) as taken:
            made = doors(port=taken.getsockname()[1], secret=SECRET, upstream_peers=NETWORKS)
            with pytest.raises(ConfigError):
                await made.open()
            await made.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main)


def pull(extension: Hello | None) -> Pull:
    return Pull("10.0.0.1", 1, 1, -1 if extension else 0, {"r": ("t", ((1,),))}, (1,), (1,), (1,), kvferry=extension)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("door", [PLAIN, SECURE])
def test_a_word_of_ours_at_the_plain_door_of_a_guarded_rank_is_refused(guarded: bool, door: bytes) -> None:
    ours = [pull(Hello(VERSION)), Note(QuietAsk(VERSION, 1, Side("d", "e", 0), 9))]
    for message in ours:
        if guarded and door == PLAIN:
            with pytest.raises(RemoteProtocolError) as caught:
                check_door(door + b"x", message, guarded=guarded)
            assert caught.value.reason is ProtocolReason.UNAUTHORIZED
        else:
            check_door(door + b"x", message, guarded=guarded)
    check_door(door + b"x", pull(None), guarded=guarded)


def test_where_a_pull_of_upstreams_comes_from_counts_and_not_what_it_says() -> None:
    message = pull(None)  # says 10.0.0.1
    for peers, address, taken in (
        (UpstreamPeers.parse(("10.0.0.0/8",)), "10.0.0.9", True),
        (UpstreamPeers.parse(("10.0.0.0/8",)), "192.0.2.7", False),
        (UpstreamPeers.parse(("10.0.0.0/8",)), "", False),
        (UpstreamPeers.parse("allow"), "192.0.2.7", True),
    ):
        if taken:
            check_upstream_peer(message, peers, address)
            continue
        with pytest.raises(RemoteProtocolError) as caught:
            check_upstream_peer(message, peers, address)
        assert caught.value.reason is ProtocolReason.INCOMPATIBLE_PEER
        assert "upstream_peers (10.0.0.0/8)" in caught.value.message
    check_upstream_peer(pull(Hello(VERSION)), UpstreamPeers.parse(("10.0.0.0/8",)), "192.0.2.7")


def test_strangers_who_are_not_let_in_are_counted_once() -> None:
    world = World.build("small")
    security = {"secret": "5b3f0d6a9c1e47b28d5502f0a7e6c4d1", "upstream": ["10.0.0.0/8"]}
    runtime = ProducerRuntime(local_side(world, engine="p", epoch="e"), options_for("cma", security=security))
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.RECONNECT_IVL, -1)
            stranger.connect(runtime.address)
            stranger.poll(500)
        counts = runtime.take_interval().counts
        assert counts == {"refused_connections": 1}
        assert not runtime.take_interval()
    finally:
        runtime.close()


class _Core:
    """What a network needs of a consumer's core to ask around: nothing."""

    def attach(self, links: object) -> None:
        return

    def on_reply(self, *_: object) -> None:
        return

    def on_lost(self, *_: object) -> None:
        return


async def meet(hosts: list[str], answer: Reply, **options: Any) -> RemoteEngine:
    """What a consumer makes of an engine whose card is not told and whose ranks answer a hello so, in plain."""
    listeners: list[Listener] = []

    def answering(listener: Listener) -> Callable[[bytes, bytes], object]:
        return lambda connection, _: listener.send(connection, encode(answer))

    service = BootstrapService(lambda *_: None)
    try:
        for rank, host in enumerate(hosts):
            listener = Listener(on_message=lambda *_: None, on_lost=lambda *_: None)
            listener._on_message = answering(listener)
            listeners.append(listener)
            address = await listener.start(host)
            service.directory.register(Registration("u", 0, rank, 0, address))
        port = await service.start(HOST, 0)
        timing = Timing(resolve=2.0)
        network = ConsumerNetwork(
            RuntimeOptions(host=HOST, make_transport=lambda: None, timing=timing, **options)  # type: ignore[arg-type,return-value]
        )
        network.attach(_Core())  # type: ignore[arg-type]
        try:
            return await network.find(Source(EngineId("u"), f"http://{HOST}:{port}"))
        finally:
            await network.close()
    finally:
        for listener in listeners:
            await listener.close()
        await service.close()


UPSTREAM = Reply(Status.ERROR, err_msg="not paired")
FERRY = make_hello_answer(Side("u", "e", 0, ("f",)), transport="cma", transport_address="x")


def test_a_consumer_with_a_secret_speaks_plainly_to_listed_upstream_producers_alone() -> None:
    engine = asyncio.run(meet([HOST], UPSTREAM, secret=SECRET, upstream_peers=NETWORKS))
    assert engine.grid is not None  # one of upstream's
    for peers in (UpstreamPeers.parse("allow"), UpstreamPeers.parse("refuse"), UpstreamPeers.parse(("10.0.0.0/8",))):
        with pytest.raises(RemoteProtocolError) as caught:
            asyncio.run(meet([HOST], UPSTREAM, secret=SECRET, upstream_peers=peers))
        assert caught.value.reason is ProtocolReason.PEER_LOST  # it was asked by CURVE, and could not answer


def test_one_rank_outside_the_listed_networks_is_enough_to_refuse() -> None:
    listed = UpstreamPeers.parse(("127.0.0.1",))
    assert asyncio.run(meet([HOST], UPSTREAM, upstream_peers=listed)).grid is not None
    with pytest.raises(RemoteProtocolError) as caught:
        asyncio.run(meet([HOST, "127.0.0.2"], UPSTREAM, upstream_peers=listed))
    assert caught.value.reason is ProtocolReason.INCOMPATIBLE_PEER


def test_a_kvferry_producer_without_the_secret_is_no_upstream_one() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        asyncio.run(meet([HOST], FERRY, secret=SECRET, upstream_peers=NETWORKS))
    assert caught.value.reason is ProtocolReason.UNAUTHORIZED


def test_a_producer_that_asks_for_the_secret_is_no_upstream_one() -> None:
    """Its card was lost on the way; what it says to a hello without a secret is believed, not taken for a failure."""
    refusal = make_refusal(ProtocolReason.UNAUTHORIZED, "set secret_file", producer=Side("u", "e", 0, ("f",)))
    with pytest.raises(RemoteProtocolError) as caught:
        asyncio.run(meet([HOST], refusal, upstream_peers=UpstreamPeers.parse("allow")))
    assert caught.value.reason is ProtocolReason.UNAUTHORIZED
    assert "set secret_file" in caught.value.message
