"""Starts engines in a fraction of the time: one warm process imports vLLM once, then forks for each engine.

Most of the start of a tiny model's engine is importing torch and vLLM. The *forge* is a process that has done that and
nothing else: it has made no engine, imported no Mooncake (which starts threads when it is imported) and has exactly one
thread of its own, which it checks before every fork. A forked engine is a process like any other: own pid, own
environment, own log, own end.

The driver sends a specification and the three standard streams of the engine-to-be over a socket pair; the forge
answers with the pid. The driver then watches the engine by a pidfd, so a pid that was used again is never signalled.
"""

import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NoReturn

import msgspec

FORGE_TIMEOUT_S: Final = 300.0
_MESSAGE_LIMIT: Final = 1 << 16

_WARM_MODULES: Final = (
    "transformers",
    "vllm",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.lfm2",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)


class Order(msgspec.Struct, frozen=True):
    """What the driver asks for: one process with this environment on top of the forge's own."""

    environment: dict[str, str]
    command: tuple[str, ...] = ()
    """A command of vLLM's, without the word ``vllm``; nothing asks for an engine that is driven over its streams."""


class ForgedProcess:
    """A process that is not our child: watched and signalled through a pidfd."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None while it runs, else 0: the status of a process that is not our child cannot be known."""
        return 0 if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return 0

    def send_signal(self, how: int) -> None:
        """Signal the process; nothing happens when it has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, how)
        except ProcessLookupError:
            return


class EngineForge:
    """The driver's side: starts the warm process and asks it for engines."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.testing.engine_forge", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(FORGE_TIMEOUT_S)
        self._socket = ours
        self._log = log

    def fork(self, environment: Mapping[str, str], log: IO[bytes], *, command: Sequence[str] = ()) -> ForgedProcess:
        """A fresh engine process that reads its specification from the ``stdin`` returned; or ``vllm COMMAND``."""
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        try:
            message = msgspec.json.encode(Order(dict(environment), tuple(command)))
            socket.send_fds(self._socket, [message], [stdin_read, stdout_write, log.fileno()])
        finally:
            os.close(stdin_read)
            os.close(stdout_write)
        answer = self._socket.recv(_MESSAGE_LIMIT)
        if not answer:
            raise OSError(f"the forge has ended; see {self._log}")
        return ForgedProcess(int(answer), os.fdopen(stdin_write, "wb"), os.fdopen(stdout_read, "rb"))

    def close(self) -> None:
        """End the warm process; engines that it forked go on."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> "EngineForge":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def main() -> NoReturn:
    """The warm process: import, then fork on request until the driver closes the socket."""
    import importlib

    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in _WARM_MODULES:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended engines leave no zombies; the driver watches them itself
    while True:
        message, streams, _, _ = socket.recv_fds(channel, _MESSAGE_LIMIT, 3)
        if not message:
            os._exit(0)  # unloading everything that was imported would take seconds
        _check_one_thread()
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become_engine(msgspec.json.decode(message, type=Order), streams)
        for stream in streams:
            os.close(stream)
        channel.send(str(pid).encode())


def _check_one_thread() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the forge has {threads} threads: a fork would copy their locks but not them")


def _become_engine(order: Order, streams: list[int]) -> NoReturn:
    """In the forked process: never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(order.environment)
        random.seed()  # else all engines of one forge draw the same numbers
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        if order.command:
            from kvferry.testing.vllm_command import run_command

            run_command(order.command)
        else:
            from kvferry.testing.engine_process import main as engine_main

            engine_main()
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
