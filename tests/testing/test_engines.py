"""Real engines on the CPU: the split is real, answers depend on the prompt, books and ends are right."""

import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from kvferry.testing.comparison import FLOAT32_TOLERANCE, Prompt, compare_logprobs, judge, take_references
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_process import socket_threads
from kvferry.testing.engine_wire import EngineSpec, Failed, Generate, Generation
from kvferry.testing.engines import Engine, EngineError, start_engines
from kvferry.testing.model_recipes import LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@dataclass(frozen=True)
class Engines:
    whole: Engine
    """Dense, kernel block = logical block = 128."""
    split: Engine
    """The same model, blocks of 128 over 32."""
    hybrid: Engine
    """State and attention, blocks of 128."""
    hybrid_split: Engine
    """The same model, blocks of 768 over 64."""


def spec_of(name: str, model: TinyModel, folder: Path, block: int, kernel: int | None) -> EngineSpec:
    return EngineSpec(
        name=name,
        model=str(build_model(model, folder)),
        dtype=model.dtype,
        custom_ops=model.custom_ops,
        block_size=block,
        kernel_block=kernel,
        num_blocks=16,
        max_model_len=1536,
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, forge: EngineForge) -> Iterator[Engines]:
    specs = [
        spec_of("whole", QWEN3, model_folder, 128, None),
        spec_of("split", QWEN3, model_folder, 128, 32),
        spec_of("hybrid", LFM2, model_folder, 128, None),
        spec_of("hybrid-split", LFM2, model_folder, 768, 64),
    ]
    with start_engines(specs, logs=tmp_path_factory.mktemp("engines"), forge=forge) as started:
        yield Engines(*started)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{seed}-{length}")
    return [source.randrange(35, 98) for _ in range(length)]


def attention_shapes(engine: Engine) -> set[tuple[int, ...]]:
    facts = engine.inspect()
    attention = {layer for group in facts.groups if group.kind != "MambaSpec" for layer in group.layers}
    return {tuple(facts.tensors[layer].shape) for layer in attention}


def test_the_tensor_has_a_row_for_every_kernel_block_while_ids_stay_logical(engines: Engines) -> None:
    assert attention_shapes(engines.whole) == {(16, 4, 128, 64)}
    assert attention_shapes(engines.split) == {(16 * 4, 4, 32, 64)}
    assert attention_shapes(engines.hybrid_split) == {(16 * 12, 2, 64, 64)}
    for engine in (engines.whole, engines.split, engines.hybrid, engines.hybrid_split):
        facts = engine.inspect()
        assert (facts.num_blocks, facts.free_blocks) == (16, 15)  # block 0 is vLLM's null block
        assert {g.block_tokens for g in facts.groups if g.kind != "MambaSpec"} == {engine.spec.block_size}
        assert engine.inspect_caches() == [facts.tensors]


@pytest.mark.parametrize("length", [5, 31, 129, 300, 1000])
def test_a_split_does_not_change_an_answer(engines: Engines, length: int) -> None:
    prompt = random_prompt(length)
    for name, one, other in (
        ("dense", engines.whole, engines.split),
        ("hybrid", engines.hybrid, engines.hybrid_split),
    ):
        expected = one.generate(prompt, max_tokens=12, request_id=f"{name}-{length}")
        answer = other.generate(prompt, max_tokens=12, request_id=f"{name}-{length}")
        assert answer.tokens == expected.tokens
        assert compare_logprobs(answer.logprobs, expected.logprobs, FLOAT32_TOLERANCE).equal


@pytest.mark.parametrize("position", [0, 70, 140, 199])
def test_an_answer_depends_on_every_part_of_the_prompt(engines: Engines, position: int) -> None:
    """A page that is wrong at one place must be seen: by the log probabilities, wherever it is."""
    prompt = random_prompt(200)
    changed = [*prompt]
    changed[position] = 35 + (changed[position] - 35 + 11) % 63
    for engine in (engines.whole, engines.hybrid):
        name = f"depends-{engine.spec.name}-{position}"
        answer = engine.generate(prompt, max_tokens=12, request_id=name)
        forced = engine.score(changed, answer.tokens, request_id=f"{name}-forced")
        assert not compare_logprobs(answer.logprobs, forced, FLOAT32_TOLERANCE).equal


def test_teacher_forcing_finds_the_engines_own_log_probabilities(engines: Engines) -> None:
    prompt = random_prompt(150)
    for engine in (engines.split, engines.hybrid_split):
        answer = engine.generate(prompt, max_tokens=12, request_id="own")
        forced = engine.score(prompt, answer.tokens, request_id="own-forced")
        verdict = compare_logprobs(answer.logprobs, forced, FLOAT32_TOLERANCE)
        assert verdict.equal, verdict.detail


def test_references_are_stable_and_judge_another_engines_answers(engines: Engines) -> None:
    prompts = [Prompt(f"p{n}", tuple(random_prompt(n, seed=1))) for n in (7, 40, 130, 260, 500)]
    references = take_references(engines.whole, prompts)
    assert all(reference.stable for reference in references)
    for reference in references:
        answer = engines.split.generate(reference.prompt.tokens, max_tokens=16, request_id=reference.prompt.name)
        assert judge(reference, answer, single=engines.whole, exact=True).equal
        assert judge(reference, answer, single=engines.whole, exact=False).how == "logprobs"
    swapped = engines.split.generate(prompts[0].tokens, max_tokens=16, request_id="swapped")
    for exact in (True, False):
        assert not judge(references[1], swapped, single=engines.whole, exact=exact).equal


def test_requests_at_once_do_not_clear_each_others_blocks(engines: Engines) -> None:
    """Enough of them that a logical id, taken for a row, is a row of the first one's block."""
    prompts = [Prompt(f"many-{n}", tuple(random_prompt(n, seed=2))) for n in range(600, 607)]
    for reference in take_references(engines.hybrid_split, prompts):
        assert reference.stable
        answer = engines.hybrid.generate(reference.prompt.tokens, max_tokens=16, request_id=reference.prompt.name)
        assert answer.tokens == reference.alone.tokens


def test_an_aborted_request_gives_its_blocks_back(engines: Engines) -> None:
    engine = engines.split
    home = engine.inspect().free_blocks
    future = engine.submit(Generate(prompt=random_prompt(300), max_tokens=1200, request_id="long"))
    assert engine.abort("long")
    answer = future.result(30)
    assert isinstance(answer, Generation)
    assert answer.finish_reason == "abort"
    assert engine.wait_for_free_blocks(home, timeout=10).held == 0
    assert not engine.abort("long")


def test_a_command_that_vllm_refuses_fails_alone(engines: Engines) -> None:
    with pytest.raises(EngineError, match="whole: "):
        engines.whole.generate(random_prompt(1600), max_tokens=4, request_id="too-long")
    assert engines.whole.generate(random_prompt(9), max_tokens=4, request_id="after").finish_reason == "length"


def test_what_waits_for_a_killed_engine_is_told(engines: Engines) -> None:
    """The last test of this file: it costs the engine."""
    engine = engines.hybrid
    engine.kill(signal.SIGSTOP)
    future = engine.submit(Generate(prompt=random_prompt(20), max_tokens=4, request_id="never"))
    engine.kill(signal.SIGKILL)
    assert future.result(10) == Failed("the process has ended")
    assert not engine.alive
    with pytest.raises(EngineError, match="hybrid is gone"):
        engine.inspect()


def test_an_engine_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    """Started as a process of its own, without the forge: that way must work too."""
    spec = EngineSpec(name="impossible", model=str(tmp_path), kernel_block=33)
    with pytest.raises(EngineError, match=r"multiple of 32 tokens, got 33; see .*impossible\.log"):
        with start_engines([spec], logs=tmp_path):
            pytest.fail("the engine was built")


def test_a_socket_that_is_still_open_is_seen_by_its_threads() -> None:
    context = zmq.Context()
    before = socket_threads()
    with context.socket(zmq.PAIR):
        assert len(socket_threads()) > len(before)
    context.term()
    assert socket_threads() == before
