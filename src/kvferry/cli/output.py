"""What commands leave behind for people: tables on the terminal, pictures in files."""

import sys
from pathlib import Path

import typer
from rich.console import Console

PIPED_WIDTH = 190
"""Columns of a table that goes into a file or a pipe, which has no width of its own."""


def console() -> Console:
    """The terminal as it is; wide enough for whole tables where there is none."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=PIPED_WIDTH, highlight=False, force_terminal=False)


def write_picture(path: Path, svg: str) -> None:
    """Write ``svg``; a path that cannot be written is a usage error, not a traceback."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise typer.BadParameter(f"{path} cannot be written: {why}", param_hint="--svg") from error


def said(nbytes: float) -> str:
    """A number of bytes for people: exact below 10 KiB, else in powers of 1024.

    >>> said(576), said(73728), said(884736), said(3 * 2**30)
    ('576 B', '72 KiB', '864 KiB', '3 GiB')
    """
    if nbytes < 10_240:
        return f"{nbytes:,.0f} B" if nbytes == round(nbytes) else f"{nbytes:,.1f} B"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f}".removesuffix(".0") + f" {unit}"
    raise AssertionError("10,240 bytes are at least a KiB")
