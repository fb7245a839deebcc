"""Memory with a layout, filled from a seed, for the tests of two processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from kvferry.control import Networks, Secret
from kvferry.ids import EngineId, Incarnation
from kvferry.layout import Group, Layout, bind_layout
from kvferry.runtime import Bootstrap, Local, RuntimeOptions, Timing
from kvferry.runtime.options import UpstreamPeers
from kvferry.testing.layouts import page, side_by_side, state, worker
from kvferry.transport import CmaTransport, MooncakeTransport, Transport

BLOCK = 16
LAYERS = 4
Kind = Literal["small", "large"]

_SIZES: dict[Kind, tuple[int, int]] = {"small": (64, 64), "large": (512, 2048)}
"""Blocks, and bytes of one row of one head."""


@dataclass
class World:
    """The memory of one side."""

    layout: Layout
    bytes: np.ndarray
    blocks: int
    row: int
    heads: int = 2

    @classmethod
    def build(cls, kind: Kind, *, seed: int | None = None, heads: int = 2) -> "World":
        """Two heads, four attention layers and one state layer; zeros, or what the seed gives."""
        blocks, row = _SIZES[kind]
        layers = [
            page(f"l{index}", heads=(0, heads, heads), tokens=BLOCK, nbytes=row, num_blocks=blocks)
            for index in range(LAYERS)
        ]
        layers.append(state("l9", part=(0, 4, 4), nbytes=row, num_blocks=blocks, group=1))
        layout = worker(side_by_side(layers, base=0), groups=[Group("attention", BLOCK), Group("state", 1 << 20)])
        nbytes = layout.regions[0].nbytes
        content = np.zeros(nbytes, np.uint8) if seed is None else pattern(nbytes, seed)
        moved = [msgspec.structs.replace(one, address=one.address + content.ctypes.data) for one in layout.components]
        region = msgspec.structs.replace(layout.regions[0], address=content.ctypes.data)
        return cls(
            msgspec.structs.replace(layout, components=tuple(moved), regions=(region,)), content, blocks, row, heads
        )

    def page(self, layer: int, block: int) -> np.ndarray:
        """One block of one attention layer."""
        size = self.heads * BLOCK * self.row
        start = (layer * self.blocks + block) * size
        return self.bytes[start : start + size]

    def state(self, block: int) -> np.ndarray:
        """One block of the state layer."""
        start = LAYERS * self.blocks * self.heads * BLOCK * self.row + block * 4 * self.row
        return self.bytes[start : start + 4 * self.row]


def pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)


def local_side(world: World, *, engine: str, epoch: str) -> Local:
    bound = bind_layout(world.layout)
    return Local(Incarnation(EngineId(engine), epoch), "model", 0, bound.binding, (bound.placement,), 1, 1)


def options_for(
    transport: str,
    *,
    bootstrap: Bootstrap | None = None,
    report: str | None = None,
    debug_dir: str | None = None,
    security: Mapping[str, Any] | None = None,
) -> RuntimeOptions:
    def make() -> Transport:
        return CmaTransport() if transport == "cma" else MooncakeTransport("127.0.0.1")

    return RuntimeOptions(
        host="127.0.0.1",
        make_transport=make,
        bootstrap=bootstrap,
        report=report,
        timing=Timing(resolve=2.0),
        debug_dir=debug_dir,
        **security_of(security or {}),
    )


def security_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options from what another process can be told in JSON: secret, upstream (networks), targets, ca."""
    made: dict[str, Any] = {"bootstrap_ca": given.get("ca")}
    if "secret" in given:
        made["secret"] = Secret.of(given["secret"].encode(), source="test")
    if "upstream" in given:
        made["upstream_peers"] = UpstreamPeers.parse(tuple(given["upstream"]))
    if "targets" in given:
        made["write_targets"] = Networks.parse(given["targets"], option="write_targets")
    return made
