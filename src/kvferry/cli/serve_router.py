"""``kvferry serve-router``: options in, one frozen configuration out, then uvicorn.

It ends with status 2 for options that cannot be meant, 1 for an address that cannot be listened on, 0 after a signal.
"""

import contextlib
import errno
import logging
import os
import socket
from enum import StrEnum
from typing import Annotated

import typer
import uvicorn

from kvferry.control import find_secret
from kvferry.errors import ConfigError
from kvferry.router import Cooldown, Decode, Patience, Prefill, RouterConfig, build_app


class LogLevel(StrEnum):
    """Python's names."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_PATIENCE = Patience()
_COOLDOWN = Cooldown()
_MB = 1_000_000


def serve_router(  # one parameter for each option
    prefill: Annotated[
        list[str],
        typer.Option(
            help="A prefill engine: http://HOST:PORT, or http://HOST:PORT,BOOTSTRAP_PORT (default 8998). Repeat."
        ),
    ],
    decode: Annotated[list[str], typer.Option(help="A decode engine: http://HOST:PORT. Repeat.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    connect_timeout: Annotated[
        float, typer.Option(help="Seconds to reach an engine, or to hear of its bootstrap service.")
    ] = _PATIENCE.connect,
    prefill_timeout: Annotated[float, typer.Option(help="Seconds of silence of a prefill engine.")] = _PATIENCE.prefill,
    decode_timeout: Annotated[float, typer.Option(help="Seconds of silence of a decode engine.")] = _PATIENCE.decode,
    cooldown: Annotated[
        float, typer.Option(help="Seconds for which a failed engine is left alone at first.")
    ] = _COOLDOWN.first,
    longest_cooldown: Annotated[
        float, typer.Option(help="Longest such pause; it doubles with each failure in a row.")
    ] = _COOLDOWN.longest,
    rounds: Annotated[int, typer.Option(help="How often one prompt may be prefilled.")] = 3,
    copies: Annotated[
        int, typer.Option(help="Prefill each prompt at so many engines; decode tries the next when one fails.")
    ] = 1,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Refuse a longer request of a client.")] = 256,
    decode_alone: Annotated[
        bool, typer.Option(help="Let decode engines compute the prompt when no prefill engine can.")
    ] = False,
    secret_file: Annotated[
        str | None, typer.Option(help="File of the deployment's shared secret; default: KVFERRY_SECRET, else none.")
    ] = None,
    bootstrap_ca: Annotated[
        str | None, typer.Option(help="PEM file of the authorities by which https addresses are believed.")
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="How much is said.")] = LogLevel.INFO,
) -> None:
    """Join prefill and decode engines behind one OpenAI address."""
    try:
        config = RouterConfig(
            prefills=tuple(Prefill.parse(text) for text in prefill),
            decodes=tuple(Decode.parse(text) for text in decode),
            host=host,
            port=port,
            patience=Patience(
                connect=connect_timeout,
                prefill=prefill_timeout,
                decode=decode_timeout,
                control=max(_PATIENCE.control, connect_timeout),
            ),
            cooldown=Cooldown(first=cooldown, longest=longest_cooldown),
            rounds=rounds,
            copies=copies,
            max_body=max_body_mb * _MB,
            decode_alone=decode_alone,
            secret=find_secret(secret_file),
            bootstrap_ca=bootstrap_ca,
        )
        app = build_app(config)
    except ConfigError as error:
        typer.echo(f"kvferry serve-router: {error}", err=True)
        raise typer.Exit(2) from error
    logging.basicConfig(level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # httpx logs every engine request at INFO; the router has its own line for each client request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with _listen(config.host, config.port) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level=log_level.value, access_log=False))
        logging.getLogger(__name__).info("the router listens on %s", _url(listening))
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """The listening socket. Bound here, so that an address that is not to be had is said in one line."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "choose another --port, or stop what listens there" if taken else "check --host and --port"
        said = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        typer.echo(f"kvferry serve-router: cannot listen on {host} port {port}: {said}; {remedy}", err=True)
        raise typer.Exit(1) from error
    except UnicodeError as error:  # a name that no resolver is asked for: an empty label, or one over 63 characters
        typer.echo(f"kvferry serve-router: --host {host!r} is no host name", err=True)
        raise typer.Exit(2) from error


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
