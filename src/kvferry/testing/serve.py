"""Two ``vllm serve`` processes joined by kvferry, and a router in front: a deployment on one machine.

>>> with serve_pair(ServePair(model, logs=folder)) as pair:                          # doctest: +SKIP
...     with serve_router(pair, log=folder / "router.log") as url:
...         httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "A lighthouse", "max_tokens": 8})

Other tests drive engines in process (:mod:`kvferry.testing.engines`), which starts faster and shows the scheduler's
books. Here the commands are those of an operator: API servers, engine cores and the router are processes of their own,
and all that is known of them is what they answer over HTTP and write into their logs.

Each command leads a process group of its own, so that a kill reaches the engine core too, and nothing is left behind.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import msgspec

from kvferry.testing.engine_forge import EngineForge, ForgedProcess
from kvferry.testing.engines import CPU_ENVIRONMENT
from kvferry.testing.pair import FERRY, WATCHED_UPSTREAM
from kvferry.testing.ports import free_port
from kvferry.testing.transfer_report import layouts_beside

SERVED_NAME: Final = "tiny"
"""What clients call the model."""

START_TIMEOUT_S: Final = 500.0
"""A pair starts in 130-146 s on two quiet cores."""

_STOP_TIMEOUT_S: Final = 20.0
_TAIL_LINES: Final = 30

SERVE_ENVIRONMENT: Final = {
    # Here the engine core is a process beside the API server, as in a deployment.
    name: value
    for name, value in CPU_ENVIRONMENT.items()
    if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
}


class ServerError(Exception):
    """A server did not come up; the end of its log is in the message."""


class Server:
    """A server's process group and its log."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        url: str,
        log: Path,
        environment: Mapping[str, str],
        forge: EngineForge | None = None,
    ) -> None:
        """With a ``forge``, which has imported vLLM, ``command`` (a ``vllm ...``) runs in a process forked from it."""
        self.name = name
        self.command = tuple(command)
        self.url = url
        self.log = log
        self._process = _start(self.command, log, environment=environment, forge=forge)

    @property
    def pid(self) -> int:
        """Of the process that leads the group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether that process still runs."""
        return self._process.poll() is None

    @property
    def healthy(self) -> bool:
        """Whether ``/health`` answers 200 now."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def wait_healthy(self, timeout: float = START_TIMEOUT_S) -> None:
        """Poll until it is; raise :class:`ServerError` when the process ends first, or after ``timeout``."""
        deadline = time.monotonic() + timeout
        while not self.healthy:
            if not self.alive:
                raise ServerError(f"{self.name} ended with status {self._process.poll()}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} is not healthy after {timeout:.0f} s:\n{self.tail()}")
            time.sleep(0.1)

    def tail(self) -> str:
        """The end of the log, and where the rest is."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([*lines[-_TAIL_LINES:], f"(the whole log: {self.log})"])

    def kill(self) -> None:
        """SIGKILL to the whole group, as when a host loses power."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def begin_stop(self) -> None:
        """SIGINT, as from a terminal, without waiting; children are the server's own to stop."""
        if self.alive:
            self._process.send_signal(signal.SIGINT)

    def stop(self, timeout: float = _STOP_TIMEOUT_S) -> None:
        """Stop in order, then by force whatever of the group is left. Safe to call twice."""
        if self.alive:
            self.begin_stop()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()


def _start(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str], forge: EngineForge | None
) -> "subprocess.Popen[bytes] | ForgedProcess":
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        if forge is not None:
            forged = forge.fork(environment, output, command=command[1:])
            forged.stdin.close()
            forged.stdout.close()
            return forged
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


Role = Literal["prefill", "decode"]
Connector = Literal["ferry", "upstream"]

_CONNECTORS: Final[Mapping[Connector, Mapping[str, str]]] = {"ferry": FERRY, "upstream": WATCHED_UPSTREAM}
_OPTIONS: Final[Mapping[Connector, Mapping[str, Any]]] = {
    "ferry": {"transport": "mooncake", "mooncake_protocol": "tcp"},
    "upstream": {"mooncake_protocol": "tcp"},
}


def reporting(connector: Connector, folder: Path) -> dict[str, Any]:
    """Options of an engine, Mooncake over TCP, that tells its transfers in ``folder``, but for what vLLM's sends."""
    report = folder / "transfers.jsonl"
    extra = {"layout_dump": layouts_beside(report)} if connector == "ferry" else {}
    return {"mooncake_protocol": "tcp", "transfer_report": str(report), **extra}


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """One ``vllm serve`` of a deployment."""

    name: str
    """Of its log."""
    role: Role
    model: Path
    logs: Path
    connector: Connector = "ferry"
    dtype: str = "float32"
    arguments: tuple[str, ...] = ("--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "8")
    """Of the command, beside those that make it one of a pair."""
    options: Mapping[str, Any] | None = None
    """``kv_connector_extra_config``; Mooncake over TCP by default."""
    failure_policy: str = "fail"
    """``kv_load_failure_policy``; vLLM's default is ``fail``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of :data:`SERVE_ENVIRONMENT`."""

    def command(self, port: int) -> list[str]:
        """The command line."""
        transfer = {
            **_CONNECTORS[self.connector],
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_load_failure_policy": self.failure_policy,
            "kv_connector_extra_config": dict(_OPTIONS[self.connector] if self.options is None else self.options),
        }
        return [
            *(beside_python("vllm"), "serve", str(self.model), "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype, "--enforce-eager"),
            *("--kv-transfer-config", msgspec.json.encode(transfer).decode()),
            *self.arguments,
        ]

    def start(self, port: int, bootstrap: int, *, forge: EngineForge | None = None) -> "Server":
        """Start it, without waiting, on these ports: of its API and of its bootstrap service."""
        environment = {**SERVE_ENVIRONMENT, **self.environment, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap)}
        url, log = f"http://127.0.0.1:{port}", self.logs / f"{self.name}.log"
        return Server(self.name, self.command(port), url=url, log=log, environment=environment, forge=forge)


@dataclass(frozen=True, slots=True)
class Side:
    """What one engine of a pair has of its own."""

    arguments: tuple[str, ...] = ()
    """After those of both."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """On top of those of both."""


@dataclass(frozen=True, slots=True)
class ServePair:
    """What to start: one model served twice, and how the two are joined."""

    model: Path
    logs: Path
    dtype: str = "float32"
    arguments: tuple[str, ...] = ("--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "8")
    """Of both commands, beside those that make a pair of them."""
    options: Mapping[str, Any] = field(default_factory=lambda: dict(_OPTIONS["ferry"]))
    """``kv_connector_extra_config`` of both."""
    failure_policy: str = "fail"
    """``kv_load_failure_policy`` of the decode engine; vLLM's default is ``fail``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of both commands, on top of :data:`SERVE_ENVIRONMENT`."""
    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)

    def spec(self, role: Role) -> ServeSpec:
        """One side."""
        side = self.prefill if role == "prefill" else self.decode
        return ServeSpec(
            role,
            role,
            self.model,
            self.logs,
            dtype=self.dtype,
            arguments=(*self.arguments, *side.arguments),
            options={**self.options, **side.options},
            failure_policy=self.failure_policy,
            environment=self.environment,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """A running engine."""

    server: Server
    bootstrap_port: int
    """Of its bootstrap service, on this host, where it is a prefill engine."""


@dataclass(frozen=True, slots=True)
class ServedPair:
    """Two running engines."""

    prefill: Server
    decode: Server
    bootstrap_port: int
    """Of the prefill engine's bootstrap service, on this host."""

    @classmethod
    def of(cls, prefill: Served, decode: Served) -> "ServedPair":
        """Two of :func:`serve_engines`."""
        return cls(prefill.server, decode.server, prefill.bootstrap_port)


@contextmanager
def serve_engines(
    specs: Sequence[ServeSpec], *, timeout: float = START_TIMEOUT_S, forge: EngineForge | None = None
) -> Iterator[tuple[Served, ...]]:
    """Start all, wait until all are healthy, and stop all at the end, whatever happened between."""
    with ExitStack() as stack:
        served = []
        for spec in specs:
            bootstrap = free_port()
            server = spec.start(free_port(), bootstrap, forge=forge)
            stack.callback(server.stop)
            served.append(Served(server, bootstrap))
        for one in served:  # run first at the end: all shut down side by side
            stack.callback(one.server.begin_stop)
        for one in served:
            one.server.wait_healthy(timeout)
        yield tuple(served)


@contextmanager
def serve_pair(pair: ServePair, *, timeout: float = START_TIMEOUT_S) -> Iterator[ServedPair]:
    """Both engines of a pair."""
    with serve_engines([pair.spec("prefill"), pair.spec("decode")], timeout=timeout) as (prefill, decode):
        yield ServedPair.of(prefill, decode)


@contextmanager
def serve_router(pair: ServedPair, *, log: Path, arguments: Sequence[str] = ()) -> Iterator[str]:
    """``kvferry serve-router`` in front of a pair; yields its URL."""
    prefills = [(pair.prefill.url, pair.bootstrap_port)]
    with serve_router_over(prefills, [pair.decode.url], log=log, arguments=arguments) as url:
        yield url


@contextmanager
def serve_router_over(
    prefills: Sequence[tuple[str, int]], decodes: Sequence[str], *, log: Path, arguments: Sequence[str] = ()
) -> Iterator[str]:
    """``kvferry serve-router`` in front of any engines, of which it must find some alive; yields its URL.

    ``prefills``: their URLs, each with the port of its bootstrap service.
    """
    port = free_port()
    command = [
        *(beside_python("kvferry"), "serve-router", "--port", str(port)),
        *(word for url, bootstrap in prefills for word in ("--prefill", f"{url},{bootstrap}")),
        *(word for url in decodes for word in ("--decode", url)),
        *arguments,
    ]
    with _router(command, port, log) as url:
        yield url


@contextmanager
def serve_vllm_router(pair: ServedPair, command: Path, *, log: Path, arguments: Sequence[str] = ()) -> Iterator[str]:
    """PyPI's ``vllm-router`` (its ``command``, from an environment of its own) in front of a pair; yields its URL."""
    port = free_port()
    whole = [
        *(str(command), "--vllm-pd-disaggregation", "--kv-connector", "mooncake", "--policy", "round_robin"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--prefill", pair.prefill.url, str(pair.bootstrap_port), "--decode", pair.decode.url),
        *arguments,
    ]
    with _router(whole, port, log) as url:
        yield url


@contextmanager
def _router(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    router = Server("router", command, url=f"http://127.0.0.1:{port}", log=log, environment={})
    try:
        router.wait_healthy(60)
        yield router.url
    finally:
        router.stop()


def beside_python(name: str) -> str:
    """A command of this interpreter's environment, whether or not the environment is active."""
    return str(Path(sys.executable).with_name(name))
