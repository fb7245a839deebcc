"""Two `vllm serve` processes joined by kvferry, and a router in front: a deployment on one machine.

>>> with serve_pair(ServePair.of(model, logs=folder)) as pair:                       # doctest: +SKIP
...     with serve_router(pair, log=folder / "router.log") as url:
...         httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "A lighthouse", "max_tokens": 8})

Other tests drive engines in process (:mod:`kvferry.testing.engines`), which starts faster and shows the scheduler's
books. Here the commands are those of an operator: API server, engine core and router are processes of their own, and
all that is known of them is what they answer over HTTP and write into their logs.

Each command leads a process group of its own, so that a kill reaches the engine core too, and nothing is left behind.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from kvferry.testing.engines import CPU_ENVIRONMENT
from kvferry.testing.pair import FERRY, free_port

SERVED_NAME: Final = "tiny"
"""What clients call the model."""

START_TIMEOUT_S: Final = 400.0
"""A pair starts in 130-146 s on two quiet cores."""

_STOP_TIMEOUT_S: Final = 20.0
_TAIL_LINES: Final = 30

SERVE_ENVIRONMENT: Final = {
    # vLLM's own choice is kept here: the engine core is a process beside the API server, as in a deployment.
    key: value
    for key, value in CPU_ENVIRONMENT.items()
    if key != "VLLM_ENABLE_V1_MULTIPROCESSING"
}


class ServeError(Exception):
    """A command did not come up; the end of its log is in the message."""


class Command:
    """A running command and its log."""

    def __init__(self, name: str, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the command itself, which leads the group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the command itself still runs."""
        return self._process.poll() is None

    def wait_for(self, condition: Callable[[], bool], *, what: str, timeout: float = START_TIMEOUT_S) -> None:
        """Poll until ``condition`` holds; raise :class:`ServeError` if the command ends first or takes too long."""
        deadline = time.monotonic() + timeout
        while not condition():
            if not self.alive:
                raise ServeError(f"{self.name} ended with status {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServeError(f"{self.name}: not {what} after {timeout:.0f} s:\n{self.tail()}")
            time.sleep(0.1)

    def tail(self) -> str:
        """The end of the log, and where the rest is."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([*lines[-_TAIL_LINES:], f"(all of it: {self.log})"])

    def kill(self) -> None:
        """SIGKILL to the whole group, as when a host loses power; returns when the command is gone."""
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def begin_stop(self) -> None:
        """SIGINT to the command, as from a terminal; its children are its own to stop."""
        if self.alive:
            self._process.send_signal(signal.SIGINT)

    def stop(self, timeout: float = _STOP_TIMEOUT_S) -> None:
        """Stop in order, then by force whatever of the group is left. Safe to call twice."""
        self.begin_stop()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def _signal_group(self, how: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, how)
        except ProcessLookupError:
            return


@dataclass(frozen=True, slots=True)
class ServePair:
    """What to start: one model served twice, and how the two are joined."""

    model: Path
    logs: Path
    dtype: str = "float32"
    arguments: tuple[str, ...] = ("--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "8")
    """Of both commands, beside those that make a pair of them."""

    options: Mapping[str, Any] = field(default_factory=lambda: {"transport": "mooncake", "mooncake_protocol": "tcp"})
    """``kv_connector_extra_config`` of both."""

    transfer: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``--kv-transfer-config`` of the decode engine."""

    def command(self, role: str, port: int) -> list[str]:
        """The `vllm serve` of one side."""
        extra = self.transfer if role == "kv_consumer" else {}
        transfer = {**FERRY, "kv_role": role, "kv_connector_extra_config": dict(self.options), **extra}
        return [
            str(beside_python("vllm")),
            "serve",
            str(self.model),
            *("--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", self.dtype, "--enforce-eager", "--kv-transfer-config", msgspec.json.encode(transfer).decode()),
            *self.arguments,
        ]


@dataclass(frozen=True, slots=True)
class Served:
    """One running engine."""

    command: Command
    url: str


@dataclass(frozen=True, slots=True)
class ServedPair:
    """Two running engines."""

    prefill: Served
    decode: Served
    bootstrap_port: int
    """Of the prefill engine's bootstrap service, on this host."""


@contextmanager
def serve_pair(pair: ServePair, *, timeout: float = START_TIMEOUT_S) -> Iterator[ServedPair]:
    """Start both, wait until both are healthy, and stop both at the end, whatever happened between."""
    bootstrap = free_port()
    environment = {**SERVE_ENVIRONMENT, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap)}
    with ExitStack() as stack:
        sides = []
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            port = free_port()
            log = pair.logs / f"{name}.log"
            command = Command(name, pair.command(role, port), log=log, environment=environment)
            stack.callback(command.stop)
            sides.append(Served(command, f"http://127.0.0.1:{port}"))
        stack.callback(_begin_stop, [side.command for side in sides])
        for side in sides:
            side.command.wait_for(lambda url=side.url: is_healthy(url), what="healthy", timeout=timeout)
        yield ServedPair(*sides, bootstrap_port=bootstrap)


@contextmanager
def serve_router(pair: ServedPair, *, log: Path, arguments: Sequence[str] = ()) -> Iterator[str]:
    """``kvferry serve-router`` in front of a pair; yields its URL."""
    port = free_port()
    line = [
        str(beside_python("kvferry")),
        "serve-router",
        *("--prefill", f"{pair.prefill.url},{pair.bootstrap_port}", "--decode", pair.decode.url),
        *("--port", str(port), *arguments),
    ]
    command = Command("router", line, log=log, environment={})
    url = f"http://127.0.0.1:{port}"
    try:
        command.wait_for(lambda: is_healthy(url), what="healthy", timeout=60)
        yield url
    finally:
        command.stop()


def is_healthy(url: str) -> bool:
    """Whether ``/health`` answers 200 now."""
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def beside_python(name: str) -> Path:
    """A command of this interpreter's environment, whether or not the environment is active."""
    return Path(sys.executable).with_name(name)


def _begin_stop(commands: Sequence[Command]) -> None:
    for command in commands:
        command.begin_stop()
