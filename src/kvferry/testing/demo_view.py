"""What the demo shows while it works and at the end: stage lines, a bar, a table, and one last line."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the demo."""

    name: str
    """For messages; the table knows a request by its length."""
    prompt_tokens: int
    found_tokens: int
    """Tokens of the prompt that the decode side held already."""
    nbytes: int
    descriptors: int
    ms: float
    verified: bool
    """Digests of the moved pages equal at both ends."""
    equal: bool
    how: str
    """By which rule the answer was compared."""
    detail: str
    """What differs, for messages."""


class Advance(Protocol):
    """Says that one more of the things counted is done."""

    def __call__(self) -> None: ...


class DemoView:
    """Writes to one console; with a terminal it also shows a bar that moves."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    def stage(self, text: str) -> None:
        """One line: what is being done now."""
        took = f"[dim]{time.monotonic() - self._began:6.1f} s[/dim]"
        self._console.print(f"{took}  {text}", highlight=False, soft_wrap=True)

    def problem(self, text: str) -> None:
        """One line: what went wrong."""
        self._console.print(text, style="bold red", highlight=False, markup=False)

    @contextmanager
    def counting(self, text: str, total: int) -> Iterator[Advance]:
        """A bar for ``total`` things; on a plain console it is quiet."""
        columns = (SpinnerColumn(), TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        with bar:
            task = bar.add_task(text, total=total)
            yield lambda: bar.advance(task)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """All requests of one model."""
        table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE)
        for heading in ("prompt\ntokens", "found at\ndecode", "bytes", "descriptors", "ms"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("verified\nby digest", no_wrap=True)
        table.add_column("equal", no_wrap=True)
        for row in rows:
            table.add_row(
                str(row.prompt_tokens),
                str(row.found_tokens),
                f"{row.nbytes:,}",
                str(row.descriptors),
                f"{row.ms:.1f}",
                _yes_no(row.verified),
                f"{_yes_no(row.equal)} [dim]{row.how}[/dim]",
            )
        self._console.print(table)

    def last_line(self, text: str) -> None:
        """The result, on a line of its own that programs can read."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _yes_no(value: bool) -> str:
    return "[green]yes[/green]" if value else "[bold red]no[/bold red]"
