"""``kvferry plan``: what would move between two sides for one request, as JSON for programs or a table for people.

The contract is section 3 of the layout file's specification: one object on standard output, or nothing there, one line
of JSON on standard error and exit status 2.
"""

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer
from rich.table import Table

from kvferry.cli.forms import NETWORK, cheaper_form
from kvferry.cli.output import console, counted, write_picture
from kvferry.cli.plan_picture import draw_plan
from kvferry.cli.plan_scene import Scene
from kvferry.cli.refusal import refused
from kvferry.errors import PlanError, PlanReason
from kvferry.layout import BoundLayout, bind_layout, parse_layout
from kvferry.plan import (
    MAX_DESCRIPTORS,
    Descriptors,
    InvalidRequestError,
    Plan,
    TransferRequest,
    compile_plan,
    parse_request,
)

PLAN_FORMAT = "kvferry.plan/1"
MAX_FILE_MB = 256
PIECE = 1 << 24
"""Bytes that are read at a time."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Descriptors of one (producer, consumer), places in the argument lists."""

    producer: int
    consumer: int
    descriptors: Descriptors


@dataclass(frozen=True, slots=True)
class Planned:
    """Everything that one request moves."""

    plan: Plan
    transfers: tuple[Transfer, ...]

    @property
    def descriptors(self) -> int:
        return sum(t.descriptors.count for t in self.transfers)

    @property
    def total_bytes(self) -> int:
        return sum(t.descriptors.total_bytes for t in self.transfers)


def plan_transfers(
    producers: Sequence[BoundLayout],
    consumers: Sequence[BoundLayout],
    request: TransferRequest,
    *,
    max_descriptors: int = MAX_DESCRIPTORS,
) -> Planned:
    """Plan all pairs of two sides for one request. Raises :class:`PlanError`."""
    plan = compile_plan([p.placement for p in producers], [c.placement for c in consumers])
    plan.check(request)
    transfers: list[Transfer] = []
    total = 0
    for producer, consumer in plan.pairs():
        pair = plan.pair(producer, consumer)
        if pair is None:
            continue
        src, dst = producers[producer].binding, consumers[consumer].binding
        descriptors = pair.bind(request, src=src, dst=dst, max_descriptors=max_descriptors)
        total += descriptors.count
        if total > max_descriptors:
            raise PlanError(
                PlanReason.LIMIT_EXCEEDED,
                f"{total} descriptors up to producer {producer} and consumer {consumer}, over the limit of "
                f"{max_descriptors}: raise it, or move fewer tokens",
            )
        if descriptors.count:
            transfers.append(Transfer(producer, consumer, descriptors))
    return Planned(plan, tuple(transfers))


def plan_dicts(
    producers: Sequence[Mapping[str, Any]],
    consumers: Sequence[Mapping[str, Any]],
    request: Mapping[str, Any],
    *,
    max_descriptors: int = MAX_DESCRIPTORS,
) -> dict[str, Any]:
    """:func:`plan_transfers` on the objects of layout and request files; returns the object of a plan file."""
    sides = [[bind_layout(parse_layout(msgspec.json.encode(d))) for d in side] for side in (producers, consumers)]
    wanted = parse_request(msgspec.json.encode(request))
    return plan_object(plan_transfers(sides[0], sides[1], wanted, max_descriptors=max_descriptors))


def plan_object(planned: Planned) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    transfers = [
        {"producer": t.producer, "consumer": t.consumer, "descriptors": _triples(t.descriptors)}
        for t in planned.transfers
    ]
    stats = {"descriptors": planned.descriptors, "bytes": planned.total_bytes}
    return {"format": PLAN_FORMAT, "transfers": transfers, "stats": stats}


def _triples(descriptors: Descriptors) -> list[tuple[int, int, int]]:
    return list(zip(descriptors.src.tolist(), descriptors.dst.tolist(), descriptors.nbytes.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class FileLimit:
    """How large an input file may be."""

    megabytes: int = MAX_FILE_MB

    def read(self, path: Path, reason: PlanReason) -> bytes:
        """The bytes of ``path``; an unreadable file is refused with ``reason``."""
        most = self.megabytes * 1_000_000
        try:
            with open(path, "rb", opener=_open) as file:
                known = os.fstat(file.fileno())
                pipe = stat.S_ISFIFO(known.st_mode)
                if not (pipe or stat.S_ISREG(known.st_mode)):
                    raise PlanError(reason, f"{path} is neither a file nor a pipe")
                os.set_blocking(file.fileno(), pipe)
                data = b"" if known.st_size > most else _read_up_to(file, most + 1)
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            raise PlanError(reason, f"{path} cannot be read: {why}") from error
        if max(known.st_size, len(data)) > most:
            raise PlanError(PlanReason.LIMIT_EXCEEDED, f"{path} is over --max-file-mb {self.megabytes}")
        return data


def _open(path: str, flags: int) -> int:
    # Without O_NONBLOCK a named pipe that nobody writes to would be waited for. With it, it is an empty file.
    return os.open(path, flags | os.O_NONBLOCK)


def _read_up_to(file: BinaryIO, most: int) -> bytes:
    """All there is, but not more than ``most`` bytes: a pipe, or a file of /proc, does not say how much it will be."""
    pieces: list[bytes] = []
    while most > 0 and (piece := file.read(min(most, PIECE))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def read_layout(path: Path, limit: FileLimit) -> BoundLayout:
    """One layout file, checked; messages begin with its name."""
    data = limit.read(path, PlanReason.INVALID_LAYOUT)
    try:
        return bind_layout(parse_layout(data))
    except PlanError as error:
        raise PlanError(error.reason, f"{path}: {error.message}") from error


def read_request(path: Path, limit: FileLimit) -> TransferRequest:
    """One request file; messages begin with its name."""
    data = limit.read(path, PlanReason.INVALID_REQUEST)
    try:
        return parse_request(data)
    except InvalidRequestError as error:
        raise PlanError(error.reason, f"{path}: {error.message}") from error


def plan_command(
    producer: Annotated[list[Path], typer.Option(help="Layout file of a producer rank; repeat, or list several.")],
    consumer: Annotated[list[Path], typer.Option(help="Layout file of a consumer rank; repeat, or list several.")],
    request: Annotated[Path, typer.Option(help="Request file: token range and block tables.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw pages and the runs between them into this file.")] = None,
    max_descriptors: Annotated[int, typer.Option(min=0, help="Refuse a plan of more descriptors.")] = MAX_DESCRIPTORS,
    max_file_mb: Annotated[int, typer.Option(min=1, help="Refuse a larger input file.")] = MAX_FILE_MB,
) -> None:
    """Show which bytes would move from producers to consumers for one request."""
    limit = FileLimit(max_file_mb)
    try:
        sides = [[read_layout(path, limit) for path in paths] for paths in (producer, consumer)]
        wanted = read_request(request, limit)
        planned = plan_transfers(sides[0], sides[1], wanted, max_descriptors=max_descriptors)
    except PlanError as error:
        raise refused(error) from error
    if svg is not None:
        moved = {(t.producer, t.consumer): t.descriptors for t in planned.transfers}
        names = [path.name for path in producer], [path.name for path in consumer]
        picture = draw_plan(Scene(planned.plan, (sides[0], sides[1]), names, wanted, moved))
        write_picture(svg, picture, as_json=as_json)
    if as_json:
        sys.stdout.write(msgspec.json.encode(plan_object(planned)).decode() + "\n")
    else:
        _show(planned, producer, consumers=consumer)


def _show(planned: Planned, producers: Sequence[Path], *, consumers: Sequence[Path]) -> None:
    table = Table(title="kvferry plan")
    for heading in ("producer", "consumer"):
        table.add_column(heading)
    for heading in ("descriptors", "bytes", "smallest", "median", "largest"):
        table.add_column(heading, justify="right")
    table.add_column(f"cheaper form ({NETWORK})")
    for transfer in planned.transfers:
        nbytes = transfer.descriptors.nbytes
        ordered = sorted(nbytes.tolist())
        sizes = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
        table.add_row(
            f"{transfer.producer}: {producers[transfer.producer].name}",
            f"{transfer.consumer}: {consumers[transfer.consumer].name}",
            f"{transfer.descriptors.count:,}",
            f"{transfer.descriptors.total_bytes:,}",
            *(f"{size:,}" for size in sizes),
            cheaper_form(transfer.descriptors),
        )
    console().print(table)
    print(f"{counted(planned.descriptors, 'descriptor')}, {counted(planned.total_bytes, 'byte')}")
    if not planned.transfers:
        print("nothing to move: the consumer needs no byte that it does not have")
