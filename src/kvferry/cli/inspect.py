"""``kvferry inspect``: what is where in one layout file, as a table, as JSON, and as a picture to scale."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvferry.cli.block_picture import BLOCKS_DRAWN, BlockRange, draw_blocks
from kvferry.cli.inspection import LayoutReport, StorageReport, report_of
from kvferry.cli.output import console, write_picture
from kvferry.cli.plan import MAX_FILE_MB, FileLimit
from kvferry.cli.refusal import refusing
from kvferry.cli.sides import read_worker
from kvferry.layout import Layout

REGIONS_SHOWN = 8


def inspect_command(
    layout: Annotated[Path, typer.Argument(help="Layout file, or a placement (a layout file without regions).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw the memory of a block to scale into this file.")] = None,
    blocks: Annotated[str | None, typer.Option(help="Which blocks --svg draws: one number, or A-B.")] = None,
    max_file_mb: Annotated[int, typer.Option(min=1, help="Refuse a larger input file.")] = MAX_FILE_MB,
) -> None:
    """Show what one layout file holds: groups, layers, components, bytes, padding."""
    if blocks is not None and svg is None:
        raise typer.BadParameter("says which blocks --svg draws; give --svg FILE too", param_hint="--blocks")
    chosen = _range(blocks or "0")
    with refusing():
        worker = read_worker(layout, FileLimit(max_file_mb))
        report = report_of(worker)
    if svg is not None:
        _check_drawable(chosen, worker.layout)
        write_picture(svg, draw_blocks(worker.layout, chosen), as_json=as_json)
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(report, layout)


def _range(words: str) -> BlockRange:
    found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", words)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise typer.BadParameter(f"{words!r} is neither a block number nor A-B with A <= B", param_hint="--blocks")
    return BlockRange(int(found[1]), int(found[2] or found[1]))


def _check_drawable(chosen: BlockRange, layout: Layout) -> None:
    blocks = max((c.num_blocks for c in layout.components), default=0)
    if chosen.last >= blocks:
        raise typer.BadParameter(f"block {chosen.last}, but the layout has {blocks:,}", param_hint="--blocks")
    if chosen.count > BLOCKS_DRAWN:
        raise typer.BadParameter(f"{chosen.count} blocks, at most {BLOCKS_DRAWN} are drawn", param_hint="--blocks")


def _show(report: LayoutReport, path: Path) -> None:
    out = console()
    what = "placement" if report.fingerprint is None else "layout"
    print(f"{path.name}: {what} of engine {report.engine_id}, {report.parallel}")
    if report.fingerprint is not None:
        print(f"fingerprint {report.fingerprint[:16]}")
    out.print(_groups(report))
    for line in _notes(report):
        print(line)
    out.print(_components(report))
    if report.storages:
        out.print(_memory(report.storages))
    else:
        print("no regions: addresses are offsets; check and explain take this file, plan does not")


def _groups(report: LayoutReport) -> Table:
    table = _table("groups", ("group", "kind", "layers"), right=("tokens per block", "blocks", *_BYTES))
    for g in report.groups:
        per = ("one block a request", "") if g.live_bytes_per_token is None else (
            _pair(g.live_bytes_per_token, g.padded_bytes_per_token),
            _pair(g.live_bytes_per_1000_tokens, g.padded_bytes_per_1000_tokens),
        )  # fmt: skip
        block = _pair(g.live_bytes_per_block, g.padded_bytes_per_block)
        table.add_row(str(g.group), g.kind, str(g.layers), f"{g.block_tokens:,}", f"{g.blocks:,}", block, *per)
    return table


_BYTES = ("bytes per block: live / padded", "per token", "per 1,000 tokens")


def _notes(report: LayoutReport) -> list[str]:
    notes = []
    for g in report.groups:
        said = []
        if g.sliding_window is not None:
            said.append(f"keeps the last {g.sliding_window:,} tokens")
        if g.chunk is not None:
            said.append(f"keeps the current chunk of {g.chunk:,} tokens")
        if g.context_parallel is not None:
            said.append(f"holds context-parallel {g.context_parallel}")
        if g.overlays:
            said.append(f"shares storage with group {', '.join(map(str, g.overlays))}: a block has one owner at a time")
        if said:
            notes.append(f"group {g.group} {'; '.join(said)}")
    return notes


def _components(report: LayoutReport) -> Table:
    headings = ("layers", "component", "group", "holds", "content")
    table = _table("components (bytes of one layer)", headings, right=("pages", *_BYTES[:2]))
    for c in report.components:
        pages = f"{c.pages:,} x {c.page_live_bytes:,}" + (f" every {c.page_stride:,}" if c.pages > 1 else "")
        per = "" if c.live_bytes_per_token is None else _number(c.live_bytes_per_token)
        table.add_row(
            f"{escape(c.layers)}\n{escape(c.pattern)}",
            escape(c.component) + (" (optional)" if c.optional else ""),
            str(c.group),
            escape(c.holds),
            f"{c.content_bytes:,} B {escape(c.content_type)}",
            pages,
            _pair(c.live_bytes_per_block, c.padded_bytes_per_block) + (" (shared)" if c.shares_frame else ""),
            per,
        )
    return table


def _memory(storages: Sequence[StorageReport]) -> Table:
    table = _table("memory", ("storage", "memory", "first region"), right=("regions", "bytes", "reached", "coverage"))
    for place, s in enumerate(storages[:REGIONS_SHOWN]):
        address, nbytes = s.regions[0]
        table.add_row(
            str(place), s.memory, f"[{address}, {address + nbytes})".replace("[", "\\["), f"{len(s.regions):,}",
            f"{s.total_bytes:,}", *_coverage(s.live_bytes, s.coverage),
        )  # fmt: skip
    if len(storages) > REGIONS_SHOWN:
        table.add_row(f"and {len(storages) - REGIONS_SHOWN} more", "", "", "", "", "", "")
    total = sum(s.total_bytes for s in storages)
    known = [s.live_bytes for s in storages if s.live_bytes is not None]
    live = sum(known) if len(known) == len(storages) else None
    count = sum(len(s.regions) for s in storages)
    table.add_section()
    cover = None if live is None else live / total
    table.add_row("all", "", "", f"{count:,}", f"{total:,}", *_coverage(live, cover))
    return table


def _coverage(live: int | None, part: float | None) -> tuple[str, str]:
    return ("not counted", "") if live is None or part is None else (f"{live:,}", f"{part:.1%}")


def _table(title: str, left: Sequence[str], *, right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def _pair(live: float | None, padded: float | None) -> str:
    return f"{_number(live)} / {_number(padded)}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == round(value) or value >= 10_000 else f"{value:,.1f}"
