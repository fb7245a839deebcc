"""The demo with real vLLM: a prefill and a decode engine joined by kvferry, against one engine that does both.

For each cell (a tiny model and the block sizes of both sides) three engines start together. The single one answers
first: every prompt alone, then all at once. Then the pair answers: some prompts one after the other, the rest at once,
and at the end a prompt that was asked before, so that the decode side finds its beginning in its own prefix cache.
Each answer is compared (:mod:`kvferry.testing.comparison`), each transfer is proven by digests from both ends
(:mod:`kvferry.testing.transfer_report`), and at the end every block must be back in both pools.
"""

import random
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from kvferry.testing.comparison import Prompt, Reference, Verdict, judge, take_references
from kvferry.testing.demo_view import Advance, DemoView, Row
from kvferry.testing.engine_forge import EngineForge
from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import EngineError, start_engines, warm_forge
from kvferry.testing.model_recipes import LFM2, QWEN3, TinyModel
from kvferry.testing.models import build_model
from kvferry.testing.pair import Pair, Served, pair_spec, report_options
from kvferry.testing.transfer_report import Transfer, wait_for_reports

REPORT_TIMEOUT_S: Final = 15.0
BLOCKS_TIMEOUT_S: Final = 15.0
MAX_MODEL_LEN: Final = 2048


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one side: logical, of the attention kernel, and how many logical ones there are."""

    logical: int
    kernel: int
    count: int


@dataclass(frozen=True, slots=True)
class DemoCell:
    """One model and the block sizes of both sides."""

    model: TinyModel
    prefill: Blocks
    decode: Blocks
    prefix_caching: bool
    """On the decode side: whether a repeated prompt is found there."""
    title: str


CELLS: Final = {
    "dense": DemoCell(
        model=QWEN3,
        prefill=Blocks(128, 32, 64),
        decode=Blocks(768, 32, 16),
        prefix_caching=True,
        title="dense GQA model, prefill blocks 128 over 32, decode blocks 768 over 32",
    ),
    "hybrid": DemoCell(
        model=LFM2,
        prefill=Blocks(768, 64, 24),
        decode=Blocks(768, 64, 24),
        prefix_caching=False,
        title="hybrid model (short convolution + attention), blocks 768 over 64",
    ),
}
"""What ``kvferry demo`` runs, in order."""

_LENGTHS: Final = ((5, 64, 129, 300), (33, 200, 511, 800, 1200))
"""Prompt lengths: sent one after the other; sent at once. The last one is sent again at the end."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a run happens: its folder, its console, the warm process of its engines, the transport it moves by."""

    folder: Path
    view: DemoView
    forge: EngineForge
    transport: str


@dataclass(slots=True)
class Tally:
    """What the last line counts, over all cells."""

    requests: int = 0
    equal: int = 0
    transfers: int = 0
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, cell: str, row: Row, transfer: Transfer) -> None:
        """Count one request and its transfer."""
        self.requests += 1
        self.equal += row.equal
        self.transfers += transfer.complete
        self.nbytes += transfer.nbytes
        self.problems += [f"{cell} {row.name}: {problem}" for problem in transfer.problems()]
        if not row.equal:
            self.problems.append(f"{cell} {row.name}: {row.detail}")

    @property
    def last_line(self) -> str:
        """The line that the demo ends with."""
        return (
            f"demo: {self.equal}/{self.requests} requests equal, {self.transfers} transfers, "
            f"{self.nbytes} bytes, {len(self.problems)} mismatches"
        )


def run_demo(
    *,
    cells: Iterable[str] = tuple(CELLS),
    transport: str = "mooncake",
    folder: Path | None = None,
    console: Console | None = None,
    forge: EngineForge | None = None,
) -> int:
    """Run the named cells (see :data:`CELLS`); 0 when everything is equal and proven, else 1 after saying what is not.

    Models, logs and reports go to ``folder`` and stay there; without one, to a temporary folder that is removed.
    """
    view = DemoView(console or Console())
    tally = Tally()
    with ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
        stage = Stage(root, view, forge or stack.enter_context(warm_forge(root / "forge.log")), transport)
        for name in cells:
            try:
                _run_cell(name, CELLS[name], stage=stage, tally=tally)
            except EngineError as error:
                tally.problems.append(f"{name}: {error}")
                _show_logs(view, root / name)
    for problem in tally.problems:
        view.problem(problem)
    view.last_line(tally.last_line)
    return 0 if tally.requests and not tally.problems else 1


def _run_cell(name: str, cell: DemoCell, *, stage: Stage, tally: Tally) -> None:
    view, folder = stage.view, stage.folder / name
    view.stage(f"{name}: building a tiny {cell.model.name} model (random weights, no download)")
    model = build_model(cell.model, stage.folder / "models")
    options = report_options(folder, transport=stage.transport)
    spec = pair_spec(
        _engine_spec("prefill", cell, cell.prefill, model),
        _engine_spec("decode", cell, cell.decode, model, prefix_caching=cell.prefix_caching),
        options=options,
    )
    specs = [spec.prefill, spec.decode, _engine_spec("single", cell, cell.prefill, model)]
    view.stage(f"{name}: starting three vLLM engines, each in its own process")
    with start_engines(specs, logs=folder, forge=stage.forge) as (prefill, decode, single):
        pair = Pair(spec, prefill, decode)
        homes = [(engine, engine.inspect().free_blocks) for engine in (prefill, decode)]
        prompts = demo_prompts(name)
        view.stage(f"{name}: the single engine answers {len(prompts)} prompts, alone and batched")
        references = take_references(single, prompts)
        view.stage(f"{name}: prefill and decode answer them, the cache moves over {stage.transport}")
        with view.counting("requests", len(prompts)) as advance:
            served = _serve(pair, prompts, advance)
        report = Path(options["transfer_report"])
        transfers = wait_for_reports([report], [s.transfer_id for s in served], REPORT_TIMEOUT_S)
        rows = []
        for reference, answer in zip(references, served, strict=True):
            verdict = judge(reference, answer.decode, single=single, exact=cell.model.exact)
            transfer = transfers[answer.transfer_id]
            rows.append(_row(reference, transfer, verdict))
            tally.add(name, rows[-1], transfer)
        view.table(cell.title, rows)
        for engine, home in homes:
            engine.wait_for_free_blocks(home, BLOCKS_TIMEOUT_S)
        view.stage(f"{name}: all blocks are back in both pools")


def _engine_spec(role: str, cell: DemoCell, blocks: Blocks, model: Path, *, prefix_caching: bool = False) -> EngineSpec:
    return EngineSpec(
        name=role,
        model=str(model),
        dtype=cell.model.dtype,
        custom_ops=cell.model.custom_ops,
        block_size=blocks.logical,
        kernel_block=blocks.kernel,
        num_blocks=blocks.count,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=prefix_caching,
    )


def demo_prompts(seed: str) -> tuple[Prompt, ...]:
    """The prompts of one cell: random printable text, the last two equal."""
    source = random.Random(seed)
    texts = [tuple(source.randrange(35, 98) for _ in range(n)) for lengths in _LENGTHS for n in lengths]
    prompts = [Prompt(f"prompt-{len(text)}", text) for text in texts]
    return (*prompts, Prompt(f"{prompts[-1].name} again", prompts[-1].tokens))


def _serve(pair: Pair, prompts: Sequence[Prompt], advance: Advance) -> list[Served]:
    """One after the other, then at once, then the repeated one when the first of its kind is answered."""
    first, at_once = len(_LENGTHS[0]), len(_LENGTHS[1])
    served = []
    for prompt in prompts[:first]:
        served.append(pair.generate(prompt.tokens, max_tokens=prompt.max_tokens, name=prompt.name))
        advance()
    tickets = [
        pair.submit(prompt.tokens, max_tokens=prompt.max_tokens, name=prompt.name)
        for prompt in prompts[first : first + at_once]
    ]
    for ticket in tickets:
        served.append(ticket.result())
        advance()
    for prompt in prompts[first + at_once :]:
        served.append(pair.generate(prompt.tokens, max_tokens=prompt.max_tokens, name=prompt.name))
        advance()
    return served


def _row(reference: Reference, transfer: Transfer, verdict: Verdict) -> Row:
    return Row(
        name=reference.prompt.name,
        prompt_tokens=len(reference.prompt.tokens),
        found_tokens=min((line.start for line in transfer.consumer), default=0),
        nbytes=transfer.nbytes,
        descriptors=transfer.descriptors,
        ms=transfer.ms,
        verified=transfer.proven,
        equal=verdict.equal,
        how=verdict.how,
        detail=verdict.detail,
    )


def _show_logs(view: DemoView, folder: Path) -> None:
    """The end of every engine's log: the reason stands there, and the folder may be gone afterwards."""
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-15:]
        view.stage(f"end of {log.name}:")
        for line in lines:
            view.problem(f"    {line}")
