"""A pair of real engines between which one write takes a second or more, and how to see that it is under way.

The caches of the two differ inside a page: the prefill engine's kernel block is 32 tokens, the decode engine's 128, and
both keep keys column by column. So keys go over in runs of 32 numbers, tens of thousands of them for a long prompt, and
the Mooncake engine takes some ten thousand a second. Whether a write is under way the producer itself says, by its
debug socket.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.ids import TransferId
from kvferry.runtime.stories import Answer, Event, ask_stories
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import Engine, start_engines
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model, token_ids
from kvferry.testing.pair import Pair, pair_spec

PROMPT = token_ids("long enough that its cache is still on its way when somebody thinks better of it; " * 25)[:1900]
"""Of 15 blocks, so more than the quarter of a consumer's that may wait to be proven quiet before it acts on doubt."""
BLOCK = 128
TOKENS = 4


@dataclass(frozen=True)
class Slow:
    """The pair, with every block at home."""

    pair: Pair
    debug: str
    homes: tuple[int, int]

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.pair.prefill, self.pair.decode

    def stories(self, transfer: str, side: str) -> list[Answer]:
        """What that side's ranks tell of a transfer."""
        return [one for one in ask_stories(self.debug, TransferId(transfer)) if one.side == side]

    def wait_until_writing(self, transfer: str) -> None:
        """Until a write is under way in every rank of the producer."""

        def moving() -> bool:
            found = self.stories(transfer, "producer")
            return bool(found) and all(is_writing(one.events) for one in found)

        wait_until(moving, seconds=60)

    def wait_until_pulling(self, transfer: str) -> None:
        """Until the decode engine has asked for it."""

        def asked() -> bool:
            events = [event for one in self.stories(transfer, "consumer") for event in one.events]
            return any("SendPull" in action for event in events for action in event.actions)

        wait_until(asked, seconds=60)

    def settle(self) -> None:
        """Every block is back, and nothing is left of any request."""
        for engine, home in zip(self.engines, self.homes, strict=True):
            facts = engine.wait_for_free_blocks(home, timeout=15)
            assert (facts.free_blocks, facts.held) == (home, 0), engine.spec.name


def is_writing(events: tuple[Event, ...]) -> bool:
    """Whether a write has begun, and has not ended in any way."""
    begun = any("StartWrite" in event.actions for event in events)
    return begun and not any(event.event in ("WriteDone", "WriteFailed", "Quieted") for event in events)


def wait_until(holds: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)


@contextmanager
def slow_pair(folder: Path, *, models: Path, forge: EngineForge, tp: int = 1) -> Iterator[Slow]:
    """Start it; the prefill engine computes prompts in chunks."""
    debug = str(folder / "debug")

    def spec_of(name: str, kernel_block: int | None) -> EngineSpec:
        return EngineSpec(
            name=name, model=str(build_model(QWEN3, models)), dtype=QWEN3.dtype, block_size=BLOCK,
            kernel_block=kernel_block, num_blocks=48, max_model_len=2048, max_batched_tokens=256,
            engine_args={"tensor_parallel_size": tp},
        )  # fmt: skip

    options = {"transport": "mooncake", "debug_socket_dir": debug}
    spec = pair_spec(spec_of("prefill", 32), spec_of("decode", None), options=options)
    with start_engines([spec.prefill, spec.decode], logs=folder, forge=forge) as (prefill, decode):
        homes = prefill.inspect().free_blocks, decode.inspect().free_blocks
        yield Slow(Pair(spec, prefill, decode), debug, homes)
