"""``kvferry story``: what the engines of this host did with one transfer, in the words of the protocol's tables."""

from pathlib import Path
from typing import Annotated

import typer

from kvferry.ids import TransferId
from kvferry.protocol import Entry, render
from kvferry.runtime.stories import Answer, ask_stories

UNKNOWN = 1
"""Exit status when nobody knows the transfer."""


def story_command(
    transfer: Annotated[str, typer.Argument(metavar="TRANSFER_ID", help="The transfer, as the router named it.")],
    directory: Annotated[
        str, typer.Option("--dir", metavar="DIRECTORY", help="What the option debug_socket_dir of the engines says.")
    ],
) -> None:
    """Print the life of one transfer on each side that runs on this host."""
    answers = ask_stories(directory, TransferId(transfer))
    known = [answer for answer in answers if answer.events]
    if not known:
        asked = f"{len(answers)} runtimes were asked" if answers else f"no runtime answers in {directory}"
        if not Path(directory).is_dir():
            asked = f"there is no directory {directory}"
        typer.echo(f"kvferry story: nothing is known of {transfer}; {asked}", err=True)
        raise typer.Exit(UNKNOWN)
    typer.echo("\n\n".join(story_text(answer) for answer in known))


def story_text(answer: Answer) -> str:
    """One side's story, with a line that says whose."""
    entries = [Entry(one.at, one.event, one.state, one.actions) for one in answer.events]
    ago = -answer.events[0].at
    head = f"{answer.side} rank {answer.rank} of {answer.engine}@{answer.epoch[:8]}, from {ago:.1f} s ago"
    return f"{head}\n{render(entries)}"
