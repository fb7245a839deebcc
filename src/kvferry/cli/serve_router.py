"""``kvferry serve-router``: options in, one frozen configuration out, then uvicorn."""

import logging
from enum import StrEnum
from typing import Annotated

import typer
import uvicorn

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
    connect_timeout: Annotated[float, typer.Option(help="Seconds to reach an engine.")] = _PATIENCE.connect,
    prefill_timeout: Annotated[float, typer.Option(help="Seconds to compute a prompt.")] = _PATIENCE.prefill,
    decode_timeout: Annotated[float, typer.Option(help="Seconds of silence of a decode engine.")] = _PATIENCE.decode,
    cooldown: Annotated[
        float, typer.Option(help="Seconds for which a failed engine is left alone at first.")
    ] = _COOLDOWN.first,
    longest_cooldown: Annotated[
        float, typer.Option(help="Longest such pause; it doubles with each failure in a row.")
    ] = _COOLDOWN.longest,
    rounds: Annotated[int, typer.Option(help="How often one prompt may be prefilled.")] = 3,
    decode_alone: Annotated[
        bool, typer.Option(help="Let decode engines compute the prompt when no prefill engine can.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="How much is said.")] = LogLevel.INFO,
) -> None:
    """Join prefill and decode engines behind one OpenAI address."""
    try:
        config = RouterConfig(
            prefills=tuple(Prefill.parse(text) for text in prefill),
            decodes=tuple(Decode.parse(text) for text in decode),
            host=host,
            port=port,
            patience=Patience(connect=connect_timeout, prefill=prefill_timeout, decode=decode_timeout),
            cooldown=Cooldown(first=cooldown, longest=longest_cooldown),
            rounds=rounds,
            decode_alone=decode_alone,
        )
    except ConfigError as error:
        typer.echo(f"kvferry serve-router: {error}", err=True)
        raise typer.Exit(2) from error
    logging.basicConfig(level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # httpx logs every engine request at INFO; the router has its own line for each client request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(build_app(config), host=config.host, port=config.port, log_level=log_level.value, access_log=False)
