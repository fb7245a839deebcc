"""The ``kvferry`` command: one Typer app, one file for each subcommand."""

import sys
from collections.abc import Sequence

import typer

from kvferry import __version__
from kvferry.cli.check import check_command
from kvferry.cli.demo import demo_command
from kvferry.cli.explain import explain_command
from kvferry.cli.inspect import inspect_command
from kvferry.cli.layout import layout_app
from kvferry.cli.plan import plan_command
from kvferry.cli.serve_router import serve_router

app = typer.Typer(
    name="kvferry",
    help="KV-cache transfer between LLM prefill and decode workers that cannot corrupt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan_command)
app.command("inspect")(inspect_command)
app.command("check")(check_command)
app.command("explain")(explain_command)
app.add_typer(layout_app, name="layout")
app.command("demo")(demo_command)
app.command("serve-router")(serve_router)


@app.command("version")
def version() -> None:
    """Print the version."""
    print(__version__)


LISTS = ("--producer", "--consumer")
"""Options that take one or more files."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits."""
    app(args=spread_lists(sys.argv[1:] if argv is None else argv))


def spread_lists(argv: Sequence[str]) -> list[str]:
    """``--producer a b`` as ``--producer a --producer b``: the form the option parser knows.

    >>> spread_lists(["plan", "--producer", "a", "b", "--json"])
    ['plan', '--producer', 'a', '--producer', 'b', '--json']
    """
    out: list[str] = []
    repeating: str | None = None
    fresh = False
    for word in argv:
        if word.startswith("-") and word != "-":
            name = word.split("=", 1)[0]
            repeating = name if name in LISTS else None
            fresh = "=" not in word
        elif repeating is not None:
            if not fresh:
                out.append(repeating)
            fresh = False
        out.append(word)
    return out
