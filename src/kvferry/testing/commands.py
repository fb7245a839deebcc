"""Calling ``kvferry`` in this process, as a person or a program would, and reading its answer.

>>> call(["version"]).status
0
"""

import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from kvferry.cli import main
from kvferry.layout import Layout, encode_layout


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def refusal(self) -> dict[str, str]:
        """The error object; the answer must be a refusal: status 2, one line of JSON on standard error."""
        assert self.status == 2, self
        assert self.err.count("\n") == 1, self.err
        error: dict[str, str] = json.loads(self.err)["error"]
        assert set(error) == {"reason", "message"}
        return error


def call(arguments: Sequence[str | Path]) -> Answer:
    """Run one command; what would be a traceback on a terminal is raised here."""
    out, err = StringIO(), StringIO()
    status = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    return Answer(status, out.getvalue(), err.getvalue())


def write_layouts(folder: Path, **layouts: Layout) -> dict[str, Path]:
    """Write layout files; returns their paths by name."""
    paths = {name: folder / f"{name}.json" for name in layouts}
    for name, layout in layouts.items():
        paths[name].write_bytes(encode_layout(layout))
    return paths
