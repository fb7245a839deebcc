"""A fleet of ``vllm serve`` that moves from vLLM's own connector to kvferry, one process at a time, under load.

Two prefill and two decode engines stand behind ``kvferry serve-router``. They are replaced prefill, decode, prefill,
decode, so that on the way every pairing of the two connectors serves requests:

=====================  ==================================
replaced so far        pairings in service
=====================  ==================================
none                   upstream to upstream
a prefill engine       and kvferry to upstream
a decode engine        and both others
the other prefill      kvferry to upstream and to kvferry
the other decode       kvferry to kvferry
=====================  ==================================

A restart of ``vllm serve`` takes a minute and more; with a forge (:mod:`kvferry.testing.engine_forge`) the same
processes are forked from one that has imported vLLM, in seconds.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.mixed_load import Ask, Reference, forget_caches, plan_load, take_references
from kvferry.testing.rolling import ARGUMENTS, Place, Rolled, SteadyLoad, judge, roll
from kvferry.testing.serve import (
    SERVED_NAME,
    START_TIMEOUT_S,
    Connector,
    Role,
    ServeSpec,
    reporting,
    serve_router_over,
)

ORDER: Final[tuple[tuple[Role, int], ...]] = (("prefill", 0), ("decode", 0), ("prefill", 1), ("decode", 1))

UNFETCHED_S: Final = 30
"""How long a prompt waits for a decode engine that never comes, under either connector."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """How it is done."""

    model: Path
    folder: Path
    """For logs, the report and debug sockets."""
    clients: int = 6
    prompts: int = 40
    answers: int = 20
    """Between two replacements, at the least; the engine that has come last sees as many requests."""
    longest: int = 900
    seed: int = 1
    drain: int = 0
    """vLLM's ``--shutdown-timeout``: for so long a process that was told to stop goes on with what it has begun. By
    default it ends all at once."""
    forge: EngineForge | None = None

    @property
    def report(self) -> Path:
        """Of transfers."""
        return self.folder / "transfers.jsonl"

    @property
    def debug(self) -> Path:
        """The folder of debug sockets."""
        return self.folder / "debug"

    def spec(self, role: Role, number: int, connector: Connector) -> ServeSpec:
        """One process."""
        options = {
            "debug_socket_dir": str(self.debug),
            "publish_timeout": float(UNFETCHED_S),
        }
        return ServeSpec(
            f"{role}-{number}-{connector}",
            role,
            self.model,
            self.folder,
            connector=connector,
            arguments=(
                *("--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "8"),
                *("--num-gpu-blocks-override", "300", "--shutdown-timeout", str(self.drain), *ARGUMENTS),
            ),
            options={**(options if connector == "ferry" else {}), **reporting(connector, self.folder)},
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(UNFETCHED_S),
            },
        )


def upgrade(how: Upgrade) -> Rolled:
    """Start the fleet, put it under load, replace all of it, and judge."""
    places = [Place(how.spec(role, number, "upstream"), how.forge) for role, number in ORDER]
    with ExitStack() as stack:
        for place in places:
            place.begin()
            stack.callback(place.stop)
        for place in places:  # run first at the end: all shut down side by side
            stack.callback(place.begin_stop)
        for place in places:
            place.now.server.wait_healthy(START_TIMEOUT_S)
        asks = plan_load(how.prompts, seed=how.seed, longest=how.longest)
        references = _references(places, asks, how)
        router = stack.enter_context(
            serve_router_over(
                [(place.url, place.bootstrap) for place in places if place.role == "prefill"],
                [place.url for place in places if place.role == "decode"],
                log=how.folder / "router.log",
                # Engines that start leave a small machine no time: what listens may yet be slow to accept.
                arguments=("--cooldown", "0.5", "--longest-cooldown", "2", "--connect-timeout", "30"),
            )
        )
        load = stack.enter_context(SteadyLoad(router, asks, model=SERVED_NAME, clients=how.clients))
        roll(places, [how.spec(role, number, "ferry") for role, number in ORDER], load, answers=how.answers)
        return judge(load.end(), places, references, report=how.report, debug=how.debug)


def _references(places: Sequence[Place], asks: Sequence[Ask], how: Upgrade) -> dict[str, Reference]:
    """Of one engine alone."""
    whole = [replace(ask, leaves_after=None, leaves_at=None) for ask in asks]
    url = places[0].url
    return asyncio.run(
        take_references(url, whole, model=SERVED_NAME, concurrency=how.clients, forget=lambda: forget_caches([url]))
    )
