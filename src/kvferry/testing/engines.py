"""Real vLLM engines, each in a process of its own, driven from here.

>>> with start_engines([prefill_spec, decode_spec], logs=folder) as (prefill, decode):   # doctest: +SKIP
...     first = prefill.generate(prompt, max_tokens=1, kv_transfer_params={...})

Engines are started together and waited for together; with a forge (:mod:`kvferry.testing.engine_forge`) the importing
is done once for all. ``submit`` returns a future, so many requests can be under way; ``kill`` is for tests of what the
other side does then.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from kvferry.testing.engine_forge import EngineForge, ForgedProcess
from kvferry.testing.engine_wire import (
    Abort,
    Answer,
    CacheFacts,
    Call,
    Command,
    Counters,
    Done,
    EngineFacts,
    EngineSpec,
    Failed,
    Generate,
    Generation,
    Inspect,
    InspectCaches,
    ReadCounters,
    Reply,
    ResetPrefixCache,
    Score,
    Scores,
    Shutdown,
    TensorFacts,
)

CPU_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker in the process that we drive
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "INFO",
}
"""What vLLM needs on a machine without an accelerator, shared by several engines, without a network."""

START_TIMEOUT_S: Final = 300.0
CALL_TIMEOUT_S: Final = 120.0


class EngineError(Exception):
    """An engine could not be built, died, or refused a command; the log's path is in the message."""


class Engine:
    """One engine's process, seen from the driver."""

    def __init__(self, spec: EngineSpec, log: Path, forge: EngineForge | None = None) -> None:
        self.spec = spec
        self.log = log
        self.started_in: float | None = None
        self._began = time.monotonic()
        self._closing = False
        self._lock = threading.Lock()
        self._number = 0
        self._pending: dict[int, Future[Answer]] = {}
        self._ready: Future[Answer] = Future()
        self._process = _spawn(spec, log, forge)
        self._reader = threading.Thread(target=self._read, name=f"replies of {spec.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Return once the engine serves; raise :class:`EngineError` if it never will."""
        _checked(self._ready, timeout, self)

    def submit(self, command: Command) -> "Future[Answer]":
        """Send a command; the future is set by its reply, or fails when the engine dies."""
        future: Future[Answer] = Future()
        with self._lock:
            self._number += 1
            self._pending[self._number] = future
            line = msgspec.json.encode(Call(self._number, command)) + b"\n"
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except OSError as error:
                del self._pending[self._number]
                raise EngineError(f"{self.spec.name} is gone; see {self.log}") from error
        return future

    def generate(self, prompt: Sequence[int], *, max_tokens: int, request_id: str, **options: Any) -> Generation:
        """Generate and wait. ``options`` are further fields of :class:`Generate`."""
        command = Generate(prompt=list(prompt), max_tokens=max_tokens, request_id=request_id, **options)
        return cast(Generation, self.ask(command))

    def score(self, prompt: Sequence[int], continuation: Sequence[int], *, request_id: str) -> list[float]:
        """Log probabilities of ``continuation`` under teacher forcing."""
        command = Score(prompt=list(prompt), continuation=list(continuation), request_id=request_id)
        return cast(Scores, self.ask(command)).logprobs

    def abort(self, request_id: str) -> bool:
        """Abort a running request; says whether it was running."""
        return cast(Done, self.ask(Abort(request_id=request_id))).value

    def inspect(self) -> EngineFacts:
        """The engine's books, as of now."""
        return cast(EngineFacts, self.ask(Inspect()))

    def inspect_caches(self) -> list[dict[str, TensorFacts]]:
        """The cache tensors of each rank, by layer; of an engine that has nothing to do."""
        return cast(CacheFacts, self.ask(InspectCaches())).ranks

    def count(self, name: str, **labels: str) -> float:
        """The sum of vLLM's counters of this name (without ``_total``) that have these labels."""
        found = cast(Counters, self.ask(ReadCounters())).counters
        return sum(one.value for one in found if one.name == name and labels.items() <= one.labels.items())

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; vLLM refuses while blocks are held."""
        return cast(Done, self.ask(ResetPrefixCache())).value

    def ask(self, command: Command, timeout: float = CALL_TIMEOUT_S) -> Answer:
        """Send a command and wait for its answer."""
        return _checked(self.submit(command), timeout, self)

    def wait_for_free_blocks(self, count: int, timeout: float) -> EngineFacts:
        """Poll until ``count`` blocks are free; raise :class:`EngineError` after ``timeout``."""
        deadline = time.monotonic() + timeout
        while True:
            facts = self.inspect()
            if facts.free_blocks >= count:
                return facts
            if time.monotonic() > deadline:
                raise EngineError(f"{self.spec.name}: {facts.free_blocks} of {count} blocks free after {timeout} s")
            time.sleep(0.02)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process; SIGKILL also waits for its end."""
        self._process.send_signal(how)
        if how == signal.SIGKILL:
            self._process.wait()

    def begin_close(self) -> None:
        """Ask the engine to shut down, without waiting."""
        if self.alive and not self._closing:
            self._closing = True
            try:
                self.submit(Shutdown())
            except EngineError:
                return

    def close(self, timeout: float = 20.0) -> None:
        """Shut down in order; kill when that takes too long. Safe to call twice."""
        self.begin_close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(Reply)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = decoder.decode(line)
            if reply.number == 0:
                self.started_in = time.monotonic() - self._began
                self._ready.set_result(reply.answer) if not self._ready.done() else self._fail_all(reply.answer)
            else:
                with self._lock:
                    future = self._pending.pop(reply.number)
                future.set_result(reply.answer)
        self._fail_all(Failed("the process has ended"))

    def _fail_all(self, answer: Answer) -> None:
        with self._lock:
            futures = [*self._pending.values()]
            self._pending.clear()
        if not self._ready.done():
            futures.append(self._ready)
        for future in futures:
            future.set_result(answer)


def _spawn(spec: EngineSpec, log: Path, forge: EngineForge | None) -> "subprocess.Popen[bytes] | ForgedProcess":
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**CPU_ENVIRONMENT, **spec.environment}
    process: subprocess.Popen[bytes] | ForgedProcess
    with log.open("wb") as errors:
        if forge is not None:
            process = forge.fork(environment, errors)
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.testing.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
            )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.flush()
    return process


def warm_forge(log: Path) -> EngineForge:
    """A forge for engines of this machine; use it as a context manager."""
    return EngineForge(CPU_ENVIRONMENT, log)


def _checked(future: "Future[Answer]", timeout: float, engine: Engine) -> Answer:
    try:
        answer = future.result(timeout)
    except TimeoutError as error:
        raise EngineError(f"{engine.spec.name}: no answer in {timeout:.0f} s; see {engine.log}") from error
    if isinstance(answer, Failed):
        raise EngineError(f"{engine.spec.name}: {answer.error}; see {engine.log}")
    return answer


@contextmanager
def start_engines(
    specs: Sequence[EngineSpec], *, logs: Path, forge: EngineForge | None = None
) -> Iterator[tuple[Engine, ...]]:
    """Start all, wait for all, and shut all down at the end, whatever happened between.

    With a ``forge`` the engines are forked from it, else each imports vLLM for itself.
    """
    engines: list[Engine] = []
    try:
        for spec in specs:
            engines.append(Engine(spec, logs / f"{spec.name}.log", forge))
        for engine in engines:
            engine.wait_ready()
        yield tuple(engines)
    finally:
        for engine in engines:
            engine.begin_close()
        for engine in engines:
            engine.close()
