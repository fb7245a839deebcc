"""Prefix caches beside a sliding window, kvferry on one side and vLLM's own MooncakeConnector on the other, both ways.

Prompts that begin alike go through kvferry to kvferry, kvferry to upstream and upstream to kvferry, each way from empty
caches. In all three ways the same must be found at the same sides, and digests of the pages that moved must be equal:
as the decode engine's memory has them, and as a kvferry engine sent them. The answers are those of an engine alone.

By itself this runs equal blocks; ``--cells all`` (``make test-vllm``) others too.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.runtime.report import Line
from kvferry.testing.comparison import FLOAT32_TOLERANCE, compare_logprobs
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec, Generation
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import GEMMA3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.transfer_report import read_reports
from kvferry.testing.upstream_pair import Fleet, Kind, Role, member

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

WINDOW, ANSWER = 96, 8
BLOCKS = {"blocks of 32": (32, 32), "blocks of 32 and 64": (32, 64)}
"""Of prefill and decode; all over kernel blocks of 32."""
LARGEST = 64
WAYS: tuple[tuple[Kind, Kind], ...] = (("ferry", "ferry"), ("ferry", "upstream"), ("upstream", "ferry"))
Cached = Literal["prefill", "decode", "both"]

TEXT = token_ids("one ferry takes the first half of the text, and comes back for the rest of it; " * 16)
OTHER = token_ids("another boat, and another text after the same beginning, " * 8)
PROMPTS: tuple[list[int], ...] = (
    TEXT[:300],
    TEXT[:350],  # what is missing is shorter than the window
    TEXT[:620],  # and longer
    [*TEXT[:200], *OTHER[:130]],  # what is there ends before where the first prompt's window was
    TEXT[:620],
)
EDGES = (WINDOW - 1 + LARGEST, WINDOW - 1 + 5 * LARGEST)
"""Lengths of prompts whose last token looks at one position of a block that lies before the window of the next."""


@dataclass(frozen=True)
class Boats:
    """The engines, and where the kvferry ones write their reports."""

    fleet: Fleet
    report: Path

    @property
    def alone(self) -> Engine:
        return self.fleet.engines["ferry-decode"]

    def forget(self, roles: Sequence[str] = ("prefill", "decode")) -> None:
        for engine in self.fleet.engines.values():
            deadline = time.monotonic() + 15
            while engine.spec.name.split("-")[1] in roles and not engine.reset_prefix_cache():
                assert time.monotonic() < deadline, f"blocks of {engine.spec.name} stay held"
                time.sleep(0.02)

    def line(self, transfer: str, way: tuple[Kind, Kind]) -> Line:
        """Of what came. It was written down before the answer was given."""
        found = read_reports([self.report])[transfer]
        assert way != WAYS[0] or found.proven, found.problems()
        assert way[0] == "upstream" or found.landing_problems() == ()
        (line,) = found.consumer
        return line


@pytest.fixture(scope="module", params=BLOCKS.values(), ids=BLOCKS)
def boats(
    request: pytest.FixtureRequest, forge: EngineForge, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Boats]:
    if request.param[0] != request.param[1] and request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    folder = tmp_path_factory.mktemp("prefixes")
    spec = EngineSpec(
        name="",
        model=str(build_model(GEMMA3, model_folder)),
        dtype=GEMMA3.dtype,
        kernel_block=32,
        num_blocks=160,
        max_model_len=1024,
        prefix_caching=True,
    )
    kinds: tuple[Kind, ...] = ("ferry", "upstream")
    roles: tuple[Role, ...] = ("prefill", "decode")
    report = folder / "transfers.jsonl"
    specs = [
        named(msgspec.structs.replace(spec, block_size=block), role, kind, report, there=there)
        for kind in kinds
        for role, block, there in zip(roles, request.param, reversed(request.param), strict=True)
    ]
    with start_engines(specs, logs=folder, forge=forge) as engines:
        free = {engine.spec.name: engine.inspect().free_blocks for engine in engines}
        yield Boats(Fleet.of(engines), report)
        for engine in engines:
            engine.wait_for_free_blocks(free[engine.spec.name], timeout=15)


def named(spec: EngineSpec, role: Role, kind: Kind, report: Path, *, there: int) -> EngineSpec:
    """``there``: the blocks at the other side."""
    declared = {} if spec.block_size == there else {"upstream_peer": {"block_size": there, "kernel_block_size": 32}}
    named = msgspec.structs.replace(spec, name=f"{kind}-{role}")
    return member(named, role, kind, transfer_report=str(report), **declared)


@pytest.mark.parametrize("cached", ["prefill", "decode", "both"])
def test_prompts_that_begin_alike(boats: Boats, cached: Cached) -> None:
    boats.forget()
    want = [
        boats.alone.generate(prompt, max_tokens=ANSWER, request_id=f"alone-{cached}-{number}")
        for number, prompt in enumerate(PROMPTS)
    ]
    seen = {way: list(pass_through(boats, way, cached, want)) for way in WAYS}
    assert seen[WAYS[1]] == seen[WAYS[0]]
    assert seen[WAYS[2]] == seen[WAYS[0]]
    starts = [start for start, _, _, _ in seen[WAYS[0]]]
    assert starts[0] == 0
    assert any(starts) == (cached != "prefill")
    assert any(found for _, _, _, found in seen[WAYS[0]]) == (cached != "decode")


def pass_through(
    boats: Boats, way: tuple[Kind, Kind], cached: Cached, want: Sequence[Generation]
) -> Iterator[tuple[int, int, str | None, int]]:
    """What moved of each prompt, its digest, and what the prefill engine found in its cache."""
    boats.forget()
    pair = boats.fleet.pair(f"{way[0]}-prefill", f"{way[1]}-decode")
    for number, prompt in enumerate(PROMPTS):
        if cached != "both":
            boats.forget(["decode" if cached == "prefill" else "prefill"])
        served = pair.generate(prompt, max_tokens=ANSWER, name=f"{way}-{cached}-{number}")
        assert served.decode.tokens == want[number].tokens, (way, cached, number)
        verdict = compare_logprobs(served.decode.logprobs, want[number].logprobs, FLOAT32_TOLERANCE)
        assert verdict.equal, (way, cached, number, verdict.detail)
        line = boats.line(served.transfer_id, way)
        yield line.start, line.stop, line.digest, served.prefill.cached_tokens


@pytest.mark.parametrize("length", EDGES)
def test_a_block_that_only_the_last_token_looks_at(boats: Boats, length: int) -> None:
    """vLLM's connector gives it back on both sides and reads another in its place.

    Here such a prompt is computed at a decode engine of ours that has met the producer, and refused to one of theirs.
    """
    prompt = TEXT[:length]
    want = boats.alone.generate(prompt, max_tokens=ANSWER, request_id=f"edge-{length}").tokens
    answers = {}
    for first, second in WAYS:
        boats.forget()
        pair = boats.fleet.pair(f"{first}-prefill", f"{second}-decode")
        pair.generate(OTHER[:40], max_tokens=1, name=f"met-{first}-{second}-{length}")
        served = pair.generate(prompt, max_tokens=ANSWER, name=f"edge-{first}-{second}-{length}")
        answers[first, second] = served.decode
    assert answers[WAYS[0]].tokens == answers[WAYS[2]].tokens == want
    assert answers[WAYS[0]].cached_tokens == length - 1
    assert answers[WAYS[2]].cached_tokens == 0
    assert answers[WAYS[1]].finish_reason == "error"
    said = f"looks at position {length - WINDOW}, and vLLM's own connector at the decode side"
    assert said in boats.fleet.engines["ferry-prefill"].log.read_text(errors="replace")


@pytest.mark.parametrize(("first", "second"), WAYS[1:])
def test_such_a_block_in_the_decode_engines_own_cache(boats: Boats, first: Kind, second: Kind) -> None:
    """Ours has it, and fetches the rest; theirs gives it back when it asks for the rest."""
    length = EDGES[-1] + LARGEST
    boats.forget()
    want = boats.alone.generate(TEXT[:length], max_tokens=ANSWER, request_id=f"has-{first}")
    boats.forget()
    pair = boats.fleet.pair(f"{first}-prefill", f"{second}-decode")
    pair.generate(TEXT[: length - 10], max_tokens=ANSWER, name=f"has-{first}-less")
    answer = pair.generate(TEXT[:length], max_tokens=ANSWER, name=f"has-{first}").decode
    if second == "upstream":
        assert answer.finish_reason == "error"
        return
    assert answer.cached_tokens == length - 1
    assert answer.tokens == want.tokens
    assert compare_logprobs(answer.logprobs, want.logprobs, FLOAT32_TOLERANCE).equal
