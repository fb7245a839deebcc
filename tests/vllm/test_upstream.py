"""Real engines, kvferry on one side and vLLM's own MooncakeConnector on the other, both ways.

Each cell has a prefill and a decode engine under each connector. Every prompt goes through kvferry to kvferry, kvferry
to upstream and upstream to kvferry. Right is: the text that the decode engine gives alone, and one digest for the pages
of a prompt, wherever they were computed and whoever wrote them: of what a kvferry engine sent, and of what is in the
memory of the decode engine, kvferry's or not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.testing.comparison import BFLOAT16_TOLERANCE, compare_logprobs
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import DEEPSEEK_V2, GEMMA3, LFM2, QWEN3, QWEN3_NEXT, TinyModel
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Served
from kvferry.testing.transfer_report import Transfer, wait_for_report
from kvferry.testing.upstream_pair import Fleet, Kind, Role, member

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]

ANSWER = 8


@dataclass(frozen=True)
class Cell:
    model: TinyModel
    prefill_block: int = 64
    decode_block: int = 64
    kernel_block: int | None = None
    lengths: tuple[int, ...] = (1, 2, 63, 64, 65, 66, 128, 129, 300, 513)
    nbytes: Mapping[int, int] = field(default_factory=dict)
    """What kvferry sends of a prompt of so many tokens."""
    dtype: str | None = None
    """Other than the model's own."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    why_not: Callable[[], str | None] = lambda: None
    """Why this machine cannot run it."""

    @property
    def exact(self) -> bool:
        return self.model.exact and self.dtype is None

    def spec(self, model: Path, name: str, block: int) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=str(model),
            dtype=self.dtype or self.model.dtype,
            block_size=block,
            kernel_block=self.kernel_block,
            num_blocks=64 * 64 // block + 16,
            max_model_len=1024,
            custom_ops=self.model.custom_ops,
            engine_args=dict(self.engine_args),
        )

    def declared(self, *, by: str) -> dict[str, Any]:
        """What a kvferry engine says of its peer where that is not as it is itself."""
        there = self.decode_block if by == "prefill" else self.prefill_block
        return {} if self.prefill_block == self.decode_block else {"upstream_peer": {"block_size": there}}


def without_avx512() -> str | None:
    import torch

    return None if torch.cpu._is_avx512_supported() else "vLLM has no 8-bit cache on a CPU without AVX-512"


CELLS = {
    "dense": Cell(QWEN3),
    "sliding window": Cell(GEMMA3),
    "latent rows": Cell(DEEPSEEK_V2),
    "gated delta net": Cell(QWEN3_NEXT, lengths=(2, 65, 577, 700)),
    # 64 tokens of two attention layers, and two states of 1,024 bytes in pages of 32,768
    "short convolution": Cell(LFM2, lengths=(2, 64, 65, 300), nbytes={65: 2 * 64 * 512 + 2 * 1024}),
    # Windows of 16 bits in blocks of 64 tokens, the others of 8 bits in blocks of 128: pages of 32,768 bytes in one
    # storage. So vLLM clears blocks, and whole ones are sent: one of each full layer, two of each window.
    "two precisions": Cell(
        GEMMA3,
        lengths=(2, 66, 150, 300, 513),
        nbytes={66: 2 * (1 + 2) * 32_768},
        dtype="bfloat16",
        engine_args={"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["sliding_window"]},
        why_not=without_avx512,
    ),
    "dense, blocks 128 and 768 over 32": Cell(QWEN3, 128, 768, kernel_block=32, lengths=(2, 128, 129, 700, 769, 900)),
}


def prompt_of(number: int, length: int) -> list[int]:
    return token_ids(f"{number} engines of two makers exchange the cache of a prompt of {length} tokens; " * 20)[
        :length
    ]


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_prompt_is_the_same_whoever_computes_and_whoever_writes_it(
    cell: Cell, tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    if (why := cell.why_not()) is not None:
        pytest.skip(why)
    model = build_model(cell.model, model_folder)
    report = tmp_path / "transfers.jsonl"
    specs = [
        member(
            cell.spec(model, f"{kind}-{role}", cell.prefill_block if role == "prefill" else cell.decode_block),
            role,
            kind,
            transfer_report=str(report),
            **cell.declared(by=role),
        )
        for kind in ("ferry", "upstream")
        for role in ("prefill", "decode")
    ]
    with start_engines(specs, logs=tmp_path, forge=forge) as engines:
        fleet = Fleet.of(engines)
        free = {engine.spec.name: engine.inspect().free_blocks for engine in engines}
        alone = fleet.engines["ferry-decode"]
        for number, length in enumerate(cell.lengths):
            prompt = prompt_of(number, length)
            want = alone.generate(prompt, max_tokens=ANSWER, request_id=f"alone{number}").tokens
            served = {
                f"{first}>{second}": fleet.pair(f"{first}-prefill", f"{second}-decode").generate(
                    prompt, max_tokens=ANSWER, name=f"{first}-{second}-{number}"
                )
                for first, second in (("ferry", "ferry"), ("ferry", "upstream"), ("upstream", "ferry"))
            }
            if cell.exact:
                assert {way: one.decode.tokens for way, one in served.items()} == dict.fromkeys(served, want), length
            else:
                check_likeness([alone], prompt, served)
            transfers = {way: reported(report, one.transfer_id, way) for way, one in served.items()}
            check_pages(transfers, one_token=length == 1)
            assert len(transfers["ferry>ferry"].sent) <= 1
            if (nbytes := cell.nbytes.get(length)) is not None:
                assert transfers["ferry>ferry"].nbytes == transfers["ferry>upstream"].nbytes == nbytes
        for engine in engines:
            engine.wait_for_free_blocks(free[engine.spec.name], timeout=15)


def check_likeness(alone: Sequence[Engine], prompt: list[int], served: dict[str, Served]) -> None:
    """An engine alone finds each token as likely as the engine that chose it: all of them one of these engines does.

    Engines of unequal tensor parallel sizes sum up in unequal order: on single prompts they do not agree in bfloat16.
    """
    for way, one in served.items():
        forced = [engine.score(prompt, one.decode.tokens, request_id=f"forced-{one.transfer_id}") for engine in alone]
        verdicts = [compare_logprobs(one.decode.logprobs, scores, BFLOAT16_TOLERANCE) for scores in forced]
        assert any(verdict.equal for verdict in verdicts), (way, len(prompt), [v.detail for v in verdicts])


def check_pages(transfers: dict[str, Transfer], *, one_token: bool) -> None:
    """The same was sent and has landed, at every end that is looked at.

    Where a kvferry decode engine computes the last token of a prompt itself, it fetches nothing of a prompt of one.
    """
    between, there = transfers["ferry>ferry"], transfers["ferry>upstream"]
    assert there.landing_problems() == ()
    if between.nbytes or not one_token:
        assert between.problems() == ()
        assert between.sent == there.sent
    for way, transfer in transfers.items():
        assert way.endswith("upstream") or transfer.landed == between.landed, way


def reported(report: Path, transfer: str, way: str) -> Transfer:
    """All of it was written down before the answer came."""
    holds = {
        "ferry>ferry": lambda found: found.proven,
        "ferry>upstream": lambda found: not found.landing_problems(),
        "upstream>ferry": lambda found: found.landed,
    }
    found = wait_for_report(report, transfer, holds[way], timeout=1)
    lines: Sequence[object] = found.producer if way.startswith("ferry") else found.consumer
    assert lines, f"{way}: nothing was reported"
    assert all(line.status == "done" for line in (*found.producer, *found.consumer))
    return found


def test_one_wrong_byte_at_a_decode_engine_of_upstreams_is_noticed(
    tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    """It is changed where it landed, before the decode engine's memory is read."""
    model, report = build_model(QWEN3, model_folder), tmp_path / "transfers.jsonl"
    roles: tuple[tuple[Role, Kind, dict[str, Any]], ...] = (
        ("prefill", "ferry", {}),
        ("decode", "upstream", {"flip_a_byte": True}),
    )
    specs = [
        member(Cell(QWEN3).spec(model, role, 64), role, kind, transfer_report=str(report), **more)
        for role, kind, more in roles
    ]
    with start_engines(specs, logs=tmp_path, forge=forge) as engines:
        served = Fleet.of(engines).pair("prefill", "decode").generate(prompt_of(0, 129), max_tokens=1, name="flipped")
        found = reported(report, served.transfer_id, "ferry>upstream")
        assert len(found.sent) == len(found.landed) == 1
        (problem,) = found.landing_problems()
        assert problem.startswith("digests differ")
        with pytest.raises(AssertionError):
            check_pages({"ferry>ferry": found, "ferry>upstream": found}, one_token=False)


PARTS = {
    "dense": QWEN3,
    "short convolution": LFM2,
    "sliding window": GEMMA3,
    "latent rows": DEEPSEEK_V2,
    "gated delta net": QWEN3_NEXT,
}
CORE = (QWEN3, LFM2)
BLOCKS = {DEEPSEEK_V2.name: 16, QWEN3_NEXT.name: 640}
"""Of models that are not free to choose: of GDN, vLLM makes an attention page as large as a state."""


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("recipe", PARTS.values(), ids=PARTS)
def test_unequal_tensor_parallel_sizes(
    recipe: TinyModel,
    prefill_ranks: int,
    decode_ranks: int,
    tmp_path: Path,
    model_folder: Path,
    forge: EngineForge,
    request: pytest.FixtureRequest,
) -> None:
    """Answers and pages, both ways; but upstream would write states wrongly, so these are not asked of it."""
    if recipe not in CORE and request.config.getoption("--cells") != "all":
        pytest.skip("runs with --cells all")
    model = build_model(recipe, model_folder)
    block = BLOCKS.get(recipe.name, 64)
    cell = Cell(recipe, lengths=(2, 64, 65, 300))
    kinds: tuple[Kind, ...] = ("ferry", "upstream")
    roles: tuple[tuple[Role, int], ...] = (("prefill", prefill_ranks), ("decode", decode_ranks))
    report = tmp_path / "transfers.jsonl"
    specs = [
        member(
            msgspec.structs.replace(
                cell.spec(model, f"{kind}-{role}", block),
                engine_args={"tensor_parallel_size": ranks} if ranks > 1 else {},
            ),
            role,
            kind,
            transfer_report=str(report),
        )
        for kind in kinds
        for role, ranks in roles
    ]
    with start_engines(specs, logs=tmp_path, forge=forge) as engines:
        fleet = Fleet.of(engines)
        alone = fleet.engines["ferry-decode"]
        for number, length in enumerate(cell.lengths):
            prompt = prompt_of(number, length)
            want = alone.generate(prompt, max_tokens=ANSWER, request_id=f"alone{number}").tokens
            served = {}
            for first, second in (("ferry", "ferry"), ("ferry", "upstream"), ("upstream", "ferry")):
                pair = fleet.pair(f"{first}-prefill", f"{second}-decode")
                got = pair.generate(prompt, max_tokens=ANSWER, name=f"{first}-{second}-{number}")
                if recipe.has_state and first == "upstream":
                    assert got.decode.finish_reason == "error"
                else:
                    served[f"{first}>{second}"] = got
            if recipe.exact:
                assert {way: one.decode.tokens for way, one in served.items()} == dict.fromkeys(served, want), length
            else:
                check_likeness([fleet.engines["ferry-prefill"], alone], prompt, served)
            transfers = {way: reported(report, one.transfer_id, way) for way, one in served.items()}
            check_pages(transfers, one_token=False)
            copies = recipe is DEEPSEEK_V2  # each rank has all of it: one is enough to send
            assert len(transfers["ferry>ferry"].sent) == (decode_ranks if copies else max(prefill_ranks, decode_ranks))


def test_prefixes_that_the_decode_engine_has_are_not_moved_again(
    tmp_path: Path, model_folder: Path, forge: EngineForge
) -> None:
    """A prompt, a longer one with the same beginning, and the first one again, of which nothing is missing."""
    model = build_model(QWEN3, model_folder)
    report = tmp_path / "transfers.jsonl"
    kinds: tuple[Kind, ...] = ("ferry", "upstream")
    roles: tuple[Role, ...] = ("prefill", "decode")
    specs = [
        member(
            msgspec.structs.replace(Cell(QWEN3).spec(model, f"{kind}-{role}", 64), prefix_caching=True),
            role,
            kind,
            transfer_report=str(report),
        )
        for kind in kinds
        for role in roles
    ]
    with start_engines(specs, logs=tmp_path, forge=forge) as engines:
        fleet = Fleet.of(engines)
        free = {engine.spec.name: engine.inspect().free_blocks for engine in engines}
        base = token_ids("some of this text is at the decode engine already, the rest of it is at the other; " * 20)
        prompts = [base[:length] for length in (320, 577, 320, 640)]
        alone = fleet.engines["ferry-decode"]
        want = [
            alone.generate(prompt, max_tokens=ANSWER, request_id=f"alone{number}").tokens
            for number, prompt in enumerate(prompts)
        ]
        moved: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
        for first, second in (("ferry", "ferry"), ("ferry", "upstream"), ("upstream", "ferry")):
            for engine in engines:
                forget_prefixes(engine)
            way, pair = f"{first}>{second}", fleet.pair(f"{first}-prefill", f"{second}-decode")
            moved[way] = []
            for number, prompt in enumerate(prompts):
                got = pair.generate(prompt, max_tokens=ANSWER, name=f"{first}-{second}-{number}")
                assert got.decode.tokens == want[number], (way, number)
                found = reported(report, got.transfer_id, way)
                assert first == "upstream" or not found.nbytes or found.sent == found.landed, (way, number)
                start = max(line.start for line in (*found.producer, *found.consumer))
                moved[way].append((start, found.landed))
            # All but its last token is there: ours computes that one and tells the producer, theirs fetches it.
            full = pair.generate(base[:577], max_tokens=ANSWER, name=f"{first}-{second}-full")
            assert full.decode.tokens == want[1]
            landed = wait_for_report(report, full.transfer_id, lambda found: found.consumer, timeout=1).landed
            assert len(landed) == (second == "upstream"), way
        assert moved == dict.fromkeys(moved, moved["ferry>ferry"])
        starts = [start for start, _ in moved["ferry>ferry"]]
        assert starts[0] == 0
        assert starts[1] in (256, 320)
        for engine in engines:
            engine.wait_for_free_blocks(free[engine.spec.name], timeout=15)


def forget_prefixes(engine: Engine) -> None:
    """vLLM does it when no block is in use."""
    deadline = time.monotonic() + 15
    while not engine.reset_prefix_cache():
        assert time.monotonic() < deadline, f"blocks of {engine.spec.name} stay held"
        time.sleep(0.02)
