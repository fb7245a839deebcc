"""Real engines whose model has one KV head: every rank of an engine holds a copy of it, and no rank a part.

A prefill rank's copy may serve any decode rank, and each decode rank needs its own. Right is: the text that one engine
gives alone, one digest at all ranks and both ends, each copy at a decode rank written once, and all blocks back.

``make test`` moves copies from one rank to two; other sizes, and vLLM's own connector at either end, run with ``--cells
all`` (``make test-vllm``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from kvferry.layout import parse_layout
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engines import start_engines
from kvferry.testing.model_recipes import QWEN3_ONE_HEAD
from kvferry.testing.models import build_model
from kvferry.testing.transfer_report import Transfer, layouts_beside
from kvferry.testing.upstream_pair import Fleet, Kind, Role, member

from .test_upstream import ANSWER, Cell, check_pages, prompt_of, reported

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

BLOCK = 64
LENGTHS = (2, 64, 65, 129, 300, 513)
BLOCK_BYTES = 4 * 2 * 32 * 4 * BLOCK
"""Of one copy: layers, keys and values, dimensions of the head, bytes of an element, tokens. Between equal blocks
a whole one is the unit that moves."""
SIZES = [(1, 2), (2, 1), (2, 2)]
"""Tensor parallel ranks of prefill and decode."""


@dataclass(frozen=True)
class Site:
    """A prefill and a decode engine under each connector that takes part."""

    fleet: Fleet
    report: Path

    def served(self, way: tuple[Kind, Kind], number: int, length: int) -> tuple[list[int], Transfer]:
        """The answer to a prompt that goes this way, and what moved."""
        pair = self.fleet.pair(f"{way[0]}-prefill", f"{way[1]}-decode")
        name = f"{way[0]}-{way[1]}-{number}"
        answer = pair.generate(prompt_of(number, length), max_tokens=ANSWER, name=name)
        return answer.decode.tokens, reported(self.report, answer.transfer_id, f"{way[0]}>{way[1]}")

    def alone(self, number: int, length: int) -> list[int]:
        """The answer of one engine that does both jobs."""
        engine = self.fleet.engines["ferry-decode"]
        return engine.generate(prompt_of(number, length), max_tokens=ANSWER, request_id=f"alone{number}").tokens

    def heads(self) -> list[set[tuple[int, int, int]]]:
        """Of each rank of the kvferry engines, the first, the number and the total of the heads that it holds."""
        files = sorted(Path(layouts_beside(self.report)).parent.glob("*.json"))
        return [
            {
                (axis.start, axis.count, axis.total)
                for component in parse_layout(file.read_bytes()).components
                for axis in component.global_axes
                if axis.name == "head"
            }
            for file in files
        ]


@contextmanager
def sites(
    sizes: tuple[int, int], kinds: tuple[Kind, ...], *, folder: Path, models: Path, forge: EngineForge
) -> Iterator[Site]:
    report, model = folder / "transfers.jsonl", build_model(QWEN3_ONE_HEAD, models)
    roles: tuple[tuple[Role, int], ...] = (("prefill", sizes[0]), ("decode", sizes[1]))
    specs = [
        member(
            msgspec.structs.replace(
                Cell(QWEN3_ONE_HEAD).spec(model, f"{kind}-{role}", BLOCK),
                engine_args={"tensor_parallel_size": ranks} if ranks > 1 else {},
            ),
            role,
            kind,
            transfer_report=str(report),
            layout_dump=layouts_beside(report),
        )
        for kind in kinds
        for role, ranks in roles
    ]
    with start_engines(specs, logs=folder, forge=forge) as engines:
        free = [engine.inspect().free_blocks for engine in engines]
        yield Site(Fleet.of(engines), report)
        for engine, home in zip(engines, free, strict=True):
            engine.wait_for_free_blocks(home, timeout=15)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), SIZES)
def test_every_decode_rank_gets_its_copy(
    prefill_ranks: int,
    decode_ranks: int,
    tmp_path: Path,
    model_folder: Path,
    forge: EngineForge,
    request: pytest.FixtureRequest,
) -> None:
    sizes = prefill_ranks, decode_ranks
    if sizes != SIZES[0] and request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    with sites(sizes, ("ferry",), folder=tmp_path, models=model_folder, forge=forge) as site:
        assert site.heads() == [{(0, 1, 1)}] * sum(sizes)
        answers = set()
        for number, length in enumerate(LENGTHS):
            answer, moved = site.served(("ferry", "ferry"), number, length)
            assert answer == site.alone(number, length), length
            check_copies(moved, decode_ranks, length)
            answers.add(tuple(answer))
        assert len(answers) > 3, "the answer does not depend on the prompt"


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), SIZES)
def test_with_vllms_own_connector_at_either_end(
    prefill_ranks: int,
    decode_ranks: int,
    tmp_path: Path,
    model_folder: Path,
    forge: EngineForge,
    request: pytest.FixtureRequest,
) -> None:
    if request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    ways: tuple[tuple[Kind, Kind], ...] = (("ferry", "ferry"), ("ferry", "upstream"), ("upstream", "ferry"))
    sizes = prefill_ranks, decode_ranks
    with sites(sizes, ("ferry", "upstream"), folder=tmp_path, models=model_folder, forge=forge) as site:
        for number, length in enumerate(LENGTHS):
            want = site.alone(number, length)
            served = {f"{way[0]}>{way[1]}": site.served(way, number, length) for way in ways}
            assert {way: answer for way, (answer, _) in served.items()} == dict.fromkeys(served, want), length
            moved = {way: found for way, (_, found) in served.items()}
            check_pages(moved, one_token=False)
            check_copies(moved["ferry>ferry"], decode_ranks, length)
            assert moved["ferry>upstream"].nbytes == moved["ferry>ferry"].nbytes


def check_copies(moved: Transfer, decode_ranks: int, length: int) -> None:
    assert moved.problems() == ()
    assert len(moved.landed) == decode_ranks
    assert len(set(moved.landed)) == 1, "the ranks hold the same"
    assert moved.nbytes == decode_ranks * -(-length // BLOCK) * BLOCK_BYTES
