"""A layout written without starting an engine is the layout that a live worker writes."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.errors import ConfigError, ConfigReason
from kvferry.layout import Layout, Parallel, bind_layout, parse_layout
from kvferry.testing.commands import call
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import start_engines
from kvferry.testing.layouts import page, side_by_side, worker
from kvferry.testing.model_recipes import MODELS
from kvferry.testing.models import build_model
from kvferry.vllm.layout_file import write_layout

SHARED = {"max_num_batched_tokens": 2048, "max_num_seqs": 16, "enable_prefix_caching": False}
BLOCK, NUM_BLOCKS, LENGTH = 128, 40, 512
DEADLINE_S = 300


class Dump:
    """``kvferry layout dump`` in a process of its own, under way."""

    def __init__(self, model: str, config: Path, out: Path, *, tp: int, kernel_block: int | None) -> None:
        words = {
            "--model": config,
            "--out": out,
            "--tp": tp,
            "--dtype": MODELS[model].dtype,
            "--block-size": BLOCK,
            "--num-blocks": NUM_BLOCKS,
            "--max-model-len": LENGTH,
            "--engine-args": json.dumps(SHARED),
        }
        if kernel_block is not None:
            words["--kernel-block"] = kernel_block
        command = [sys.executable, "-m", "kvferry.cli", "layout", "dump"]
        command += [str(word) for option in words.items() for word in option]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def layouts(self) -> list[Layout]:
        """Of the files that the command names."""
        try:
            out, err = self._process.communicate(timeout=DEADLINE_S)
        finally:
            self._process.kill()
        assert self._process.returncode == 0, err
        return [parse_layout(Path(line).read_bytes()) for line in out.splitlines()]


def live_layouts(spec: EngineSpec, logs: Path, forge: EngineForge) -> list[Layout]:
    """What a real engine's workers write for the option ``layout_dump``."""
    with start_engines([spec], logs=logs, forge=forge):
        pass
    return [parse_layout(path.read_bytes()) for path in sorted(logs.glob("live-*.json"))]


def engine_of(model: str, folder: Path, logs: Path, *, tp: int, kernel_block: int | None) -> EngineSpec:
    tiny = MODELS[model]
    return EngineSpec(
        name=model,
        model=str(folder),
        dtype=tiny.dtype,
        custom_ops=tiny.custom_ops,
        block_size=BLOCK,
        kernel_block=kernel_block,
        num_blocks=NUM_BLOCKS,
        max_model_len=LENGTH,
        engine_args={"tensor_parallel_size": tp},
        kv_transfer={
            "kv_connector": "FerryConnector",
            "kv_connector_module_path": "kvferry.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"layout_dump": str(logs / "live-{rank}.json"), "transport": "cma"},
        },
    )


def without_addresses(layout: Layout) -> list[object]:
    """Everything that two processes can agree on."""
    (region,) = layout.regions
    parts = [msgspec.structs.replace(c, address=c.address - region.address) for c in layout.components]
    return [layout.parallel, region.nbytes, region.memory, layout.groups, parts]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("model", "tp", "kernel_block"),
    [("qwen3", 1, 32), ("lfm2", 1, 32), ("lfm2", 2, None)],
    ids=["qwen3", "lfm2", "lfm2-tp2"],
)
def test_a_dump_is_what_live_workers_write(
    model: str, tp: int, kernel_block: int | None, model_folder: Path, tmp_path: Path, forge: EngineForge
) -> None:
    folder = build_model(MODELS[model], model_folder)
    dump = Dump(model, folder / "config.json", tmp_path / "dump", tp=tp, kernel_block=kernel_block)
    live = live_layouts(engine_of(model, folder, tmp_path, tp=tp, kernel_block=kernel_block), tmp_path, forge)
    dumped = dump.layouts()
    assert len(live) == len(dumped) == tp
    assert [without_addresses(a) for a in dumped] == [without_addresses(b) for b in live]
    fingerprints = [[bind_layout(one).placement.fingerprint for one in side] for side in (dumped, live)]
    assert fingerprints[0] == fingerprints[1]
    assert len({one.parallel.tp_rank for one in dumped}) == tp
    if kernel_block is not None:
        assert {c.pages for c in dumped[0].components} == {1, BLOCK // kernel_block} - (
            {1} if model == "qwen3" else set()
        )


class TestCommand:
    """``kvferry layout dump`` where nothing is started."""

    @pytest.mark.parametrize(
        ("options", "reason", "said"),
        [
            (["--model", "/no/such/folder"], "invalid-value", "/no/such/folder"),
            (["--model", "m", "--engine-args", "[]"], "invalid-value", "--engine-args"),
            (["--model", "m", "--speculative", "{"], "invalid-value", "--speculative"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options: list[str], reason: str, said: str, tmp_path: Path) -> None:
        answer = call(["layout", "dump", "--out", str(tmp_path / "out"), *options])
        assert answer.out == ""
        assert answer.refusal["reason"] == reason
        assert said in answer.refusal["message"]
        assert not (tmp_path / "out").exists()

    def test_without_vllm_it_says_so(self, tmp_path: Path) -> None:
        code = (
            "import sys; sys.modules['vllm'] = None; from kvferry.cli.main import main;"
            f"main(['layout', 'dump', '--model', {str(tmp_path)!r}, '--out', {str(tmp_path / 'out')!r}])"
        )
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert answer.returncode == 2
        assert json.loads(answer.stderr)["error"]["reason"] == "missing-dependency"

    def test_other_commands_do_not_import_it(self) -> None:
        code = "import sys, kvferry.cli.layout; print(sorted({'vllm', 'torch'} & set(sys.modules)))"
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert answer.stdout.strip() == "[]"


def one_page(**changes: object) -> Layout:
    return msgspec.structs.replace(worker([page("l0", tokens=16, nbytes=64)]), **changes)


class TestLayoutFile:
    """The connector's option ``layout_dump``."""

    def test_rank_and_engine_are_put_into_the_path(self, tmp_path: Path) -> None:
        layout = msgspec.structs.replace(
            worker([page("l0", tokens=16, nbytes=64)]), engine_id="e1", parallel=Parallel(1, 2, 1, 2, 0, 1)
        )
        path = write_layout(str(tmp_path / "new" / "{engine}-{rank}.json"), layout)
        assert path == tmp_path / "new" / "e1-3.json"
        assert parse_layout(path.read_bytes()) == layout
        assert list(path.parent.iterdir()) == [path]

    def test_several_ranks_need_several_files(self, tmp_path: Path) -> None:
        layout = msgspec.structs.replace(
            worker([page("l0", tokens=16, nbytes=64)]), parallel=Parallel(0, 2, 0, 1, 0, 1)
        )
        with pytest.raises(ConfigError, match=r"\{rank\}") as refused:
            write_layout(str(tmp_path / "one.json"), layout)
        assert refused.value.reason is ConfigReason.INVALID_VALUE

    def test_an_unwritable_path_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"file.*cannot be written"):
            write_layout(str(tmp_path / "file" / "rank.json"), one_page())


class TestRanks:
    """vLLM's parallel state without peers."""

    def test_every_rank_stands_where_vllm_would_put_it(self) -> None:
        from vllm.config import ParallelConfig, VllmConfig
        from vllm.distributed import parallel_state

        from kvferry.vllm.solitude import as_rank

        sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "decode_context_parallel_size": 2}
        config = VllmConfig(parallel_config=ParallelConfig(distributed_executor_backend="mp", **sizes))
        found = []
        for rank in range(6):
            with as_rank(config, rank):
                groups = parallel_state.get_tp_group(), parallel_state.get_pp_group(), parallel_state.get_dcp_group()
                found.append(tuple((g.rank_in_group, g.world_size) for g in groups))
        assert found == [((rank % 2, 2), (rank // 2, 3), (rank % 2, 2)) for rank in range(6)]
        assert not parallel_state.model_parallel_is_initialized()

    def test_a_moved_layout_keeps_its_placement(self) -> None:
        from kvferry.vllm.dump import moved

        pages = [page(name, tokens=16, nbytes=64) for name in ("l0", "l1")]
        layout = worker(side_by_side(pages, base=1 << 33, gap=4096))
        there = moved(layout, 1 << 40)
        assert there.regions[0].address == 1 << 40
        assert bind_layout(there).placement.fingerprint == bind_layout(layout).placement.fingerprint
        assert without_addresses(there) == without_addresses(layout)
