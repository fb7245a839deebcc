"""The demo without vLLM: two processes, realistic layouts, every byte checked.

For each scenario a second process plays the prefill engine: it fills its memory with marks and publishes every
request. This process plays the decode engine: it fetches all requests at once, then compares each byte of what it
asked for with the mark that must stand there, and each other byte with what stood there before. The bytes, messages
and machines are those of production; only the model is missing.
"""

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table as View

from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout import bind_layout
from kvferry.plan import BlockTable
from kvferry.protocol import Fate, FetchEnded, Source, Span, Table, Ticket
from kvferry.runtime import Bootstrap, ConsumerRuntime, Fetch, Local, Publication, RuntimeOptions, new_epoch
from kvferry.runtime import ProducerRuntime as Producer
from kvferry.testing.marked_memory import MarkedMemory
from kvferry.testing.ports import free_port
from kvferry.testing.scenarios import SCENARIOS, Scenario
from kvferry.testing.transfer_report import Transfer, wait_for_reports
from kvferry.transport import CmaTransport, MooncakeTransport, Transport

HOST = "127.0.0.1"
MODEL = "demo"
TIMEOUT_S = 60.0
MEANS = {"cma": "cma (the kernel copies between processes)", "mooncake": "Mooncake TCP"}
LEGEND = (
    "What was found at decode does not move. Runs are the copies made. Checked: the moved bytes, and those after the "
    "prompt's end in its last block, which must have stayed as they were."
)
PRODUCER, CONSUMER = EngineId("demo-prefill"), EngineId("demo-decode")


def make_transport(name: str) -> Transport:
    """A fresh engine of the named transport."""
    return CmaTransport() if name == "cma" else MooncakeTransport(HOST, protocol="tcp")


@dataclass(frozen=True, slots=True)
class Checked:
    """One request after it has moved."""

    name: str
    prompt: int
    """Tokens of the prompt."""
    found: int
    """Tokens at its beginning that the decode side holds already; they do not move."""
    transfer: Transfer
    checked: int
    problems: tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """What the last line counts."""

    requests: int = 0
    equal: int = 0
    transfers: int = 0
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, row: Checked) -> None:
        """Count one request."""
        self.requests += 1
        self.equal += not row.problems
        self.transfers += row.transfer.complete
        self.nbytes += row.transfer.nbytes
        self.problems += [f"{row.name}: {problem}" for problem in row.problems]

    @property
    def last_line(self) -> str:
        """The line that the demo ends with."""
        return (
            f"demo: {self.equal}/{self.requests} requests equal, {self.transfers} transfers, "
            f"{self.nbytes} bytes, {len(self.problems)} mismatches"
        )


def run_plain_demo(
    *, names: Sequence[str] = tuple(SCENARIOS), transport: str = "mooncake", console: Console | None = None
) -> int:
    """Run the named scenarios; 0 when every byte is right, else 1 after saying which are not."""
    console = console or Console()
    tally = Tally()
    began = time.monotonic()
    console.print(f"two processes, joined by kvferry over {MEANS[transport]}", highlight=False, soft_wrap=True)
    for name in names:
        scenario = SCENARIOS[name]()
        line = f"[dim]{time.monotonic() - began:5.1f} s[/dim]  {name}: {scenario.title}"
        console.print(line, highlight=False, soft_wrap=True)
        with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
            rows = _run(scenario, transport, Path(folder) / "report.jsonl")
        for row in rows:
            tally.add(row)
        console.print(_view(rows))
    console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)
    for problem in tally.problems:
        console.print(problem, style="bold red", markup=False, highlight=False)
    console.print(tally.last_line, markup=False, highlight=False, soft_wrap=True)
    return 0 if tally.requests and not tally.problems else 1


def _run(scenario: Scenario, transport: str, report: Path) -> list[Checked]:
    memory = MarkedMemory(scenario.consumer)
    transfers = {job.name: TransferId(f"demo-{secrets.token_hex(8)}") for job in scenario.jobs}
    port = free_port()
    options = RuntimeOptions(host=HOST, make_transport=lambda: make_transport(transport), report=str(report))
    with _producer(scenario.name, transport, port, report) as stdin:
        stdin.write(json.dumps(transfers) + "\n")
        stdin.flush()
        consumer = ConsumerRuntime(_local(memory, CONSUMER), options)
        try:
            ended = _fetch_all(
                consumer, scenario, transfers=transfers, source=Source(PRODUCER, f"http://{HOST}:{port}")
            )
        finally:
            consumer.close()
        reports = wait_for_reports([report], transfers.values(), TIMEOUT_S)
    rows = [
        _checked(scenario, memory, number=number, ended=ended, transfer=reports[t])
        for number, t in enumerate(transfers.values())
    ]
    stray = memory.untouched_outside([job.consumer for job in scenario.jobs])
    if stray:
        rows[0] = replace(rows[0], problems=(*rows[0].problems, f"{stray} stray bytes written"))
    return rows


def _fetch_all(
    consumer: ConsumerRuntime, scenario: Scenario, *, transfers: dict[str, TransferId], source: Source
) -> dict[Ticket, FetchEnded]:
    for number, job in enumerate(scenario.jobs):
        tables = tuple(_table(t) for t in job.consumer.tables)
        span = Span(job.consumer.start, job.consumer.stop)
        consumer.fetch(Fetch(Ticket(number), RequestId(job.name), transfers[job.name], source, span, tables))
    ended: dict[Ticket, FetchEnded] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(ended) < len(scenario.jobs) and time.monotonic() < deadline:
        ended.update({end.ticket: end for end in consumer.take_ended()})
        time.sleep(0.002)
    return ended


def _checked(
    scenario: Scenario, memory: MarkedMemory, *, number: int, ended: dict[Ticket, FetchEnded], transfer: Transfer
) -> Checked:
    job = scenario.jobs[number]
    end = ended.get(Ticket(number))
    problems = list(transfer.problems())
    if end is None:
        problems.append(f"did not end within {TIMEOUT_S:.0f} s")
    elif end.outcome.fate is not Fate.DONE:
        problems.append(f"{end.outcome.fate}: {end.outcome.reason} {end.outcome.detail}")
    wrong, checked = memory.check(job.consumer)
    problems += [f"{w.wrong} wrong bytes at position {w.position} of {w.component}" for w in wrong[:3]]
    return Checked(job.name, job.consumer.stop, job.consumer.start, transfer, checked, tuple(problems))


def _view(rows: Sequence[Checked]) -> View:
    view = View(header_style="bold")
    view.add_column("request")
    for heading in ("prompt\ntokens", "found at\ndecode", "bytes\nmoved", "runs", "ms", "bytes\nchecked"):
        view.add_column(heading, justify="right")
    view.add_column("digest")
    view.add_column("bytes right")
    for row in rows:
        t = row.transfer
        view.add_row(
            row.name,
            f"{row.prompt:,}",
            f"{row.found:,}",
            f"{t.nbytes:,}",
            f"{t.descriptors:,}",
            f"{t.ms:.1f}",
            f"{row.checked:,}",
            "[green]equal[/green]" if t.proven else "[red]no[/red]",
            "[green]all[/green]" if not row.problems else "[red]no[/red]",
        )
    return view


def _table(table: BlockTable) -> Table:
    blocks = [b if held else None for b, held in zip(table.blocks.tolist(), table.held.tolist(), strict=True)]
    return Table(table.first_token, tuple(blocks))


def _local(memory: MarkedMemory, engine: EngineId) -> Local:
    bound = bind_layout(memory.layout)
    return Local(Incarnation(engine, new_epoch()), MODEL, 0, bound.binding, (bound.placement,), 1, 1)


@contextmanager
def _producer(scenario: str, transport: str, port: int, report: Path) -> Iterator[IO[str]]:
    """The second process; ends when its standard input does."""
    command = [sys.executable, "-m", "kvferry.testing.demo_plain", scenario, transport, str(port), str(report)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the producer process has no pipes")
    try:
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the producer process ended before it was ready: status {process.wait(10)}")
        yield process.stdin
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def produce(scenario: Scenario, transport: str, port: int, report: str) -> None:
    """The second process: fill, serve, publish what standard input names, until it ends."""
    memory = MarkedMemory(scenario.producer)
    for job in scenario.jobs:
        memory.fill(job.producer)
    bootstrap = Bootstrap(url=f"http://{HOST}:{port}", serve=(HOST, port))
    options = RuntimeOptions(
        host=HOST, make_transport=lambda: make_transport(transport), bootstrap=bootstrap, report=report
    )
    producer = Producer(_local(memory, PRODUCER), options)
    try:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        transfers = json.loads(sys.stdin.readline())
        for number, job in enumerate(scenario.jobs):
            tables = tuple(_table(t) for t in job.producer.tables)
            transfer = TransferId(transfers[job.name])
            producer.publish(Publication(Ticket(number), RequestId(job.name), transfer, job.producer.stop, tables))
        sys.stdin.read()
    finally:
        producer.close()


if __name__ == "__main__":
    produce(SCENARIOS[sys.argv[1]](), sys.argv[2], int(sys.argv[3]), sys.argv[4])
