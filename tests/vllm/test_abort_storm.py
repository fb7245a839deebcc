"""Real engines in a storm: fifty requests, sixteen at a time, most of them aborted at random moments on either side.

Whom it befalls, when, and on which side comes from a seeded generator. What must hold: every request ends; what has
finished is right; what was aborted after some tokens has the first ones of the right answer; a load fails only where
its prefill request was aborted, and with ``recompute`` not even there; and in the end no block is lost on either side.
"""

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.comparison import Prompt, judge, take_references
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec, Generation
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import GEMMA3, LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, Ticket, pair_spec

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

REQUESTS = 50
AT_ONCE = 16
SECONDS = 1.0
"""Within so long after it was sent a request is aborted, and sooner more often than later. Most would have ended."""
TEXT = token_ids(
    "In a storm a ferry may turn round at the bank, in midstream, or with one foot on the other shore. " * 8
)
SEED = 20261130

Policy = Literal["fail", "recompute"]
How = Literal["whole", "prefill", "decode", "both", "after some tokens"]
MOST_ARE_ABORTED: tuple[How, ...] = ("whole", "whole", "prefill", "decode", "both", "after some tokens")


@dataclass(frozen=True)
class Case:
    """One pair in a storm."""

    model: TinyModel
    transport: str
    policy: Policy
    core: bool = False

    @property
    def name(self) -> str:
        return f"{self.model.name}-{self.transport}-{self.policy}"


CASES = (
    Case(QWEN3, "mooncake", "fail", core=True),
    Case(QWEN3, "cma", "recompute"),
    Case(LFM2, "cma", "fail"),
    Case(LFM2, "mooncake", "recompute"),
    Case(GEMMA3, "mooncake", "recompute"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--cells") == "all"
    chosen = [case for case in CASES if every or case.core]
    metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])


@dataclass(frozen=True)
class End:
    """What became of one request."""

    how: How
    prompt: Prompt
    prefill: Generation
    decode: Generation


def live(pair: Pair, number: int) -> End:
    """One request from its first moment to its last."""
    chance = random.Random(f"{SEED}-{number}")
    how = chance.choice(MOST_ARE_ABORTED)
    start, length = chance.randrange(40), chance.choice((1, 63, 64, 65, 130, 257, 400, 700))
    prompt = Prompt(f"storm-{number}", tuple(TEXT[start : start + length]), chance.randint(1, 12))
    ticket = send(pair, prompt, chance.randint(1, 8) if how == "after some tokens" else None)
    if how in ("prefill", "decode", "both"):
        # Not a pause: the moment is chosen, and a request that ends before it is not aborted any more.
        wait([ticket.decode], timeout=SECONDS * chance.random() ** 2)
        for side, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
            if how in (side, "both"):
                engine.abort(f"{prompt.name}-{side[0]}")
    prefill, decode = (cast(Generation, future.result(90)) for future in (ticket.prefill, ticket.decode))
    return End(how, prompt, prefill, decode)


def send(pair: Pair, prompt: Prompt, abort_after: int | None) -> Ticket:
    """To both sides at once."""
    transfer = f"xfer-{prompt.name}"
    decode = msgspec.structs.replace(
        pair.decode_command(prompt.tokens, transfer, prompt.name, max_tokens=prompt.max_tokens), abort_after=abort_after
    )
    prefill = pair.prefill_command(prompt.tokens, transfer, prompt.name)
    return Ticket(transfer, prompt.name, pair.prefill.submit(prefill), pair.decode.submit(decode), 0.0)


def problems(case: Case, end: End) -> Iterator[str]:
    """What is wrong with how it ended, but for the tokens of a whole answer."""
    allowed = {"length"}
    if end.how in ("decode", "both", "after some tokens"):
        allowed |= {"abort"}
    if end.how in ("prefill", "both") and case.policy == "fail":
        allowed |= {"error"}
    if end.decode.finish_reason not in allowed:
        yield f"{end.prompt.name} ({end.how}): the decode request ended with {end.decode.finish_reason}"
    if end.prefill.finish_reason not in {"length", *(["abort"] if end.how in ("prefill", "both") else [])}:
        yield f"{end.prompt.name} ({end.how}): the prefill request ended with {end.prefill.finish_reason}"
    if end.decode.finish_reason == "error" and end.prefill.finish_reason != "abort":
        yield f"{end.prompt.name} ({end.how}): its load failed although its prompt was computed"


def wrong_answers(pair: Pair, ends: list[End]) -> Iterator[str]:
    """Compared with the decode engine alone, which nothing is sent to any more."""
    told = [end for end in ends if end.decode.tokens]
    references = take_references(pair.decode, [end.prompt for end in told])
    for end, reference in zip(told, references, strict=True):
        if end.decode.finish_reason == "abort":
            right = reference.alone.tokens[: len(end.decode.tokens)] == end.decode.tokens
            if reference.stable and not right:
                yield f"{end.prompt.name}: {end.decode.tokens} instead of {reference.alone.tokens}"
        else:
            verdict = judge(reference, end.decode, single=pair.decode, exact=True)
            if not verdict.equal:
                yield f"{end.prompt.name}: {verdict}"


@contextmanager
def pairs(case: Case, folder: Path, *, models: Path, forge: EngineForge) -> Iterator[Pair]:
    model = str(build_model(case.model, models))
    prefill, decode = (
        EngineSpec(
            name=name,
            model=model,
            dtype=case.model.dtype,
            custom_ops=case.model.custom_ops,
            block_size=64,
            num_blocks=160,
            max_model_len=1024,
            max_batched_tokens=192,
            max_requests=AT_ONCE,
            prefix_caching=True,
        )
        for name in ("prefill", "decode")
    )
    spec = pair_spec(prefill, decode, options={"transport": case.transport})
    transfer = {**(spec.decode.kv_transfer or {}), "kv_load_failure_policy": case.policy}
    spec = replace(spec, decode=msgspec.structs.replace(spec.decode, kv_transfer=transfer))
    with start_engines([spec.prefill, spec.decode], logs=folder, forge=forge) as engines:
        homes = [engine.inspect().free_blocks for engine in engines]
        yield Pair(spec, *engines)
        for engine, home in zip(engines, homes, strict=True):
            facts = engine.wait_for_free_blocks(home, timeout=20)
            assert (facts.free_blocks, facts.held) == (home, 0), engine.spec.name


def test_no_block_is_lost_in_a_storm_of_aborts(
    case: Case, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    with pairs(case, tmp_path, models=model_folder, forge=forge) as pair:
        with ThreadPoolExecutor(AT_ONCE) as crowd:
            ends = [*crowd.map(lambda number: live(pair, number), range(REQUESTS))]
        assert [*(problem for end in ends for problem in problems(case, end)), *wrong_answers(pair, ends)] == []
        fates = Counter(end.decode.finish_reason for end in ends)
        aborted = sum("abort" in (end.prefill.finish_reason, end.decode.finish_reason) for end in ends)
        assert fates["length"] >= 10, fates
        assert aborted >= 10, "the storm was a calm"
