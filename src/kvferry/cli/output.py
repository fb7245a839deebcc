"""What commands leave behind for people: tables on the terminal, pictures in files."""

import os
import sys
from pathlib import Path

import typer
from rich.console import Console

PIPED_WIDTH = 190
"""Columns of a table that goes into a file or a pipe, where the environment variable COLUMNS names none."""

NARROWEST = 40


def console() -> Console:
    """The terminal as it is; wide enough for whole tables where there is none. COLUMNS decides over both."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=piped_width(os.environ.get("COLUMNS", "")), highlight=False, force_terminal=False)


def piped_width(columns: str) -> int:
    """Columns for a table that is not for a terminal, by the value of COLUMNS.

    >>> piped_width(""), piped_width("100"), piped_width("wide"), piped_width("7")
    (190, 100, 190, 40)
    """
    return max(int(columns), NARROWEST) if columns.isascii() and columns.isdigit() else PIPED_WIDTH


def write_picture(path: Path, svg: str, *, as_json: bool) -> None:
    """Write ``svg``, and say so to people; a path that cannot be written is a usage error, not a traceback."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise typer.BadParameter(f"{path} cannot be written: {why}", param_hint="--svg") from error
    if not as_json:
        print(f"wrote {path}")


def counted(number: int, word: str) -> str:
    """``1 file``, ``2 files``, ``1,000 files``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


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
