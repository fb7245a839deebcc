"""Real engines: requests whose cache is of no use, the first token that ends one, and what an engine tells of the rest.

A prompt whose log probabilities are asked for, or which is given as embeddings, is computed by the decode engine, and
the prefill engine gets its blocks back at once. Of a prompt that was fetched, vLLM's counters, its events on ZeroMQ and
the answer must all say the same: so many tokens came, from another engine, and these blocks are cached now.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from vllm.distributed.kv_events import BlockStored, KVEventBatch

from kvferry.testing.comparison import FLOAT32_TOLERANCE
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec, Generate, Generation
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import GEMMA3, LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec, report_options
from kvferry.testing.ports import free_port
from kvferry.testing.transfer_report import Transfer, read_reports, wait_for_report, wait_for_reports
from kvferry.vllm.config import parse_config

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

BLOCK = 64
LENGTH = 200
"""Of the prompts: three whole blocks, and some."""
TOKENS = 5
SOON = 15.0
FULL = "full_attention"
OTHERS = {"qwen3": [], "gemma3": [1, 2], "lfm2": []}
"""Blocks of a prompt that layers of other kinds have at the decode engine: a window's 96 tokens; of a state none, since
the one that came belongs to no block's end."""


class Listener:
    """A subscriber of one engine's events, which goes on trying until the engine is there."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        port = free_port()
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def read_until(self, prompt: Sequence[int]) -> list[BlockStored]:
        """What was stored since the last call, once the last whole block of ``prompt`` is."""
        last = blocks_of(prompt)[-1]
        found: list[BlockStored] = []
        deadline = time.monotonic() + SOON
        while last not in {block.tokens for block in whole_blocks(found)}:
            assert self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))), f"only {found}"
            _, _, batch = self._socket.recv_multipart()
            found += [event for event in self._decoder.decode(batch).events if isinstance(event, BlockStored)]
        return found

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@dataclass(frozen=True)
class Stored:
    """One block of the layers that look at everything, which an engine says is in its cache."""

    digest: Any
    parent: Any
    tokens: tuple[int, ...]


def whole_blocks(events: Sequence[BlockStored]) -> Iterator[Stored]:
    for event in events:
        if event.kv_cache_spec_kind == FULL:
            assert event.block_size == BLOCK
            parents = [event.parent_block_hash, *event.block_hashes]
            for place, tokens in zip(range(len(event.block_hashes)), blocks_of(event.token_ids), strict=True):
                yield Stored(event.block_hashes[place], parents[place], tokens)


def blocks_of(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The whole blocks."""
    return [tuple(tokens[at : at + BLOCK]) for at in range(0, len(tokens) - BLOCK + 1, BLOCK)]


@dataclass(frozen=True)
class Site:
    """A pair that keeps statistics and publishes events."""

    model: TinyModel
    pair: Pair
    report: Path
    listeners: tuple[Listener, Listener]
    homes: tuple[int, int]

    @property
    def decode(self) -> Engine:
        return self.pair.decode

    @property
    def left(self) -> int:
        """Tokens of a prompt that its decode engine computes: one, where not all layers look at all positions."""
        return int(self.model is not QWEN3)

    def serve(self, prompt: list[int], name: str, **both: Any) -> tuple[str, Generation, Generation]:
        """Prefill, then decode, with these fields in both requests; the transfer id and both answers."""
        transfer_id = f"{name}-{secrets.token_hex(4)}"
        commands: Sequence[tuple[Engine, Generate]] = (
            (self.pair.prefill, self.pair.prefill_command(prompt, transfer_id, name)),
            (self.pair.decode, self.pair.decode_command(prompt, transfer_id, name, max_tokens=TOKENS)),
        )
        answers = [engine.ask(msgspec.structs.replace(command, **both)) for engine, command in commands]
        return transfer_id, cast(Generation, answers[0]), cast(Generation, answers[1])

    def alone(self, prompt: list[int], name: str, **more: Any) -> Generation:
        return self.pair.prefill.generate(prompt, max_tokens=TOKENS, request_id=f"{name}-alone", **more)

    def proven(self, transfer_id: str) -> Transfer:
        transfer = wait_for_reports([self.report], [transfer_id], SOON)[transfer_id]
        assert transfer.problems() == ()
        return transfer

    def wait_for_all_blocks(self) -> None:
        for engine, home in zip((self.pair.prefill, self.pair.decode), self.homes, strict=True):
            engine.wait_for_free_blocks(home, SOON)


def text(name: str) -> list[int]:
    return token_ids(f"{name}: the ferryman counts what he carries, and says so on both banks. " * 4)[:LENGTH]


@pytest.fixture(scope="module", params=[QWEN3, GEMMA3, LFM2], ids=lambda model: model.name)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_folder: Path, forge: EngineForge
) -> Iterator[Site]:
    model: TinyModel = request.param
    folder = tmp_path_factory.mktemp(model.name)
    listeners = Listener(), Listener()
    specs = [
        EngineSpec(
            name=name,
            model=str(build_model(model, model_folder)),
            dtype=model.dtype,
            custom_ops=model.custom_ops,
            block_size=BLOCK,
            num_blocks=48,
            max_model_len=1024,
            prefix_caching=True,
            engine_args={
                "disable_log_stats": False,
                "enable_prompt_embeds": True,
                "kv_events_config": listener.config,
            },
            environment={"PYTHONHASHSEED": "0"},  # so that two engines give a block one hash
        )
        for name, listener in zip(("prefill", "decode"), listeners, strict=True)
    ]
    spec = pair_spec(*specs, options=report_options(folder, transport="mooncake"))
    with start_engines([spec.prefill, spec.decode], logs=folder, forge=forge) as (prefill, decode):
        homes = prefill.inspect().free_blocks, decode.inspect().free_blocks
        yield Site(model, Pair(spec, prefill, decode), folder / "transfers.jsonl", listeners, homes)
    for listener in listeners:
        listener.close()


# ------------------------------------------------------------------------------------- prompts that are not fetched


@pytest.mark.parametrize("how", ["prompt_logprobs", "as_embeddings"])
def test_a_prompt_whose_cache_does_not_say_enough_is_computed_by_the_decode_engine(site: Site, how: str) -> None:
    prompt = text(how)
    alone = site.alone(prompt, how, prompt_logprobs=how == "prompt_logprobs")
    before = site.decode.count("vllm:kvferry_received_tokens")
    transfer_id, _, answer = site.serve(prompt, how, **{how: True})
    assert answer.tokens == alone.tokens
    assert answer.prompt_logprobs == pytest.approx(alone.prompt_logprobs, abs=FLOAT32_TOLERANCE)
    assert len(answer.prompt_logprobs) == (LENGTH - 1 if how == "prompt_logprobs" else 0)
    assert answer.cached_tokens == 0
    site.wait_for_all_blocks()
    assert site.decode.count("vllm:kvferry_received_tokens") == before
    assert read_reports([site.report])[transfer_id].nbytes == 0


# --------------------------------------------------------------------------------------- a first token that ends it


def test_a_first_token_that_ends_the_request(site: Site) -> None:
    """The prefill engine's only token may be the one that ends the answer: what it computed is fetched all the same."""
    prompt = text("one token")
    first = site.alone(prompt, "first").tokens[0]
    transfer_id, prefilled, answer = site.serve(prompt, "ends", stop_tokens=[first])
    assert (answer.tokens, answer.finish_reason) == ([first], "stop")
    if not site.left:
        assert prefilled.finish_reason == "stop"
    assert site.proven(transfer_id).tokens == LENGTH - site.left
    site.wait_for_all_blocks()


# --------------------------------------------------------------------------------------------------- what is counted


def counted(engine: Engine) -> dict[str, float]:
    """vLLM's counters of where prompts' tokens came from."""
    found = {
        source: engine.count("vllm:prompt_tokens_by_source", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    found |= {
        source: engine.count("vllm:prompt_tokens_cached_by_source", source=source)
        for source in ("device", "p2p", "external_unspecified")
    }
    found["hits"] = engine.count("vllm:external_prefix_cache_hits")
    found["received"] = engine.count("vllm:kvferry_received_tokens")
    return found


@pytest.mark.parametrize("again", [False, True], ids=["new", "begins like another"])
def test_counters_and_the_answer_say_where_the_prompt_came_from(site: Site, again: bool) -> None:
    prompt = text("counted")
    if again:
        site.serve(prompt, "seed")
        prompt = [*prompt[: 2 * BLOCK], *token_ids("and then something else, ") * 3]
    before = counted(site.decode)
    transfer_id, _, answer = site.serve(prompt, f"counted-{again}")
    fetched = site.proven(transfer_id).tokens
    found = 2 * BLOCK if again and site.model is QWEN3 else 0  # of the others only the end came
    assert fetched == len(prompt) - found - site.left
    assert answer.cached_tokens == found + fetched
    wait_until(lambda: site.decode.count("vllm:kvferry_received_tokens") == before["received"] + fetched)
    after = counted(site.decode)
    assert {name: after[name] - before[name] for name in before} == {
        "local_compute": len(prompt) - found - fetched,
        "local_cache_hit": found,
        "external_kv_transfer": fetched,
        "device": found,
        "p2p": fetched,
        "external_unspecified": 0,
        "hits": fetched,
        "received": fetched,
    }


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------- a full hit


def test_a_full_hit_moves_nothing_and_frees_the_producer(site: Site) -> None:
    """vLLM takes all but a prompt's last token from its cache and computes that one: there is nothing to fetch.

    Beside a state this takes a prompt whose blocks end where the state that came does.
    """
    prompt = text("asked twice")[: 3 * BLOCK + 1]
    alone = site.alone(prompt, "twice")
    transfer_id, _, answer = site.serve(prompt, "for the first time")
    assert answer.tokens == alone.tokens
    assert site.proven(transfer_id).nbytes > 0
    site.wait_for_all_blocks()
    before = counted(site.decode)

    transfer_id = f"again-{secrets.token_hex(4)}"
    site.pair.prefill.ask(site.pair.prefill_command(prompt, transfer_id, "again"))
    assert site.pair.prefill.inspect().free_blocks < site.homes[0], "its cache waits to be fetched"
    asked = time.monotonic()
    command = site.pair.decode_command(prompt, transfer_id, "again", max_tokens=TOKENS)
    answer = cast(Generation, site.decode.ask(command))
    assert (answer.tokens, answer.cached_tokens) == (alone.tokens, 3 * BLOCK)
    site.wait_for_all_blocks()
    assert time.monotonic() - asked < SOON < parse_config({}).publish_timeout / 10
    told = wait_for_report(site.report, transfer_id, lambda found: found.producer and found.consumer, SOON)
    for (line,) in (told.producer, told.consumer):
        assert (line.status, line.bytes, line.pages) == ("done", 0, 0)
    after = counted(site.decode)
    assert {name: after[name] - before[name] for name in before} == {
        "local_compute": 1,
        "local_cache_hit": 3 * BLOCK,
        "external_kv_transfer": 0,
        "device": 3 * BLOCK,
        "p2p": 0,
        "external_unspecified": 0,
        "hits": 0,
        "received": 0,
    }


# ------------------------------------------------------------------------------------------------------- KV events


def test_events_name_the_blocks_that_came_when_they_are_there(site: Site) -> None:
    """The prefill engine computed them and says the same of them: hashes, parents, tokens, sizes, groups."""
    prompt, between = text("events"), text("in between")
    computed, fetched = site.listeners
    transfer_id = f"events-{secrets.token_hex(4)}"
    waiting = site.decode.submit(site.pair.decode_command(prompt, transfer_id, "events", max_tokens=TOKENS))
    wait_until(lambda: site.decode.inspect().waiting == 1)
    site.decode.generate(between, max_tokens=1, request_id="between")
    told = fetched.read_until(between)
    assert not {block for block in whole_blocks(told) if block.tokens in blocks_of(prompt)}, "nothing has come yet"
    site.pair.prefill.ask(site.pair.prefill_command(prompt, transfer_id, "events"))
    assert cast(Generation, waiting.result(SOON)).cached_tokens == LENGTH - site.left
    events = fetched.read_until(prompt)
    ours, theirs = (
        {block.tokens: block for block in whole_blocks(found) if block.tokens in blocks_of(prompt)}
        for found in (events, computed.read_until(prompt))
    )
    assert ours == theirs
    assert list(ours) == blocks_of(prompt)
    # Of other layers an event's tokens are those of a whole stretch, and its hashes those of the blocks that are there.
    others = {digest for event in events if event.kv_cache_spec_kind != FULL for digest in event.block_hashes}
    assert [place for place, block in enumerate(ours.values()) if block.digest in others] == OTHERS[site.model.name]
