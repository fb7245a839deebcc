"""The ``kvferry`` command: one Typer app, one file for each subcommand.

A subcommand is imported when it is called, so that ``kvferry plan`` does not wait for the router's web server.
"""

import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TextIO

import typer

from kvferry import __version__

COMMANDS = {
    "plan": "kvferry.cli.plan:plan_command",
    "inspect": "kvferry.cli.inspect:inspect_command",
    "check": "kvferry.cli.check:check_command",
    "explain": "kvferry.cli.explain:explain_command",
    "layout": "kvferry.cli.layout:layout_app",
    "doctor": "kvferry.cli.doctor:doctor_command",
    "demo": "kvferry.cli.demo:demo_command",
    "serve-router": "kvferry.cli.serve_router:serve_router",
    "story": "kvferry.cli.story:story_command",
}
"""Where each subcommand is: module and function, or module and app for one that has subcommands of its own."""


LISTS = ("--producer", "--consumer")
"""Options that take one or more files."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        words[0] = "version"
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file's name may hold bytes that are no text, and a terminal may know few characters.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            make_app(words[0] if words else None)(args=spread_lists(words))
        finally:
            sys.stdout.flush()
    except OSError as error:
        # Nobody reads any more, or the disk is full. What is left unwritten must not be tried again at exit.
        sys.stdout = _nowhere()
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"kvferry: {error}")


def _nowhere() -> TextIO:
    """For a stream that the caller has closed; Python leaves ``None`` there."""
    return open(os.devnull, "w", encoding="utf-8")


def make_app(command: str | None) -> typer.Typer:
    """The app with the one ``command``, or with all when that is none of them (``--help``, a misspelling)."""
    app = typer.Typer(
        name="kvferry",
        help="KV-cache transfer between LLM prefill and decode workers that cannot corrupt.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command("version")(version)
    for name in [command] if command in COMMANDS else COMMANDS:
        found = _load(COMMANDS[name])
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def version() -> None:
    """Print the version."""
    print(__version__)


def _load(place: str) -> Callable[..., object] | typer.Typer:
    module, name = place.split(":")
    found: Callable[..., object] | typer.Typer = getattr(import_module(module), name)
    return found


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
