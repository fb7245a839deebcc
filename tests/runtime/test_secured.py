"""A deployment with a secret, in two processes: who is served, who is refused and with which words."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from kvferry.control import BootstrapClient, CurveKeys, Listener, RankCard, Registration, Secret, SecureDoor, Signer
from kvferry.errors import ProtocolReason
from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import (
    VERSION,
    Fate,
    FetchEnded,
    Hello,
    Pull,
    ReleaseNotice,
    Reply,
    ReplyExtension,
    Source,
    Span,
    Status,
    Table,
    Ticket,
    decode_inbound,
    decode_reply,
    encode,
)
from kvferry.router.config import Patience
from kvferry.router.engines import Engines, new_client
from kvferry.router.faults import RefusedError
from kvferry.runtime import ConsumerRuntime, Fetch
from kvferry.testing.ports import free_port

from .test_two_processes import wait_for
from .worlds import BLOCK, World, local_side, options_for

SECRET = "5b3f0d6a9c1e47b28d5502f0a7e6c4d1"
OTHER = "1d4c6e7a0f2055d82b74e1c9a6d0f3b5"
SEED = 5


@dataclass
class Deployment:
    """A producer process; its log goes to a file."""

    log: Path
    security: dict[str, Any]
    port: int = field(default_factory=free_port)
    transport: str = "cma"

    def __enter__(self) -> "Deployment":
        spec = {"transport": self.transport, "kind": "small", "seed": SEED, "port": self.port, "epoch": "e1"}
        spec["security"] = {"log": "DEBUG", **self.security}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "producer_process.py"), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.log.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def url(self) -> str:
        return f"{'https' if 'tls' in self.security else 'http'}://127.0.0.1:{self.port}"

    def publish(self, transfer: str) -> None:
        assert self.process.stdin is not None
        order = {"do": "publish", "ticket": 1, "transfer": transfer, "tokens": BLOCK, "tables": [(0, [1]), (0, [2])]}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = httpx.get(f"{self.url}/query", trust_env=False).json()["0"]
        return entry


@contextmanager
def consumer(security: dict[str, Any], *, transport: str = "cma") -> Iterator[tuple[ConsumerRuntime, World]]:
    world = World.build("small")
    runtime = ConsumerRuntime(local_side(world, engine="d", epoch="e"), options_for(transport, security=security))
    try:
        yield runtime, world
    finally:
        runtime.close()


def outcome(runtime: ConsumerRuntime, url: str, transfer: str = "t") -> FetchEnded:
    source = Source(EngineId("p"), url)
    tables = (Table(0, (3,)), Table(0, (4,)))
    runtime.fetch(Fetch(Ticket(1), RequestId("d"), TransferId(transfer), source, Span(0, BLOCK), tables))
    (ended,) = wait_for(runtime.take_ended, seconds=20)  # type: ignore[misc]
    return ended


def ended_with(deployment: dict[str, Any], ours: dict[str, Any], log: Path) -> FetchEnded:
    with Deployment(log, deployment) as producer, consumer(ours) as (runtime, world):
        producer.publish("t")
        end = outcome(runtime, producer.url)
        moved = bool((world.page(0, 3) == World.build("small", seed=SEED).page(0, 1)).all())
        assert moved is (end.outcome.fate is Fate.DONE)
        assert moved or not world.bytes.any()
        return end


@pytest.mark.parametrize("upstream", [[], ["127.0.0.0/8"]])
def test_both_with_the_secret_move_the_bytes(tmp_path: Path, upstream: list[str]) -> None:
    end = ended_with({"secret": SECRET, "upstream": upstream}, {"secret": SECRET}, tmp_path / "log")
    assert end.outcome.fate is Fate.DONE


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        pytest.param({"secret": SECRET}, {}, "secret_file (or KVFERRY_SECRET) here too", id="consumer has none"),
        pytest.param(
            {"secret": SECRET, "upstream": ["127.0.0.0/8"]},
            {},
            "secret_file (or KVFERRY_SECRET) here too",
            id="consumer has none and the plain door is open",
        ),
        pytest.param({}, {"secret": SECRET}, "secret_file (or KVFERRY_SECRET) there too", id="producer has none"),
        pytest.param({"secret": SECRET}, {"secret": OTHER}, "give both the same secret", id="two secrets"),
    ],
)
def test_any_other_pair_is_refused_by_name_with_the_remedy(
    tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any], words: str
) -> None:
    end = ended_with(theirs, ours, tmp_path / "log")
    assert (end.outcome.fate, end.outcome.reason) == (Fate.FAILED, ProtocolReason.UNAUTHORIZED)
    assert words in (end.outcome.detail or "")


SILENCE_S = 1.5
"""Without a word for so long, nobody answers."""


def knock(address: str, message: object, keys: CurveKeys | None = None, *, wait_s: float = 20.0) -> Reply | None:
    """One message and its answer, from a socket that is no Link; ``None`` when nobody answers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client.hidden)
        socket.connect(address)
        socket.send(encode(message))  # type: ignore[arg-type]
        return decode_reply(socket.recv()) if socket.poll(round(wait_s * 1000)) else None


def bare(**more: Any) -> Pull:
    """A pull as upstream sends it."""
    fields: dict[str, Any] = {
        "remote_hostname": "127.0.0.1",
        "remote_port": 1,
        "remote_tp_size": 1,
        "remote_tp_rank": 0,
        "req_blocks": {"r": ("t", ((3,), (4,)))},
        "kv_caches_base_addr": (4096,),
        "block_lens": (64,),
        "kv_block_lens": (64,),
    }
    return Pull(**fields | more)


HELLO = bare(remote_tp_rank=-1, kvferry=Hello(version=VERSION))


def test_the_card_tells_of_the_secure_door_and_of_no_other(tmp_path: Path) -> None:
    with Deployment(tmp_path / "log", {"secret": SECRET}) as producer:
        entry = producer.entry()
        card = entry["kvferry"]
        assert card["ranks"][0]["secure"] == entry["worker_addr"]["0"]["0"]
        keys = CurveKeys.of(Secret.of(SECRET.encode(), source="test"))
        assert card["keys"] == keys.name
        text = json.dumps(entry)
        assert SECRET not in text
        assert keys.server.public.decode() not in text
        assert knock(entry["worker_addr"]["0"]["0"], HELLO, wait_s=SILENCE_S) is None
        assert knock(entry["worker_addr"]["0"]["0"], HELLO, keys) is not None


def test_the_plain_door_is_for_listed_networks_and_speaks_no_word_of_ours(tmp_path: Path) -> None:
    with Deployment(tmp_path / "log", {"secret": SECRET, "upstream": ["127.0.0.0/8"]}) as producer:
        entry = producer.entry()
        plain, secure = entry["worker_addr"]["0"]["0"], entry["kvferry"]["ranks"][0]["secure"]
        assert plain != secure
        answer = knock(plain, HELLO)
        assert answer is not None
        assert answer.status is Status.ERROR
        assert isinstance(answer.kvferry, ReplyExtension)
        assert answer.kvferry.reason == "unauthorized"
        assert "secret_file" in (answer.err_msg or "")
        assert knock(plain, bare()) is not None  # what it says to an upstream peer is tested elsewhere


def test_the_plain_door_does_not_open_to_other_networks(tmp_path: Path) -> None:
    with Deployment(tmp_path / "log", {"secret": SECRET, "upstream": ["10.0.0.0/8"]}) as producer:
        plain = producer.entry()["worker_addr"]["0"]["0"]
        assert knock(plain, bare(), wait_s=SILENCE_S) is None
        assert "not in upstream_peers (10.0.0.0/8)" in producer.log.read_text()


def test_orders_need_the_signature_and_are_taken_once(tmp_path: Path) -> None:
    with Deployment(tmp_path / "log", {"secret": SECRET}) as producer:
        before = producer.entry()
        signer = Signer(Secret.of(SECRET.encode(), source="test"))
        stranger = Signer(Secret.of(OTHER.encode(), source="test"))
        register = msgspec.json.encode(
            {"engine_id": "evil", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://10.6.6.6:1"}
        )
        release = msgspec.json.encode({"engine_id": "p", "transfer_ids": ["t"]})
        for path, body in (("/register", register), ("/kvferry/release", release)):
            for headers in ({}, stranger.headers("POST", path, body), {"x-kvferry-auth": "junk"}):
                answer = httpx.post(producer.url + path, content=body, headers=headers, trust_env=False)
                assert answer.status_code == 403, (path, headers)
                assert answer.json()["detail"].startswith("unauthorized: ")
        assert producer.entry() == before
        headers = signer.headers("POST", "/kvferry/release", release)
        codes = [
            httpx.post(f"{producer.url}/kvferry/release", content=release, headers=headers, trust_env=False).status_code
            for _ in range(3)
        ]
        assert codes == [202, 403, 403]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ([SECRET], [SECRET, OTHER]),
        ([SECRET, OTHER], [OTHER, SECRET]),
        ([OTHER, SECRET], [SECRET, OTHER]),
        ([OTHER], [OTHER, SECRET]),
    ],
    ids=["learnt here first", "used here first", "used there first", "forgotten there first"],
)
def test_while_the_secret_is_changed_step_by_step_neighbours_serve_each_other(
    theirs: list[str], ours: list[str], tmp_path: Path
) -> None:
    end = ended_with({"secret": "\n".join(theirs)}, {"secret": "\n".join(ours)}, tmp_path / "log")
    assert end.outcome.fate is Fate.DONE


def test_a_step_that_was_left_out_is_refused_by_name(tmp_path: Path) -> None:
    end = ended_with({"secret": f"{SECRET}\n{OTHER}"}, {"secret": OTHER}, tmp_path / "log")
    assert (end.outcome.fate, end.outcome.reason) == (Fate.FAILED, ProtocolReason.UNAUTHORIZED)
    assert "give both the same secret" in (end.outcome.detail or "")


def test_a_target_that_is_not_allowed_is_refused_before_a_byte(tmp_path: Path) -> None:
    pytest.importorskip("mooncake.engine")
    theirs = {"targets": ["10.0.0.0/8"]}
    with (
        Deployment(tmp_path / "log", theirs, transport="mooncake") as producer,
        consumer({}, transport="mooncake") as (runtime, world),
    ):
        producer.publish("t")
        end = outcome(runtime, producer.url)
        assert (end.outcome.fate, end.outcome.reason) == (Fate.FAILED, ProtocolReason.TARGET_REFUSED)
        assert "write_targets" in (end.outcome.detail or "")
        wait_for(runtime.take_quiet, seconds=3)
        assert not world.bytes.any()


def test_nothing_secret_is_logged_at_start_in_failures_or_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At DEBUG, on both sides, of everything (libraries too)."""
    caplog.set_level(logging.DEBUG)
    keys = CurveKeys.of(Secret.of(SECRET.encode(), source="test"))
    said: list[str] = []
    for name, ours in (("right", {"secret": SECRET}), ("none", {}), ("other", {"secret": OTHER})):
        with Deployment(tmp_path / name, {"secret": SECRET}) as producer, consumer(ours) as (runtime, _):
            producer.publish("t")
            said.append(repr(outcome(runtime, producer.url)))
            knock(producer.entry()["worker_addr"]["0"]["0"], HELLO, wait_s=SILENCE_S)
            httpx.post(f"{producer.url}/register", content=b"{}", trust_env=False)
            time.sleep(0)
        said.append((tmp_path / name).read_text())
    assert any("CURVE" in text for text in said)  # it does log
    said.append(caplog.text)
    hidden = [SECRET, OTHER, keys.server.hidden.decode(), keys.client.hidden.decode(), repr(keys.client.hidden)]
    hidden += [Secret.of(SECRET.encode(), source="x").derive(one).hex() for one in ("http orders", "curve server")]
    for text in said:
        assert not [one for one in hidden if one in text]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A server's certificate for 127.0.0.1, which is its own authority, and another one like it."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "stranger"):
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no openssl command")
    return {name: str(folder / name) for name in ("server.key", "server.pem", "stranger.pem")}


def test_the_bootstrap_service_over_tls(tmp_path: Path, certificates: dict[str, str]) -> None:
    ca = certificates["server.pem"]
    theirs = {"secret": SECRET, "tls": [ca, certificates["server.key"]], "ca": ca}
    with Deployment(tmp_path / "log", theirs) as producer:
        with consumer({"secret": SECRET, "ca": ca}) as (runtime, _):
            producer.publish("t")
            assert outcome(runtime, producer.url).outcome.fate is Fate.DONE
            end = outcome(runtime, producer.url.replace("https", "http"), "t2")
            assert end.outcome.reason is ProtocolReason.UNAUTHORIZED
            assert "TLS only" in (end.outcome.detail or "")
        for wrong in ({"ca": certificates["stranger.pem"]}, {}):
            with consumer({"secret": SECRET, **wrong}) as (runtime, _):
                end = outcome(runtime, producer.url, "t3")
                assert end.outcome.reason is ProtocolReason.PEER_LOST


def test_the_router_signs_its_releases(tmp_path: Path) -> None:
    """With the secret a release is taken; without, it is refused, and expiry is what frees the blocks."""

    async def release(url: str, signer: Signer | None) -> int:
        async with new_client() as client:
            engines = Engines(client, patience=Patience(), signer=signer)
            body = {"engine_id": "p", "transfer_ids": ["t"], "reason": "client-left"}
            try:
                return (await engines.post_control(f"{url}/kvferry/release", body=body)).status
            except RefusedError as refusal:
                return refusal.answer.status

    with Deployment(tmp_path / "log", {"secret": SECRET}) as producer:
        secret = Secret.of(SECRET.encode(), source="test")
        assert asyncio.run(release(producer.url, None)) == 403
        assert asyncio.run(release(producer.url, Signer(secret))) == 202


def test_one_rank_tells_another_of_a_release_through_its_secure_door(tmp_path: Path) -> None:
    """The service of one process, the rank of another: what a router orders reaches it."""
    secret = Secret.of(SECRET.encode(), source="test")

    async def main() -> None:
        heard: list[bytes] = []
        door = Listener(
            on_message=lambda _, data: heard.append(data), on_lost=print, guard=SecureDoor(CurveKeys.of(secret))
        )
        address = await door.start("127.0.0.1")
        with Deployment(tmp_path / "log", {"secret": SECRET}) as producer:
            card = RankCard(VERSION, "e9", 1, 1, "f", secure=address, keys=CurveKeys.of(secret).name)
            client = BootstrapClient(secret=secret)
            await client.register(producer.url, Registration("other", 1, 0, 0, address, card))
            await client.close()
            body = msgspec.json.encode({"engine_id": "other", "transfer_ids": ["t9"]})
            headers = Signer(secret).headers("POST", "/kvferry/release", body)
            async with httpx.AsyncClient(trust_env=False) as http:
                answer = await http.post(f"{producer.url}/kvferry/release", content=body, headers=headers)
            assert answer.status_code == 202
            async with asyncio.timeout(10):
                while not heard:  # noqa: ASYNC110 - another process sends it
                    await asyncio.sleep(0.01)
        await door.close()
        note = decode_inbound(heard[0])
        assert isinstance(note.kvferry, ReleaseNotice)
        assert note.kvferry.transfers == ("t9",)

    asyncio.run(main())
