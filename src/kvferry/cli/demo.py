"""``kvferry demo``: the main job on this machine, checked to the last byte; exit status 0 only if all is right."""

import os
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console

from kvferry.cli.noise import engine_noise

TRANSPORTS = ("mooncake", "cma")


def demo_command(
    no_vllm: Annotated[bool, typer.Option("--no-vllm", help="Without vLLM: realistic layouts, every byte.")] = False,
    transport: Annotated[
        str | None, typer.Option(help="mooncake, or cma within this host; default: mooncake where it is installed.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run these cells or scenarios only; may be repeated.")] = None,
) -> None:
    """Join a prefill and a decode engine by kvferry and compare with one engine that does both."""
    if transport is None:
        transport = "mooncake" if find_spec("mooncake") else "cma"
    if transport not in TRANSPORTS:
        raise typer.BadParameter(f"{transport!r} is not one of {', '.join(TRANSPORTS)}", param_hint="--transport")
    # The engine's own log says nothing that the table does not; an operator's setting wins.
    os.environ.setdefault("GLOG_minloglevel", "3")
    console = Console(width=max(Console().width, 100))
    raise typer.Exit(_plain(transport, only, console) if no_vllm else _with_vllm(transport, only, console))


def _plain(transport: str, only: list[str] | None, console: Console) -> int:
    from kvferry.testing.demo_plain import run_plain_demo
    from kvferry.testing.scenarios import SCENARIOS

    names = _chosen(only, tuple(SCENARIOS))
    with engine_noise() as noise:
        status = run_plain_demo(names=names, transport=transport, console=console)
    if status and (said := noise.getvalue().strip()):
        typer.echo(f"what the processes said meanwhile:\n{said[-4000:]}", err=True)
    return status


def _with_vllm(transport: str, only: list[str] | None, console: Console) -> int:
    if find_spec("vllm") is None:
        raise typer.BadParameter("vLLM is not installed here: use 'make demo', or run with --no-vllm")
    from kvferry.testing.demo_vllm import CELLS, run_demo

    return run_demo(cells=_chosen(only, tuple(CELLS)), transport=transport, console=console)


def _chosen(only: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    wrong = [name for name in only or () if name not in known]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is not one of {', '.join(known)}", param_hint="--only")
    return tuple(only) if only else known
