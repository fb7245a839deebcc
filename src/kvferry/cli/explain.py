"""``kvferry explain``: in words, why a pair is planned as it is and what would make it cheaper."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.costs import costs_of
from kvferry.cli.forms import form_lines
from kvferry.cli.output import counted
from kvferry.cli.plan import MAX_FILE_MB, FileLimit, plan_transfers, read_request
from kvferry.cli.reasons import explain
from kvferry.cli.refusal import refusing
from kvferry.cli.sides import Worker, read_side
from kvferry.plan import TransferRequest, compile_plan

WIDTH = 116


def explain_command(
    producer: Annotated[list[Path], typer.Option(help="Layout file of a producer rank; repeat, or list several.")],
    consumer: Annotated[list[Path], typer.Option(help="Layout file of a consumer rank; repeat, or list several.")],
    request: Annotated[Path | None, typer.Option(help="Request file; adds what this request moves.")] = None,
    max_file_mb: Annotated[int, typer.Option(min=1, help="Refuse a larger input file.")] = MAX_FILE_MB,
) -> None:
    """Say in words why two sides are planned as they are."""
    limit = FileLimit(max_file_mb)
    with refusing():
        producers, consumers = read_side(producer, limit), read_side(consumer, limit)
        lines = explain_sides(producers, consumers)
        if request is not None:
            lines += ["", *request_lines(producers, consumers, read_request(request, limit))]
    for line in lines:
        print(wrapped(line))


def explain_sides(producers: Sequence[Worker], consumers: Sequence[Worker]) -> list[str]:
    """The explanation of two sides. Raises :class:`PlanError`."""
    plan = compile_plan([w.bound.placement for w in producers], [w.bound.placement for w in consumers])
    costs = costs_of(plan, [w.bound.binding for w in producers], [w.bound.binding for w in consumers])
    return explain(plan, costs)


def request_lines(producers: Sequence[Worker], consumers: Sequence[Worker], request: TransferRequest) -> list[str]:
    """What one request moves between them. Raises :class:`PlanError`."""
    planned = plan_transfers([w.bound for w in producers], [w.bound for w in consumers], request)
    lines = [f"This request, tokens [{request.start}, {request.stop})"]
    for transfer in planned.transfers:
        found = transfer.descriptors
        lines.append(
            f"  producer {transfer.producer} to consumer {transfer.consumer}: {counted(found.count, 'descriptor')}, "
            f"{counted(found.total_bytes, 'byte')}, runs of {int(found.nbytes.min()):,} to {int(found.nbytes.max()):,}"
        )
        lines += [f"    {line}" for line in form_lines(found)]
    nothing = "  nothing to move: the consumer needs no byte that it does not have"
    return lines if planned.transfers else [*lines, nothing]


def wrapped(line: str) -> str:
    """``line`` over several, continued four columns further in than it begins."""
    inner = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, WIDTH, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)
