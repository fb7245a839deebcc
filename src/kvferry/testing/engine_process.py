"""The engine's process: ``python -m kvferry.testing.engine_process``, spec on the first line of standard input.

One thread reads commands; the main thread owns the engine and does everything else. The engine core and its one
worker live in this process, so the scheduler's books can be read without asking anybody. After a request is
answered the loop goes on stepping as long as the scheduler has anything left: a connector's send requests reach
its worker only in a step.

Standard output belongs to the protocol; whatever vLLM prints goes to standard error.
"""

import math
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, assert_never

import msgspec

from kvferry.testing.engine_facts import PromptSteps, inspect_caches, inspect_engine
from kvferry.testing.engine_requests import generation_of, prompt_logprobs_of, prompt_of, sampling_of, scoring
from kvferry.testing.engine_wire import (
    Abort,
    Answer,
    CacheFacts,
    Call,
    Command,
    Counter,
    Counters,
    Done,
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
)

if TYPE_CHECKING:
    from kvferry.testing.guesses import GuessRecord

_IDLE_WAIT_S = 0.002
"""How long the loop sleeps for a command when the scheduler has nothing to do."""

_YIELD_S = 0.001
"""As vLLM's own core process sleeps after a step in which nothing was computed, so that transfer threads get on."""


class EngineLoop:
    """Owns one vLLM engine: feeds it commands, steps it, answers."""

    def __init__(self, spec: EngineSpec, calls: "queue.SimpleQueue[Call | None]", out: BinaryIO) -> None:
        self._spec = spec
        self._calls = calls
        self._out = out
        self._guesses = _note_guesses(spec)
        self._engine = build_engine(spec)
        self._steps = PromptSteps(self._core.scheduler)
        self._open: dict[str, tuple[int, Generate | Score, float]] = {}
        self._internal_ids: dict[str, str] = {}

    def run(self) -> None:
        """Serve until ``Shutdown`` or the end of input."""
        self._reply(0, Done())
        while True:
            idle = not self._core.scheduler.has_requests()
            for call in self._drain(block=idle):
                if call is None or isinstance(call.command, Shutdown):
                    self._engine.engine_core.shutdown()
                    if call is not None:
                        self._reply(call.number, Done(not _is_anything_left(self._spec)))
                    return
                self._obey(call)
            for output in self._engine.step():
                if output.finished:
                    self._finish(output)
                else:
                    self._leave(output)
            if not self._core.scheduler.running and self._core.scheduler.has_requests():
                time.sleep(_YIELD_S)

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def _drain(self, *, block: bool) -> Iterator[Call | None]:
        try:
            yield self._calls.get(timeout=_IDLE_WAIT_S) if block else self._calls.get_nowait()
            while True:
                yield self._calls.get_nowait()
        except queue.Empty:
            return

    def _obey(self, call: Call) -> None:
        try:
            answer = self._answer(call.number, call.command)
        except Exception as error:  # noqa: BLE001 - the boundary of this process: the driver must hear of it
            answer = Failed(f"{type(error).__name__}: {error}")
        if answer is not None:
            self._reply(call.number, answer)

    def _answer(self, number: int, command: Command) -> Answer | None:
        match command:
            case Generate():
                self._start(number, command, prompt_of(command, self._core), sampling_of(command))
                return None
            case Score():
                prompt = {"prompt_token_ids": [*command.prompt, *command.continuation]}
                self._start(number, command, prompt, scoring())
                return None
            case Abort():
                return Done(self._abort(command.request_id))
            case Inspect():
                return inspect_engine(self._core)
            case InspectCaches():
                return CacheFacts(inspect_caches(self._core))
            case ReadCounters():
                return Counters(list(_counters(self._engine)))
            case ResetPrefixCache():
                return Done(self._engine.reset_prefix_cache())
            case Shutdown():
                raise AssertionError("the loop ends before a shutdown gets here")
            case _:
                assert_never(command)

    def _start(self, number: int, command: Generate | Score, prompt: dict[str, Any], sampling: Any) -> None:
        if command.request_id in self._open:
            raise ValueError(f"request {command.request_id} is already running")
        internal = self._engine.add_request(command.request_id, prompt, sampling)
        self._internal_ids[command.request_id] = internal
        self._open[command.request_id] = (number, command, time.monotonic())

    def _abort(self, request_id: str, tokens: Sequence[int] = ()) -> bool:
        if request_id not in self._open:
            if request_id in self._internal_ids:
                self._engine.engine_core.abort_requests([self._internal_ids[request_id]])
            return False
        number, command, began = self._open.pop(request_id)
        self._engine.abort_request([self._internal_ids[request_id]], internal=True)
        if isinstance(command, Generate):
            generation = Generation(
                request_id=request_id,
                tokens=list(tokens),
                logprobs=[],
                finish_reason="abort",
                cached_tokens=0,
                seconds=time.monotonic() - began,
            )
            self._reply(number, generation)
        else:
            self._reply(number, Failed("aborted"))
        return True

    def _leave(self, output: Any) -> None:
        """Abort a request that has got as many tokens as its client waits for."""
        _, command, _ = self._open.get(output.request_id, (0, None, 0.0))
        tokens = output.outputs[0].token_ids
        if isinstance(command, Generate) and command.abort_after is not None and len(tokens) >= command.abort_after:
            self._abort(output.request_id, tokens)

    def _finish(self, output: Any) -> None:
        entry = self._open.pop(output.request_id, None)
        if entry is None:
            return
        internal = self._internal_ids[output.request_id]
        guesses = self._guesses.take(internal) if self._guesses is not None else []
        steps = self._steps.take(internal)
        number, command, began = entry
        if isinstance(command, Score):
            self._reply(number, Scores(prompt_logprobs_of(output, len(command.prompt))))
        else:
            self._reply(number, generation_of(output, time.monotonic() - began, guesses=guesses, prompt_steps=steps))

    def _reply(self, number: int, answer: Answer) -> None:
        self._out.write(msgspec.json.encode(Reply(number, answer)) + b"\n")
        self._out.flush()


def build_engine(spec: EngineSpec) -> Any:
    """The engine of ``spec``, with engine core and worker in this process."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm import EngineArgs

    if spec.kernel_block is not None:
        from kvferry.testing.kernel_split import install_kernel_split

        install_kernel_split(spec.kernel_block)
    if spec.bad_writes:
        from kvferry.testing.bad_writer import install_bad_writes

        install_bad_writes(spec.bad_writes)
    if spec.kv_transfer is not None and spec.kv_transfer["kv_connector"] == "MooncakeConnector":
        _let_upstream_run_without_accelerator()
    if _workers_of(spec) > 1:
        _fork_workers()
    if spec.engine_args.get("pipeline_parallel_size", 1) > 1:
        _make_stage_buffers()
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "num_gpu_blocks_override": spec.num_blocks,
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": spec.max_batched_tokens,
        "max_num_seqs": spec.max_requests,
        "enable_prefix_caching": spec.prefix_caching,
        "enforce_eager": True,
        "disable_log_stats": True,
        "seed": 0,
        "compilation_config": {"custom_ops": list(spec.custom_ops)} if spec.custom_ops else {},
        **spec.engine_args,
    }
    if spec.kv_transfer is not None:
        arguments["kv_transfer_config"] = spec.kv_transfer
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _note_guesses(spec: EngineSpec) -> "GuessRecord | None":
    """Of an engine that guesses ahead."""
    if spec.engine_args.get("speculative_config") is None:
        return None
    from kvferry.testing.guesses import GuessRecord

    record = GuessRecord()
    record.install()
    return record


def _connector_threads() -> list[str]:
    """Threads of kvferry that live in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")]


def socket_threads() -> list[str]:
    """ZeroMQ's, which end with the last socket and its context."""
    return [name for name in _native_names() if name.startswith("ZMQbg")]


def _native_names() -> Iterator[str]:
    """Of all threads of this process, as the kernel has them."""
    for task in Path("/proc/self/task").iterdir():
        try:
            yield (task / "comm").read_text().strip()
        except OSError:  # it has ended since it was listed
            continue


def _is_anything_left(spec: EngineSpec) -> bool:
    """Of the connector in this process, or of the workers that vLLM had in others.

    To these vLLM itself has sockets. Other threads that stay are nobody's to end: what importing Mooncake starts.
    """
    sockets = socket_threads() if _workers_of(spec) == 1 else []
    return bool(_connector_threads() or sockets or multiprocessing.active_children())


def _workers_of(spec: EngineSpec) -> int:
    sizes = (spec.engine_args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    return math.prod(sizes)


def _fork_workers() -> None:
    """Workers of a parallel engine are forked here: vLLM spawns them on a CPU, so each would import it all again.

    That is half a minute for each; and what was set up in this process (a kernel split) would not be there.
    """
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def _make_stage_buffers() -> None:
    """A stage that is not the first gets its buffers in a dummy run, which vLLM 0.32 skips on a CPU without a compiler.

    The first request would end in an assertion; so they are made when they are first needed.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    gather = CPUModelRunner.sync_and_gather_intermediate_tensors

    def made(runner: Any, *arguments: Any, **named: Any) -> Any:
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return gather(runner, *arguments, **named)

    CPUModelRunner.sync_and_gather_intermediate_tensors = made


def _let_upstream_run_without_accelerator() -> None:
    """vLLM's own MooncakeConnector asks torch for the number of its device, which raises where there is none."""
    import torch

    torch.accelerator.current_device_index = lambda: 0


def _counters(engine: Any) -> Iterator[Counter]:
    """vLLM's own, of an engine that keeps statistics (``disable_log_stats`` false)."""
    for metric in engine.get_metrics():
        value = getattr(metric, "value", None)  # a histogram has none
        if value is not None:
            yield Counter(name=metric.name, labels=dict(metric.labels), value=float(value))


def _read_calls(source: BinaryIO, calls: "queue.SimpleQueue[Call | None]") -> None:
    decoder = msgspec.json.Decoder(Call)
    for line in source:
        calls.put(decoder.decode(line))
    calls.put(None)  # the driver has gone: nobody else will stop this engine


def main() -> None:
    """Read the spec, build, serve."""
    protocol = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSpec)
    calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    try:
        loop = EngineLoop(spec, calls, protocol)
        threading.Thread(target=_read_calls, args=(sys.stdin.buffer, calls), daemon=True).start()
        loop.run()
    except BaseException as error:
        protocol.write(msgspec.json.encode(Reply(0, Failed(f"{type(error).__name__}: {error}"))) + b"\n")
        protocol.flush()
        raise
    # Connector threads and native engines must not decide when this process is gone.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
