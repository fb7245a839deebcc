"""``kvferry doctor``: what this machine and these options will come to, looked at before a deployment depends on it.

Exit status 0 when nothing failed, 1 when something did, 2 for options that are refused.
"""

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.cli.noise import engine_noise

if TYPE_CHECKING:
    from kvferry.runtime.checkup import Checkup, Deployment

SERVE_PORT = 8997


def doctor_command(  # one parameter for each option
    config: Annotated[
        str, typer.Option(help="kv_connector_extra_config of the engine, as JSON. Options given here win over it.")
    ] = "{}",
    transport: Annotated[str | None, typer.Option(help="mooncake or cma.")] = None,
    protocol: Annotated[str | None, typer.Option(help="Of the Mooncake engine: tcp, rdma, ...")] = None,
    device: Annotated[str | None, typer.Option(help="Network devices for the Mooncake engine.")] = None,
    host: Annotated[str | None, typer.Option(help="Address or name to bind and to tell peers.")] = None,
    consumer_only: Annotated[bool, typer.Option(help="The engine consumes only: it serves no bootstrap.")] = False,
    peer: Annotated[
        str | None, typer.Option(help="HOST:PORT of a 'kvferry doctor --serve': send it a marker page too.")
    ] = None,
    upstream_peer: Annotated[
        str | None,
        typer.Option(metavar="URL", help="API of an engine under vLLM's own connector: compare it with upstream_peer."),
    ] = None,
    serve: Annotated[bool, typer.Option(help="Wait for marker pages of peers until interrupted.")] = False,
    serve_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for --serve; 0 takes a free one.")
    ] = SERVE_PORT,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Check protocol, addresses, ports, limits and permissions, and move a marker page through each transport."""
    # The engine's own log says nothing that the findings do not; an operator's setting wins.
    os.environ.setdefault("GLOG_minloglevel", "3")
    given = {"transport": transport, "mooncake_protocol": protocol, "device_name": device, "host": host}
    deployment = _deployment(config, given, produces=not consumer_only)
    if serve:
        _serve(deployment, serve_port)
        return
    from kvferry.runtime.checkup import examine

    to = None if peer is None else _address(peer)
    with engine_noise() as noise:
        checkup = examine(deployment, peer=to, upstream=upstream_peer)
    if as_json:
        print(json.dumps(checkup.to_json(), indent=2))
    else:
        _show(checkup)
    if not checkup.sound and (said := noise.getvalue().strip()):
        typer.echo(f"what the engine said meanwhile:\n{said[-4000:]}", err=True)
    raise typer.Exit(0 if checkup.sound else 1)


def _deployment(text: str, given: dict[str, Any], *, produces: bool) -> "Deployment":
    from kvferry.errors import ConfigError
    from kvferry.vllm.config import parse_config
    from kvferry.vllm.deployment import deployment_of

    try:
        extra = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--config") from error
    if not isinstance(extra, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--config")
    extra |= {name: value for name, value in given.items() if value is not None}
    try:
        return deployment_of(parse_config(extra), explicit=extra, produces=produces)
    except ConfigError as error:
        raise typer.BadParameter(error.message) from error


def _address(text: str) -> tuple[str, int]:
    from kvferry.errors import ConfigError
    from kvferry.vllm.config import split_address

    try:
        return split_address(text)
    except ConfigError as error:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT", param_hint="--peer") from error


def _serve(deployment: "Deployment", port: int) -> None:
    from kvferry.errors import ConfigError
    from kvferry.runtime.checkup import choices_of, local_addresses, serve_markers, tell_engine, way_of

    tell_engine(deployment)
    try:
        _, host = choices_of(deployment, local_addresses())
        with engine_noise():
            serve_markers((host.ip, port), way_of(deployment, host), lambda said: print(said, flush=True))
    except ConfigError as error:
        raise typer.BadParameter(error.message, param_hint="--host") from error
    except OSError as error:
        raise typer.BadParameter(f"port {port}: {error.strerror}", param_hint="--serve-port") from error
    except KeyboardInterrupt:
        return


def _show(checkup: "Checkup") -> None:
    from rich.markup import escape
    from rich.table import Table

    from kvferry.cli.output import console

    chosen = Table(title="chosen", title_justify="left", show_header=False)
    for one in checkup.choices:
        chosen.add_row(one.name, escape(one.value), escape(one.why))
    found = Table(title="found", title_justify="left", show_header=False)
    for finding in checkup.findings:
        advice = f"\nTo do: {finding.advice}." if finding.advice else ""
        found.add_row(finding.verdict.value, escape(finding.name), escape(finding.said + advice))
    if checkup.choices:
        console().print(chosen)
    console().print(found)
    print(_summary(checkup))


def _summary(checkup: "Checkup") -> str:
    from kvferry.runtime.checkup import Verdict

    warnings = sum(finding.verdict is Verdict.WARNING for finding in checkup.findings)
    if not checkup.sound:
        return "not sound: see what failed"
    if warnings:
        return f"nothing failed; {warnings} {'warning' if warnings == 1 else 'warnings'}"
    return "all that was looked at works"
