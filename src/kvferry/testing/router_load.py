"""Served engines for a mixed load through a router: ``scripts/load_routers.py`` and its test.

``vllm serve`` processes (a tiny model in float32, Mooncake over TCP) of either connector, each way from one of them to
another that a load can take, and what a load must know of the two engines at its ends. What is asked, compared and
audited: :mod:`kvferry.testing.mixed_load`.

``vllm-router`` never tells a producer that nobody comes for a prompt, and neither router can tell vLLM's own connector;
so what clients leave behind is freed when it expires, soon here.
"""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from kvferry.runtime.report import Side
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.mixed_load import Ask, Ends, Reference, forget_caches, take_references
from kvferry.testing.serve import (
    SERVED_NAME,
    Connector,
    Role,
    Served,
    ServedPair,
    ServeSpec,
    reporting,
    serve_engines,
)

REQUESTS: Final = 200
CONCURRENCY: Final = 16
UNFETCHED_S: Final = 30
"""How long a prompt waits for its decode engine: longer than any here does."""

PATIENT: Final = ("--connect-timeout", "30")
"""Of kvferry's router: what listens may be slow to accept on a machine that four servers share."""

Way = tuple[Connector, Connector]
"""The connectors of a prefill and of a decode engine."""

WAYS: Final[Mapping[str, Way]] = {
    "kvferry": ("ferry", "ferry"),
    "from-upstream": ("upstream", "ferry"),
    "to-upstream": ("ferry", "upstream"),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running engines, and the folder where they write down what they do."""

    folder: Path
    engines: Mapping[tuple[Role, Connector], Served]

    def pair(self, way: Way) -> ServedPair:
        """The two engines at the ends of a way."""
        return ServedPair.of(self.engines["prefill", way[0]], self.engines["decode", way[1]])

    def ends(self, way: Way) -> Ends:
        """The same for who audits a load that goes this way."""
        pair = self.pair(way)
        sides: tuple[Side, Side] = ("producer", "consumer")
        ours = frozenset(side for side, connector in zip(sides, way, strict=True) if connector == "ferry")
        return Ends(
            pair.prefill.url,
            pair.decode.url,
            self.folder / "transfers.jsonl",
            self.folder / "debug",
            SERVED_NAME,
            told_by=ours | {"consumer"},
            ours=ours,
        )


def spec_of(role: Role, connector: Connector, model: Path, folder: Path) -> ServeSpec:
    """One engine, with so few blocks that sixteen long prompts do not fit at once."""
    options = {
        "debug_socket_dir": str(folder / "debug"),
        "publish_timeout": float(UNFETCHED_S),
        "silence_timeout": 30.0,  # four servers on two cores: a peer that has no time for some seconds is not dead
    }
    return ServeSpec(
        f"{role}-{connector}",
        role,
        model,
        folder,
        connector=connector,
        arguments=(
            *("--max-model-len", "2304", "--block-size", "32", "--max-num-seqs", "16"),
            *("--num-gpu-blocks-override", "600"),
        ),
        options={**(options if connector == "ferry" else {}), **reporting(connector, folder)},
        environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(UNFETCHED_S)},
    )


@contextmanager
def serve_fleet(
    ways: Collection[Way], model: Path, folder: Path, *, forge: EngineForge | None = None
) -> Iterator[Fleet]:
    """Start what these ways need, each engine once, and stop it at the end."""
    roles: tuple[Role, ...] = get_args(Role)
    needed = sorted({one for way in ways for one in zip(roles, way, strict=True)})
    specs = [spec_of(role, connector, model, folder) for role, connector in needed]
    with serve_engines(specs, forge=forge) as served:
        yield Fleet(folder, dict(zip(needed, served, strict=True)))


def references_of(prefill: str, asks: Sequence[Ask], *, concurrency: int = CONCURRENCY) -> dict[str, Reference]:
    """What the prefill engine at this address answers by itself."""
    return asyncio.run(
        take_references(
            prefill, asks, model=SERVED_NAME, concurrency=concurrency, forget=lambda: forget_caches([prefill])
        )
    )
