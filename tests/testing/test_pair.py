"""A control: the harness must see a transfer that reports success and is wrong.

vLLM's own MooncakeConnector (0.32) pairs blocks by count. With a prefill block of 128 tokens and a decode block of 768
over one kernel block size it reports success and the decode engine reads the wrong pages. It is the fault that the
demo's dense cell would have; the same comparison must find it here.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.testing.comparison import judge, take_references
from kvferry.testing.demo_vllm import demo_prompts
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.pair import UPSTREAM, Pair, pair_spec

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def upstream_pair(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, forge: EngineForge
) -> Iterator[tuple[Pair, Engine]]:
    def spec_of(name: str, block: int, count: int) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=str(build_model(QWEN3, model_folder)),
            block_size=block,
            kernel_block=32,
            num_blocks=count,
            max_model_len=1536,
        )

    spec = pair_spec(
        spec_of("prefill", 128, 32),
        spec_of("decode", 768, 8),
        connector=UPSTREAM,
        options={"mooncake_protocol": "tcp"},
    )
    specs = [spec.prefill, spec.decode, spec_of("single", 128, 32)]
    with start_engines(specs, logs=tmp_path_factory.mktemp("upstream"), forge=forge) as (prefill, decode, single):
        yield Pair(spec, prefill, decode), single


@pytest.mark.parametrize("exact", [True, False], ids=["tokens", "logprobs"])
def test_a_wrong_page_is_seen(upstream_pair: tuple[Pair, Engine], exact: bool) -> None:
    pair, single = upstream_pair
    prompts = demo_prompts("control")[1:3]
    for reference in take_references(single, prompts):
        name = f"{reference.prompt.name}-{exact}"
        served = pair.generate(reference.prompt.tokens, max_tokens=16, name=name)
        assert served.decode.cached_tokens == len(reference.prompt.tokens)  # the connector said that all was well
        verdict = judge(reference, served.decode, single=single, exact=exact)
        assert not verdict.equal
        assert verdict.how == ("tokens" if exact else "logprobs")
