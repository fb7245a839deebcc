"""The bootstrap service over real HTTP, its directory, and the client."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from kvferry.control import BootstrapClient, BootstrapService, Directory, RankCard, Registration
from kvferry.errors import ConfigError, ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId
from kvferry.protocol import FEATURES, VERSION

HOST = "127.0.0.1"


def rank(
    tp_rank: int = 0,
    pp_rank: int = 0,
    *,
    engine: str = "P",
    epoch: str | None = "e1",
    sizes: tuple[int, int] = (1, 1),
    port: int | None = None,
) -> Registration:
    card = epoch and RankCard(
        version=VERSION,
        epoch=epoch,
        tp_size=sizes[0],
        pp_size=sizes[1],
        fingerprint=f"f{tp_rank}.{pp_rank}",
        model="m",
        transport="cma",
        transport_address=f"t{tp_rank}.{pp_rank}",
        features=FEATURES,
    )
    addr = f"tcp://{HOST}:{port or 7000 + 10 * tp_rank + pp_rank}"
    return Registration(engine, 0, tp_rank, pp_rank, addr, card or None)


def run(main: Callable[[BootstrapService, str], Coroutine[Any, Any, None]]) -> list[tuple[Any, Any]]:
    released: list[tuple[Any, Any]] = []

    async def served() -> None:
        service = BootstrapService(on_release=lambda *order: released.append(order))
        port = await service.start(HOST, 0)
        try:
            await main(service, f"http://{HOST}:{port}")
        finally:
            await service.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    threads = threading.active_count()
    asyncio.run(served())
    assert threading.active_count() == threads
    return released


def test_an_engine_is_listed_when_all_its_ranks_are_there_and_found_by_the_client() -> None:
    async def main(_: BootstrapService, url: str) -> None:
        client = BootstrapClient()
        grid = [(tp, pp) for pp in range(2) for tp in range(2)]
        for tp, pp in reversed(grid):
            assert await client.query(url) == ()
            with pytest.raises(RemoteProtocolError) as caught:
                await client.find(url, EngineId("P"))
            assert caught.value.reason is ProtocolReason.PEER_LOST
            await client.register(url, rank(tp, pp, sizes=(2, 2)))
        found = await client.find(url, EngineId("P"))
        assert (found.tp_size, found.pp_size, found.dp_rank) == (2, 2, 0)
        assert found.addresses == tuple(rank(tp, pp).addr for tp, pp in grid)
        assert found.card is not None
        assert [one.fingerprint for one in found.card.ranks] == [f"f{tp}.{pp}" for tp, pp in grid]
        assert (found.card.epoch, found.card.model, found.card.features) == ("e1", "m", FEATURES)
        await client.close()

    run(main)


def test_the_answer_has_upstreams_shape() -> None:
    async def main(_: BootstrapService, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"engine_id": "U", "dp_rank": 3, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://10.0.0.1:5000"}
            answer = await http.post(f"{url}/register", json=body)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
            assert (await http.post(f"{url}/register", json=body)).status_code == 200
            listed = (await http.get(f"{url}/query")).json()
            assert listed == {"3": {"engine_id": "U", "worker_addr": {"0": {"0": "tcp://10.0.0.1:5000"}}}}

    run(main)


@pytest.mark.parametrize("second", [rank(engine="Q"), rank(epoch="e2", port=7777), rank(epoch=None, port=7777)])
def test_a_restarted_engine_replaces_the_old_one(second: Registration) -> None:
    directory = Directory()
    directory.register(rank())
    directory.register(second)
    (entry,) = directory.listing().values()
    assert entry.engine_id == second.engine_id
    assert entry.worker_addr == {0: {0: second.addr}}
    assert (entry.kvferry.epoch if entry.kvferry else None) == (second.kvferry.epoch if second.kvferry else None)


def test_an_old_life_is_not_listed_while_the_new_one_gathers_and_its_stragglers_change_nothing() -> None:
    directory = Directory()
    for tp in range(2):
        directory.register(rank(tp, sizes=(2, 1)))
    directory.register(rank(0, epoch="e2", sizes=(2, 1)))
    assert directory.listing() == {}
    directory.register(rank(1, sizes=(2, 1)))
    assert directory.listing() == {}
    directory.register(rank(1, epoch="e2", sizes=(2, 1)))
    (entry,) = directory.listing().values()
    assert entry.kvferry is not None
    assert entry.kvferry.epoch == "e2"


def test_an_upstream_engine_that_restarts_under_its_name_is_taken_over() -> None:
    directory = Directory()
    directory.register(rank(0, epoch=None))
    directory.register(rank(1, epoch=None))
    directory.register(rank(0, epoch=None, port=9000))
    (entry,) = directory.listing().values()
    assert entry.worker_addr == {0: {0: f"tcp://{HOST}:9000"}}


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (rank(1, sizes=(1, 1)), ProtocolReason.MALFORMED),
        (rank(0, sizes=(4, 1)), ProtocolReason.INCOMPATIBLE_PEER),
        (rank(0, sizes=(2, 1), port=1234), ProtocolReason.INCOMPATIBLE_PEER),
    ],
)
def test_registrations_that_contradict_are_refused(one: Registration, reason: ProtocolReason) -> None:
    directory = Directory()
    directory.register(rank(0, sizes=(2, 1)))
    with pytest.raises(RemoteProtocolError) as caught:
        directory.register(one)
    assert caught.value.reason is reason


def test_lives_and_keys_are_bounded() -> None:
    directory = Directory()
    for epoch in range(50):
        directory.register(rank(epoch=f"e{epoch}"))
    assert len(directory._lives[0]) <= 4
    for dp in range(1, 1024):
        directory.register(Registration("P", dp, 0, 0, "tcp://h:1"))
    with pytest.raises(RemoteProtocolError) as caught:
        directory.register(Registration("P", 2000, 0, 0, "tcp://h:1"))
    assert caught.value.reason is ProtocolReason.LIMIT_EXCEEDED


def test_bad_bodies_are_refused_and_the_service_goes_on() -> None:
    async def main(_: BootstrapService, url: str) -> None:
        good = {"engine_id": "U", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://h:1"}
        bad: list[bytes] = [b"", b"{", b"[]", b"[" * 50_000, b'{"engine_id": "' + b"x" * 300_000 + b'"}']
        async with httpx.AsyncClient(trust_env=False) as http:
            for body in bad:
                answer = await http.post(f"{url}/register", content=body)
                assert answer.status_code == 400, body[:20]
            for wrong in ({"tp_rank": -1}, {"addr": "ipc:///etc"}, {"engine_id": ""}, {"dp_rank": "0"}):
                assert (await http.post(f"{url}/register", json=good | wrong)).status_code == 400, wrong
            assert (await http.get(f"{url}/query")).json() == {}
            assert (await http.get(f"{url}/nothing")).status_code == 404

    run(main)


def test_a_release_reaches_every_rank_of_the_engine_named() -> None:
    async def main(service: BootstrapService, url: str) -> None:
        for tp in range(2):
            service.directory.register(rank(tp, sizes=(2, 1)))
        async with httpx.AsyncClient(trust_env=False) as http:
            order = {"engine_id": "P", "transfer_ids": ["a", "b"], "reason": "decode-unreachable"}
            answer = await http.post(f"{url}/kvferry/release", json=order)
            assert (answer.status_code, answer.json()) == (202, {"accepted": 2})
            unknown = await http.post(f"{url}/kvferry/release", json=order | {"engine_id": "Q"})
            assert unknown.status_code == 404
            assert (await http.post(f"{url}/kvferry/release", json={"engine_id": "P"})).status_code == 400

    assert run(main) == [((rank(0).addr, rank(1).addr), ("a", "b"))]


def test_a_client_says_what_is_wrong_with_a_service() -> None:
    async def main(_: BootstrapService, url: str) -> None:
        client = BootstrapClient(timeout=1)
        with pytest.raises(RemoteProtocolError) as caught:
            await client.query(f"http://{HOST}:1")
        assert caught.value.reason is ProtocolReason.PEER_LOST
        with pytest.raises(RemoteProtocolError) as caught:
            await client.register(f"http://{HOST}:1", rank(), patience=0.3)
        assert caught.value.reason is ProtocolReason.PEER_LOST
        with pytest.raises(RemoteProtocolError) as caught:
            await client.query(f"{url}/elsewhere")
        assert caught.value.reason is ProtocolReason.MALFORMED
        with pytest.raises(RemoteProtocolError) as caught:
            await client.register(url, rank(1))
        assert caught.value.reason is ProtocolReason.INCOMPATIBLE_PEER
        await client.close()

    run(main)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:1", "http://", "http://[", "http://127.0.0.1:99999", "http://127.0.0.1:-1", "http://127.0.0.1:x"]
    + ["http://xn--/", "http://a..b", "http://exa mple", "http://\x00", "http://\ud800", "file:///etc/hosts", "//x"],
    ids=ascii,
)
def test_whatever_a_router_calls_an_address_is_refused_in_our_words(url: str) -> None:
    """Another error would end nothing: the fetch that asked would wait until its deadline."""

    async def main() -> None:
        client = BootstrapClient(timeout=1)
        with pytest.raises(RemoteProtocolError) as caught:
            await client.find(url, EngineId("P"))
        assert caught.value.reason in (ProtocolReason.PEER_LOST, ProtocolReason.MALFORMED)
        await client.close()

    asyncio.run(main())


def test_a_client_waits_for_a_service_that_is_not_up_yet() -> None:
    async def main() -> None:
        first = BootstrapService(on_release=lambda *_: None)
        port = await first.start(HOST, 0)
        await first.close()
        client = BootstrapClient(timeout=1)
        registering = asyncio.create_task(client.register(f"http://{HOST}:{port}", rank()))
        await asyncio.sleep(0.1)
        second = BootstrapService(on_release=lambda *_: None)
        await second.start(HOST, port)
        await registering
        assert await client.find(f"http://{HOST}:{port}", EngineId("P"))
        await client.close()
        await second.close()

    asyncio.run(main())


def test_closing_a_client_gives_up_what_it_is_asking_and_leaves_no_connection() -> None:
    async def main() -> None:
        arrived, gone = asyncio.Event(), asyncio.Event()

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            arrived.set()
            assert await reader.read() == b""
            writer.close()
            gone.set()

        server = await asyncio.start_server(mute, HOST, 0)
        url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
        client = BootstrapClient(timeout=600)
        asking = asyncio.create_task(client.query(url))
        await arrived.wait()
        await client.close()
        with pytest.raises(RemoteProtocolError) as caught:
            await asking
        assert caught.value.reason is ProtocolReason.PEER_LOST
        with pytest.raises(RemoteProtocolError):
            await client.query(url)
        await asyncio.wait_for(gone.wait(), timeout=10)  # else the connection would only end with the process
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_taken_port_is_a_configuration_error() -> None:
    async def main() -> None:
        first = BootstrapService(on_release=lambda *_: None)
        port = await first.start(HOST, 0)
        second = BootstrapService(on_release=lambda *_: None)
        with pytest.raises(ConfigError, match="cannot listen"):
            await second.start(HOST, port)
        await second.close()
        await first.close()
        await first.close()

    asyncio.run(main())
