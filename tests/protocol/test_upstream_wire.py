"""Our records against vLLM's own: its bytes are ours, its decoders read what we send, its services take us."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from kvferry.control import BootstrapClient, BootstrapService, RankCard, Registration
from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.protocol import (
    FEATURES,
    VERSION,
    Answer,
    Failure,
    PullExtension,
    PullId,
    Receiver,
    Side,
    Span,
    Status,
    Table,
    Wanted,
    decode_inbound,
    decode_reply,
    encode,
    make_hello,
    make_hello_answer,
    make_pull,
    make_refusal,
    make_reply,
)
from kvferry.protocol.replies import Verdict, judge

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def connector() -> Any:
    """vLLM's own module. Imported late: it starts threads and takes half a minute."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
    return pytest.importorskip(name, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def bootstrap() -> Any:
    """vLLM's own bootstrap service."""
    return pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils")


RECEIVER = Receiver(
    hostname="10.0.0.2",
    port=5000,
    tp_rank=1,
    tp_size=2,
    pp_size=2,
    base_addresses=(140_000_000_000, 2**47),
    block_lens=(512, 512),
    kv_block_lens=(256, 512),
    layer_names=("layers.0", "layers.1"),
    layer_indices=(0, 1),
    group_indices=(0, 1),
    shared_group_ids=((), (0, 1)),
    row_offsets=(-1, 256),
)
PRODUCER = Side("P", "e1", 0, ("f",))
WANTED = Wanted(RequestId("d-1"), TransferId("t-1"), Span(0, 32), (Table(0, (3, 4)), Table(None, (None, 9))))


def theirs(connector: Any) -> object:
    return connector.MooncakeXferMetadata(
        remote_hostname="10.0.0.2",
        remote_port=5000,
        remote_tp_size=2,
        remote_tp_rank=1,
        req_blocks={"d-1": ("t-1", [[3, 4], [0, 9]])},
        kv_caches_base_addr=[140_000_000_000, 2**47],
        block_lens=[512, 512],
        kv_block_lens=[256, 512],
        registered_layer_names=["layers.0", "layers.1"],
        registered_layer_indices=[0, 1],
        registered_group_indices=[0, 1],
        registered_shared_group_ids=[[], [0, 1]],
        registered_row_offsets=[-1, 256],
        remote_pp_size=2,
    )


def extended() -> PullExtension:
    return PullExtension(
        version=VERSION,
        pull=1,
        consumer=Side("D", "e", 1, ("g", "h")),
        producer=PRODUCER,
        transport="mooncake",
        address="10.0.0.2:5000",
        bases=(1,),
        requests={},
        placements={"g": b"\x00"},
    )


def test_a_pull_without_our_key_is_theirs_to_the_byte(connector: Any) -> None:
    ours = make_pull(RECEIVER, [WANTED])
    assert encode(ours) == msgspec.msgpack.encode(theirs(connector))
    assert decode_inbound(msgspec.msgpack.encode(theirs(connector))) == ours


def test_a_bare_pull_is_theirs_to_the_byte(connector: Any) -> None:
    ours = make_pull(Receiver("h", 1, 0, 1), [Wanted(RequestId("r"), TransferId("t"), Span(0, 0), ())])
    bare = connector.MooncakeXferMetadata("h", 1, 1, 0, {"r": ("t", [])}, [], [], [])
    assert encode(ours) == msgspec.msgpack.encode(bare)


def test_their_decoder_reads_a_pull_with_our_key_as_if_it_were_not_there(connector: Any) -> None:
    decoder = msgspec.msgpack.Decoder(connector.MooncakeXferMetadata)
    assert decoder.decode(encode(make_pull(RECEIVER, [WANTED], extended()))) == theirs(connector)
    hello = decoder.decode(encode(make_hello(RECEIVER, nonce="n")))
    assert (hello.remote_tp_rank, hello.req_blocks) == (-1, {"n": ("n", [])})


@pytest.mark.parametrize(
    ("status", "ok", "err", "message", "verdict"),
    [
        ("FINISH", ["d-1"], None, None, Verdict.SERVED),
        ("FINISH", None, ["d-1"], "P num blocks less than D", Verdict.DOUBT),
        ("CONTINUE", ["d-2"], ["d-1"], "x", Verdict.DOUBT),
        ("ERROR", None, None, "no", Verdict.DOUBT),
        ("FINISH", None, None, None, Verdict.REFUSED),
        ("CONTINUE", None, None, None, Verdict.WAIT),
    ],
)
def test_their_replies_are_ours_to_the_byte_and_mean_what_they_mean(
    connector: Any, status: str, ok: list[str] | None, err: list[str] | None, message: str | None, verdict: Verdict
) -> None:
    theirs_says = connector.MooncakeXferResponse(
        status=connector.MooncakeXferResponseStatus[status], ok_reqs=ok, err_reqs=err, err_msg=message
    )
    data = msgspec.msgpack.encode(theirs_says)
    ours = decode_reply(data)
    assert encode(ours) == data
    life = Incarnation(EngineId("P"), "")
    assert judge(ours, RequestId("d-1"), life, upstream=True).kind is verdict


def test_their_decoder_reads_every_reply_that_we_may_send(connector: Any) -> None:
    decoder = msgspec.msgpack.Decoder(connector.MooncakeXferResponse)
    request = RequestId("d-1")
    failure = Failure(request, ProtocolReason.EXPIRED)
    for pull in (make_pull(RECEIVER, [WANTED]), make_pull(RECEIVER, [WANTED], extended())):
        for action in (
            Answer(PullId(1)),
            Answer(PullId(1), ok=(request,), finish=True),
            Answer(PullId(1), err=(failure,), finish=True),
            Answer(PullId(1), failed=(failure,)),
        ):
            ours = make_reply(action, pull, PRODUCER)
            read = decoder.decode(encode(ours))
            assert read.status == ours.status
            assert tuple(read.ok_reqs or ()) == (ours.ok_reqs or ())
            assert tuple(read.err_reqs or ()) == (ours.err_reqs or ())
    refusal = decoder.decode(encode(make_refusal(failure.reason, "gone", pull=pull, producer=PRODUCER)))
    assert refusal.status == Status.ERROR
    assert decoder.decode(encode(make_hello_answer(PRODUCER))).status == Status.ERROR


def test_a_pull_without_its_regions_is_answered_in_their_own_word(connector: Any) -> None:
    """vLLM 0.33 leaves its regions out once a producer has said that it keeps them."""
    if "layout_id" not in connector.MooncakeXferMetadata.__struct_fields__:
        pytest.skip("this release of vLLM sends its regions with each pull")
    decoder = msgspec.msgpack.Decoder(connector.MooncakeXferResponse)
    whole = msgspec.structs.replace(theirs(connector), layout_id=2**62 + 1)
    pull = decode_inbound(msgspec.msgpack.encode(whole))
    assert pull == make_pull(RECEIVER, [WANTED])
    served = decoder.decode(encode(make_reply(Answer(PullId(1), ok=(RequestId("d-1"),), finish=True), pull, PRODUCER)))
    assert served.layout_id == 0, "so it goes on sending its regions to us"
    bare = msgspec.structs.replace(
        whole,
        kv_caches_base_addr=[],
        block_lens=[],
        kv_block_lens=[],
        registered_layer_names=[],
        registered_layer_indices=[],
        registered_group_indices=[],
        registered_shared_group_ids=[],
        registered_row_offsets=[],
    )
    with pytest.raises(RemoteProtocolError) as refused:
        decode_inbound(msgspec.msgpack.encode(bare))
    answer = decoder.decode(encode(make_refusal(refused.value.reason, "x", producer=PRODUCER)))
    assert answer.status == connector.MooncakeXferResponseStatus.LAYOUT_MISS
    assert (
        judge(
            decode_reply(msgspec.msgpack.encode(answer)),
            RequestId("d-1"),
            Incarnation(EngineId("P"), ""),
            upstream=True,
        ).kind
        is Verdict.DOUBT
    )


def card() -> RankCard:
    return RankCard(VERSION, "e1", 1, 1, "f", features=FEATURES)


def test_their_bootstrap_takes_our_registration_and_drops_our_card(bootstrap: Any) -> None:
    server = bootstrap.MooncakeBootstrapServer("127.0.0.1", 0)
    server.start()

    async def main() -> None:
        url = f"http://127.0.0.1:{server.port}"
        client = BootstrapClient()
        await client.register(url, Registration("P", 0, 0, 0, "tcp://127.0.0.1:7000", card()))
        found = await client.find(url, EngineId("P"))
        assert (found.addresses, found.card) == (("tcp://127.0.0.1:7000",), None)
        await client.close()

    try:
        asyncio.run(main())
    finally:
        server.shutdown()


def test_our_bootstrap_takes_their_registration_and_their_reader_reads_our_answer(bootstrap: Any) -> None:
    async def main() -> None:
        service = BootstrapService(on_release=lambda *_: None)
        url = f"http://127.0.0.1:{await service.start('127.0.0.1', 0)}"
        payload = bootstrap.RegisterWorkerPayload(engine_id="U", dp_rank=1, tp_rank=0, pp_rank=0, addr="tcp://h:1")
        service.directory.register(Registration("P", 0, 0, 0, "tcp://h:2", card()))
        async with httpx.AsyncClient(trust_env=False) as http:
            (await http.post(f"{url}/register", json=payload.model_dump())).raise_for_status()
            listed = (await http.get(f"{url}/query")).json()
        # What upstream's consumer does with the answer: every value, these two keys, ranks as numbers.
        agents = {
            entry["engine_id"]: {
                int(tp): {int(pp): address for pp, address in stages.items()}
                for tp, stages in entry["worker_addr"].items()
            }
            for entry in listed.values()
        }
        assert agents == {"P": {0: {0: "tcp://h:2"}}, "U": {0: {0: "tcp://h:1"}}}
        assert listed["0"]["kvferry"]["features"] == list(FEATURES)
        await service.close()

    asyncio.run(main())
