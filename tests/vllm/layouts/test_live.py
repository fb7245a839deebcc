"""Layouts of real engines: vLLM writes known keys, values and states, and they are read at the layout's addresses."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvferry.layout import Component, Layout, parse_layout

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Dump:
    """What one engine's probe left behind."""

    layout: Layout
    memory: np.ndarray
    written: dict[str, np.ndarray]

    def component(self, layer: str, name: str) -> Component:
        (found,) = [c for c in self.layout.components if c.key == (layer, name)]
        return found

    def read(self, component: Component, block: int, kernel_block: int, **at: int) -> bytes:
        """Content at one place, by the file form's formula."""
        (region,) = self.layout.regions
        address = component.address + block * component.block_stride + kernel_block * component.page_stride
        address += sum((at[axis.name] - axis.start) * axis.stride for axis in component.axes) - region.address
        return self.memory[address : address + component.content.nbytes].tobytes()

    def position(self, component: Component, position: int) -> dict[str, int]:
        """Where the ``position``-th token of the written blocks is."""
        tokens = self.layout.groups[component.group].block_tokens
        kernel_tokens = tokens // component.pages
        block = int(self.written[f"{component.layer}|blocks"][position // tokens])
        inside = position % tokens
        row = inside % kernel_tokens // component.row_tokens
        return {"block": block, "kernel_block": inside // kernel_tokens, "token": row}


def dump_of(model: str, folder: Path, **engine: object) -> Dump:
    """As :func:`dumps_of`, of an engine of one rank."""
    (dump,) = dumps_of(model, folder, **engine)
    return dump


def dumps_of(model: str, folder: Path, *, ranks: int = 1, **engine: object) -> list[Dump]:
    """Start a real engine with the probe, stop it, load what each rank left."""
    from kvferry.testing.engine_wire import EngineSpec
    from kvferry.testing.engines import start_engines
    from kvferry.testing.model_recipes import MODELS
    from kvferry.testing.models import build_model

    tiny = MODELS[model]
    spec = EngineSpec(
        name=model,
        model=str(build_model(tiny, folder)),
        dtype=tiny.dtype,
        custom_ops=tiny.custom_ops,
        num_blocks=40,
        engine_args={"tensor_parallel_size": ranks},
        max_model_len=512,
        kv_transfer={
            "kv_connector": "Probe",
            "kv_connector_module_path": "probe",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"folder": str(folder)},
        },
        environment={"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
        **engine,  # type: ignore[arg-type]
    )
    with start_engines([spec], logs=folder):
        pass
    for rank in range(ranks):  # the engine's own tensors, read as those of a device would be
        assert int((folder / f"rows-{rank}.txt").read_text()) > 0
    return [
        Dump(
            parse_layout((folder / f"layout-{rank}.json").read_bytes()),
            np.fromfile(folder / f"memory-{rank}.bin", dtype=np.uint8),
            dict(np.load(folder / f"written-{rank}.npz")),
        )
        for rank in range(ranks)
    ]


def check_keys_and_values(dump: Dump, layer: str) -> None:
    """Every byte of every written key and value is where the layout says."""
    key, value = dump.component(layer, "k"), dump.component(layer, "v")
    keys, values = dump.written[f"{layer}|k"], dump.written[f"{layer}|v"]
    (dims,) = [axis.count for axis in key.axes if axis.name == "dim"]
    (first,) = [axis.start for axis in key.axes if axis.name == "head"]
    for position, local in np.ndindex(*keys.shape[:2]):
        place, head = dump.position(key, position), first + local
        found = b"".join(dump.read(key, head=head, dim=d, **place) for d in range(dims))
        assert found == keys[position, local].tobytes(), (layer, position, head)
        assert dump.read(value, head=head, **place) == values[position, local].tobytes(), (layer, position, head)


def check_state(dump: Dump, layer: str, place: int, sections: dict[str, int]) -> None:
    """A convolution state ``(tap, channel)``, section by section."""
    state = dump.written[f"{layer}|{place}"]
    for number, block in enumerate(dump.written[f"{layer}|blocks"]):
        first = 0
        for name, channels in sections.items():
            part = dump.component(layer, name)
            size = part.content.nbytes
            (start,) = [axis.start for axis in part.axes if axis.name == "channel"]
            for tap, channel in np.ndindex(state.shape[1], channels):
                expected = state[number, tap, (first + channel) * size : (first + channel + 1) * size].tobytes()
                assert dump.read(part, int(block), 0, channel=start + channel, tap=tap) == expected
            first += channels
        assert first * size == state.shape[2]


@pytest.mark.parametrize("kernel_block", [None, 32])
def test_grouped_heads_with_and_without_a_kernel_split(kernel_block: int | None, tmp_path: Path) -> None:
    dump = dump_of("qwen3", tmp_path, block_size=96, kernel_block=kernel_block)
    assert [(g.kind, g.block_tokens, g.sliding_window) for g in dump.layout.groups] == [("attention", 96, None)]
    layers = {c.layer for c in dump.layout.components}
    assert len(layers) == 4
    assert {c.pages for c in dump.layout.components} == {1 if kernel_block is None else 3}
    assert {c.num_blocks for c in dump.layout.components} == {40}
    for layer in layers:
        check_keys_and_values(dump, layer)


def test_short_convolution_beside_split_attention(tmp_path: Path) -> None:
    dump = dump_of("lfm2", tmp_path, block_size=128, kernel_block=32)
    assert sorted(g.kind for g in dump.layout.groups) == ["attention", "state"]
    state = [c for c in dump.layout.components if dump.layout.groups[c.group].kind == "state"]
    assert [c.component for c in state] == ["conv", "conv"]
    assert {c.live_bytes for c in state} == {1024}
    assert {c.block_stride for c in state} == {65536}
    for part in state:
        check_state(dump, part.layer, 0, {"conv": 128})
    for layer in {c.layer for c in dump.layout.components if c.component == "k"}:
        check_keys_and_values(dump, layer)


def test_sliding_windows_are_groups_of_their_own(tmp_path: Path) -> None:
    dump = dump_of("gemma3", tmp_path, block_size=32)
    assert {g.sliding_window for g in dump.layout.groups} == {None, 95}
    for layer in {c.layer for c in dump.layout.components}:
        check_keys_and_values(dump, layer)


def test_mla_rows(tmp_path: Path) -> None:
    dump = dump_of("deepseek_v2", tmp_path, block_size=16)
    assert {c.content.type for c in dump.layout.components} == {"float32:k576"}
    assert {(a.start, a.count, a.total) for c in dump.layout.components for a in c.axes if a.name == "head"} == {
        (0, 1, 1)
    }
    for part in dump.layout.components:
        rows = dump.written[f"{part.layer}|kv"]
        for position in range(len(rows)):
            assert dump.read(part, head=0, **dump.position(part, position)) == rows[position, 0].tobytes()


def test_gated_delta_net_sections(tmp_path: Path) -> None:
    dump = dump_of("qwen3_next", tmp_path, block_size=64)
    layers = {c.layer for c in dump.layout.components if c.component == "ssm"}
    assert len(layers) == 2
    for layer in layers:
        check_state(dump, layer, 0, {"conv.q": 256, "conv.k": 256, "conv.v": 512})
        ssm = dump.written[f"{layer}|1"]
        for number, block in enumerate(dump.written[f"{layer}|blocks"]):
            for head in range(4):
                assert dump.read(dump.component(layer, "ssm"), int(block), 0, head=head) == ssm[number, head].tobytes()
    for layer in {c.layer for c in dump.layout.components if c.component == "k"}:
        check_keys_and_values(dump, layer)


def test_two_ranks_hold_the_two_halves(tmp_path: Path) -> None:
    dumps = dumps_of("lfm2", tmp_path, ranks=2, block_size=64)
    for rank, dump in enumerate(dumps):
        held = {(a.name, a.start, a.count, a.total) for c in dump.layout.components for a in c.axes}
        assert {a for a in held if a[0] in ("head", "channel")} == {
            ("head", rank, 1, 2),
            ("channel", 64 * rank, 64, 128),
        }
        for part in dump.layout.components:
            if part.component == "conv":
                check_state(dump, part.layer, 0, {"conv": 64})
            elif part.component == "k":
                check_keys_and_values(dump, part.layer)
