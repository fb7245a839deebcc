"""How every command refuses: nothing more on standard output, one line of JSON on standard error, exit status 2."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvferry.errors import FerryError, PlanError

REFUSED = 2
"""Exit status of a refusal."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a :class:`PlanError` inside into the one-line answer and the exit status."""
    try:
        yield
    except PlanError as error:
        raise refused(error) from error


def refused(error: FerryError) -> typer.Exit:
    """Print the one-line answer; returns the exit to raise."""
    sys.stderr.write(json.dumps({"error": {"reason": error.reason.value, "message": error.message}}) + "\n")
    return typer.Exit(REFUSED)
