"""The debug door of one runtime: a Unix socket that tells the life of a transfer on this side, when asked.

Off unless a directory is named. The directory must be the running user's own and closed to all others (0700), since
whoever may connect may ask. One line in, a transfer id, or nothing for all that are open; one JSON object out. Requests
are short, few at a time and timed, so a client that hangs costs one of a few slots for a second. Sockets that a killed
process left are taken away by whoever starts next: a socket that refuses connections has no owner.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvferry.errors import ConfigError, ConfigReason
from kvferry.ids import TransferId
from kvferry.protocol import Story
from kvferry.runtime.sides import Local

logger = logging.getLogger(__name__)

Role = Literal["producer", "consumer"]

SUFFIX: Final = ".kvferry"
MAX_LINE: Final = 1024
MAX_CLIENTS: Final = 8
CLIENT_TIMEOUT: Final = 1.0


class Event(msgspec.Struct, frozen=True):
    """One entry of a story."""

    at: float
    """Seconds before the answer was given; negative."""
    event: str
    state: str
    actions: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True):
    """What one runtime has to tell of one transfer."""

    engine: str
    epoch: str
    side: Role
    rank: int
    transfer: str
    events: tuple[Event, ...]
    """Oldest first; empty when nothing is known of it."""
    open: tuple[str, ...] = ()
    """When no transfer was named: those that are not over on this side, of the newest ones."""


class StoryDoor:
    """The socket of one runtime. Opened, used and closed on its loop."""

    def __init__(self, local: Local, role: Role, story: Story, *, clock: Callable[[], float]) -> None:
        self._local = local
        self._role = role
        self._story = story
        self._clock = clock
        """That by which the story is dated."""
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def open(self, directory: str | None) -> None:
        """Listen in ``directory``; does nothing when it is ``None``."""
        if directory is None:
            return
        folder = _own_directory(directory)
        _sweep(folder)
        path = folder / f"{self._role}-{self._local.index}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        try:
            self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_LINE)
        except OSError as error:
            raise ConfigError(
                ConfigReason.INVALID_VALUE, f"debug_socket_dir {directory!r}: cannot listen there: {error.strerror}"
            ) from error
        self._path = path

    async def close(self) -> None:
        """Take the socket away; safe to call twice."""
        server, self._server = self._server, None
        if server is None or self._path is None:
            return
        server.close()
        for client in self._clients:
            client.cancel()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._clients) >= MAX_CLIENTS:
            writer.close()
            return
        self._clients.add(task)
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT):
                line = await reader.readline()
                writer.write(msgspec.json.encode(self._answer(line)))
                await writer.drain()
        except (TimeoutError, ValueError, OSError) as error:
            logger.debug("a client of the debug socket is dropped: %s", error)
        finally:
            self._clients.discard(task)
            writer.close()

    def _answer(self, line: bytes) -> Answer:
        transfer = read_line(line)
        now = self._clock()
        events = tuple(Event(one.at - now, one.event, one.state, one.actions) for one in self._story.of(transfer))
        here = self._local.incarnation
        opened = () if transfer else self._story.open
        return Answer(here.engine_id, here.epoch, self._role, self._local.index, transfer, events, opened)


def read_line(line: bytes) -> TransferId:
    """What a client of the door asks about; any bytes are a name, if of nothing."""
    return TransferId(line.decode("utf-8", "replace").strip())


def ask_stories(directory: str, transfer: TransferId | None, *, timeout: float = 3.0) -> list[Answer]:
    """What every runtime with a socket in ``directory`` knows of a transfer; blocks for a moment each.

    Without a transfer: which ones are open there.
    """
    answers: list[Answer] = []
    for path in _sockets(Path(directory)):
        # A process that is stopped, or gone, answers nothing; the others do.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            answers.append(_ask(path, transfer or TransferId(""), timeout))
    return sorted(answers, key=lambda one: (one.side != "producer", one.engine, one.rank, one.epoch))


def _ask(path: Path, transfer: TransferId, timeout: float) -> Answer:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout)
        client.connect(str(path))
        client.sendall(transfer.encode() + b"\n")
        data = bytearray()
        while chunk := client.recv(65_536):
            data += chunk
    return msgspec.json.decode(data, type=Answer)


def _own_directory(directory: str) -> Path:
    folder = Path(directory)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(
            ConfigReason.INVALID_VALUE, f"debug_socket_dir {directory!r}: {error.strerror or error}"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            ConfigReason.INVALID_VALUE,
            f"debug_socket_dir {directory!r} must belong to the user that runs the engine and be closed to others "
            f"(mode 0700), it has owner {found.st_uid} and mode {mode:04o}",
        )
    return folder


def _sockets(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_socket())


def _sweep(folder: Path) -> None:
    """Take away sockets that nobody listens on any more."""
    for path in _sockets(folder):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.debug("socket %s is left alone: %s", path, error)
