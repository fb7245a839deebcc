"""Real engines of unequal pipeline sizes, kvferry on one side and vLLM's own MooncakeConnector on the other.

Every stage of the one side exchanges with every stage of the other. Right is what is right in equal sizes: the answers
of an engine alone, and for the pages of a prompt the digests that two kvferry engines report; of what was sent, and of
what is in the memory of the decode engine, whosever it is. What vLLM's connector wrote from several stages is looked at
as a whole, for it does not say which layers were whose; so it is compared with what one kvferry stage wrote.

By itself this runs one case; ``--cells all`` (``make test-vllm``) runs every one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.transfer_report import Transfer, read_reports
from kvferry.testing.upstream_pair import Fleet, Kind, Role, member

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]

TEXT = token_ids("The train is longer than the ferry, so it crosses in two halves of their own. " * 8)
LENGTHS = (7, 129, 400)
ANSWER = 8


@dataclass(frozen=True)
class Case:
    model: TinyModel
    prefill: int
    """Pipeline stages."""
    decode: int
    core: bool = False


CASES = {
    "dense-2-to-1": Case(QWEN3, 2, 1, core=True),
    "dense-1-to-2": Case(QWEN3, 1, 2),
    "dense-2-to-2": Case(QWEN3, 2, 2),
    "state-and-attention-2-to-1": Case(LFM2, 2, 1),
    "state-and-attention-1-to-2": Case(LFM2, 1, 2),
}


@contextmanager
def fleet_of(case: Case, folder: Path, models: Path, forge: EngineForge) -> Iterator[Fleet]:
    """Both connectors at both roles; and, where upstream has more prefill stages, a kvferry prefill of one."""

    def spec_of(name: str, role: Role, kind: Kind, stages: int) -> EngineSpec:
        spec = EngineSpec(
            name=name,
            model=str(build_model(case.model, models)),
            dtype=case.model.dtype,
            custom_ops=case.model.custom_ops,
            block_size=64,
            num_blocks=40,
            max_model_len=1024,
            engine_args={"pipeline_parallel_size": stages},
        )
        return member(spec, role, kind, transfer_report=str(folder / "transfers.jsonl"))

    specs = [
        spec_of("ferry-prefill", "prefill", "ferry", case.prefill),
        spec_of("upstream-prefill", "prefill", "upstream", case.prefill),
        spec_of("ferry-decode", "decode", "ferry", case.decode),
        spec_of("upstream-decode", "decode", "upstream", case.decode),
    ]
    if case.prefill > case.decode:
        specs.append(spec_of("whole-prefill", "prefill", "ferry", 1))
    with start_engines(specs, logs=folder, forge=forge) as engines:
        free = {engine.spec.name: engine.inspect().free_blocks for engine in engines}
        yield Fleet.of(engines)
        for engine in engines:
            engine.wait_for_free_blocks(free[engine.spec.name], timeout=15)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_unequal_pipelines(
    case: Case, tmp_path: Path, model_folder: Path, forge: EngineForge, request: pytest.FixtureRequest
) -> None:
    if not case.core and request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    with fleet_of(case, tmp_path, model_folder, forge) as fleet:
        for length in LENGTHS:
            prompt = TEXT[:length]
            alone = fleet.engines["ferry-decode"]
            want = alone.generate(prompt, max_tokens=ANSWER, request_id=f"alone{length}").tokens
            between = moved(fleet, tmp_path, ("ferry-prefill", "ferry-decode"), prompt, want)
            assert between.proven, between.problems()
            assert len(between.sent) == len(between.landed) == max(case.prefill, case.decode)
            there = moved(fleet, tmp_path, ("ferry-prefill", "upstream-decode"), prompt, want)
            assert there.landing_problems() == ()
            assert there.sent == there.landed == between.sent
            if case.prefill > case.decode:
                between = moved(fleet, tmp_path, ("whole-prefill", "ferry-decode"), prompt, want)
                assert between.proven, between.problems()
            here = moved(fleet, tmp_path, ("upstream-prefill", "ferry-decode"), prompt, want)
            assert here.producer == ()
            assert here.landed == between.landed


def moved(fleet: Fleet, folder: Path, way: tuple[str, str], prompt: list[int], want: list[int]) -> Transfer:
    """What the ends report of a prompt that went this way, all before the answer came; the answer is checked."""
    served = fleet.pair(*way).generate(prompt, max_tokens=ANSWER, name="-".join(map(str, (*way, len(prompt)))))
    assert served.decode.tokens == want, way
    found = read_reports([folder / "transfers.jsonl"])[served.transfer_id]
    assert all(line.status == "done" for line in (*found.producer, *found.consumer))
    return found
