"""``kvferry check``: can these two sides be planned at all, and what would a block cost?

Looks at layouts alone, so two deployments can be compared before either is started; placements will do. The verdict is
the planner's own: whatever ``check`` accepts, ``plan`` refuses only for the tables of a request.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvferry.cli.costs import ClassCost, Cost, PairCost, costs_of
from kvferry.cli.layers import name_layers
from kvferry.cli.output import console, counted
from kvferry.cli.plan import MAX_FILE_MB, FileLimit
from kvferry.cli.refusal import refused
from kvferry.cli.sides import Worker, read_side
from kvferry.errors import PlanError
from kvferry.plan import Plan, compile_plan

CHECK_FORMAT = "kvferry.check/1"


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """Components of one pair that are bound together."""

    layers: str
    components: tuple[str, ...]
    kind: str
    unit_tokens: int | None
    """Positions of one unit; None for a state."""
    runs_per_block: float
    """For one table entry of the consumer, blocks scattered; for one request of a state."""
    bytes_per_block: float
    smallest_run: int
    sliding_window: int | None
    chunk: int | None


class PairReport(msgspec.Struct, frozen=True, kw_only=True):
    """One (producer, consumer); places in the argument lists."""

    producer: int
    consumer: int
    classes: tuple[ClassReport, ...]
    descriptors_per_1000_tokens: float
    bytes_per_1000_tokens: float
    descriptors_per_state: int
    """For the state of one request, whatever its length."""
    bytes_per_state: int
    smallest_run: int
    descriptors_per_1000_tokens_with_padding: float
    """Where the library is allowed to move padding (``allow_padding``)."""
    descriptors_per_state_with_padding: int


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer when the two sides can be planned."""

    format: str = CHECK_FORMAT
    plannable: bool = True
    pairs: tuple[PairReport, ...]
    warnings: tuple[str, ...]


def check_command(
    files: Annotated[list[Path] | None, typer.Argument(help="One producer's and one consumer's layout file.")] = None,
    producer: Annotated[list[Path] | None, typer.Option(help="Layout file of a producer rank; list several.")] = None,
    consumer: Annotated[list[Path] | None, typer.Option(help="Layout file of a consumer rank; list several.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    max_file_mb: Annotated[int, typer.Option(min=1, help="Refuse a larger input file.")] = MAX_FILE_MB,
) -> None:
    """Say whether two sides can be planned, and what a block would cost."""
    paths = _sides(files or [], producer or [], consumer=consumer or [])
    limit = FileLimit(max_file_mb)
    try:
        producers, consumers = (read_side(side, limit) for side in paths)
        report = check_sides(producers, consumers)
    except PlanError as error:
        if not as_json:
            print(f"cannot be planned: {error.reason.value}")
        raise refused(error) from error
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(report, paths)


def _sides(
    files: Sequence[Path], producer: Sequence[Path], *, consumer: Sequence[Path]
) -> tuple[list[Path], list[Path]]:
    if files and (producer or consumer):
        raise typer.BadParameter("give two files, or --producer and --consumer, not both")
    if files and len(files) != 2:
        raise typer.BadParameter(
            f"{counted(len(files), 'file')}: give one producer's and one consumer's, or --producer and --consumer for "
            "several ranks"
        )
    if not files and not (producer and consumer):
        raise typer.BadParameter("give P.json D.json, or --producer and --consumer")
    return (list(files[:1]), list(files[1:])) if files else (list(producer), list(consumer))


def check_sides(producers: Sequence[Worker], consumers: Sequence[Worker]) -> CheckReport:
    """Plan the layouts of two sides. Raises :class:`PlanError`."""
    plan = compile_plan([w.bound.placement for w in producers], [w.bound.placement for w in consumers])
    costs = costs_of(plan, [w.bound.binding for w in producers], [w.bound.binding for w in consumers])
    return CheckReport(pairs=tuple(_pair(cost) for cost in costs), warnings=tuple(_warnings(plan)))


def _pair(cost: PairCost) -> PairReport:
    parts = [part for part in (cost.attention, cost.state) if part is not None]
    return PairReport(
        producer=cost.producer,
        consumer=cost.consumer,
        classes=tuple(_class(one) for one in cost.classes),
        descriptors_per_1000_tokens=cost.attention.runs_of(1000) if cost.attention else 0.0,
        bytes_per_1000_tokens=cost.attention.bytes_of(1000) if cost.attention else 0.0,
        descriptors_per_state=cost.state.runs if cost.state else 0,
        bytes_per_state=cost.state.nbytes if cost.state else 0,
        smallest_run=min((p.smallest for p in parts if p.runs), default=0),
        descriptors_per_1000_tokens_with_padding=_bridged_of(cost.attention, 1000),
        descriptors_per_state_with_padding=cost.state.bridged.runs if cost.state else 0,
    )


def _bridged_of(attention: Cost | None, tokens: int) -> float:
    return attention.bridged.runs * tokens / attention.tokens if attention else 0.0


def _class(one: ClassCost) -> ClassReport:
    key = one.plan.key
    return ClassReport(
        layers=name_layers([c.layer_index for kind in one.kinds for c in kind.dst.members]),
        components=tuple(dict.fromkeys(kind.dst.first.component for kind in one.kinds)),
        kind=key.kind,
        unit_tokens=None if key.kind == "state" else key.unit_tokens,
        runs_per_block=one.runs_per_block,
        bytes_per_block=one.bytes_per_block,
        smallest_run=one.cost.smallest,
        sliding_window=key.sliding_window,
        chunk=key.chunk,
    )


def _warnings(plan: Plan) -> list[str]:
    """Positions that no producer file is of; a request that needs one is refused."""
    found: dict[str, None] = {}
    for consumer, holes in plan.assignment.holes.items():
        for hole in holes:
            rank = f"context-parallel rank {hole.share.rank} of {hole.share.size}"
            found[
                f"consumer {consumer}: no producer file is of {rank}; a request that needs its positions will be "
                "refused as missing-positions"
            ] = None
    return list(found)


def _show(report: CheckReport, paths: tuple[Sequence[Path], Sequence[Path]]) -> None:
    counts = (counted(len(side), word) for side, word in zip(paths, _WORDS, strict=True))
    print(f"can be planned: {' to '.join(counts)}")
    table = Table(title="what would move, blocks scattered", title_justify="left")
    for heading in ("producer", "consumer", "layers", "components"):
        table.add_column(heading, overflow="fold")
    for heading in ("unit", "runs per block", "bytes per block", "smallest run"):
        table.add_column(heading, justify="right")
    for pair in report.pairs:
        names = f"{pair.producer}: {paths[0][pair.producer].name}", f"{pair.consumer}: {paths[1][pair.consumer].name}"
        for one in pair.classes:
            table.add_row(*map(escape, names), *_row(one))
        table.add_section()
    console().print(table)
    for line in (*_sums(report), *(f"warning: {w}" for w in report.warnings)):
        print(line)


_WORDS = ("producer", "consumer")


def _row(one: ClassReport) -> tuple[str, ...]:
    unit = "whole state" if one.unit_tokens is None else f"{one.unit_tokens:,} tokens"
    kept = f"; last {one.sliding_window:,} tokens" if one.sliding_window else ""
    kept += f"; current chunk of {one.chunk:,}" if one.chunk else ""
    return (
        escape(one.layers + kept), escape(", ".join(one.components)), unit,
        f"{one.runs_per_block:,.1f}".removesuffix(".0"), f"{one.bytes_per_block:,.0f}", f"{one.smallest_run:,}",
    )  # fmt: skip


def _sums(report: CheckReport) -> list[str]:
    lines = []
    for pair in report.pairs:
        said = []
        if pair.bytes_per_1000_tokens:
            count, nbytes = pair.descriptors_per_1000_tokens, pair.bytes_per_1000_tokens
            less = _less(count, pair.descriptors_per_1000_tokens_with_padding)
            said.append(f"{count:,.0f} descriptors{less} and {nbytes:,.0f} bytes per 1,000 tokens")
        if pair.descriptors_per_state:
            runs = counted(pair.descriptors_per_state, "descriptor")
            less = _less(pair.descriptors_per_state, pair.descriptors_per_state_with_padding)
            said.append(f"{runs}{less} and {pair.bytes_per_state:,} bytes of state a request")
        lines.append(f"producer {pair.producer} to consumer {pair.consumer}: {'; '.join(said)}")
    return lines or ["nothing would move: the consumer has no component that a producer has"]


def _less(exact: float, with_padding: float) -> str:
    return f" ({with_padding:,.0f} with allow_padding)" if with_padding < exact else ""
