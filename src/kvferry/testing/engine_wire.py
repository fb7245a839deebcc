"""What the driver of an engine and the engine's process say to each other: one JSON line each, frozen structs.

A command carries a number; its reply carries the same number. Commands are answered as they finish, in any order.
"""

from typing import Any

import msgspec


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages: frozen, closed."""


class EngineSpec(Wire, frozen=True, kw_only=True):
    """How one engine is built. Everything that a comparison varies is here."""

    name: str
    model: str
    """The model's folder."""
    dtype: str = "float32"
    block_size: int = 32
    """The logical block, as the scheduler counts."""
    kernel_block: int | None = None
    """Kernel block of the attention layers; ``None`` leaves vLLM's choice (kernel = logical)."""
    num_blocks: int = 64
    max_model_len: int = 4096
    max_batched_tokens: int = 2048
    max_requests: int = 16
    prefix_caching: bool = False
    custom_ops: tuple[str, ...] = ()
    kv_transfer: dict[str, Any] | None = None
    """vLLM's ``kv_transfer_config``; ``None`` makes an engine that does both jobs."""
    environment: dict[str, str] = {}
    """Set on top of what every CPU engine needs."""
    engine_args: dict[str, Any] = {}
    """Further keywords of vLLM's ``EngineArgs``."""
    bad_writes: int = 0
    """So many writes of this producer spoil what they move (:mod:`kvferry.testing.bad_writer`)."""


class Generate(Wire, frozen=True, tag="generate", kw_only=True):
    """Generate greedily; answered with :class:`Generation` when the request has ended."""

    prompt: list[int]
    max_tokens: int
    request_id: str
    kv_transfer_params: dict[str, Any] | None = None
    ignore_eos: bool = True
    abort_after: int | None = None
    """Abort it as soon as so many tokens have come, as for a client that goes then."""
    stop_tokens: list[int] = []
    """Ids that end the answer."""
    prompt_logprobs: bool = False
    """Ask for the log probabilities of the prompt's own tokens too."""
    as_embeddings: bool = False
    """Send the prompt as embeddings (of the engine's own model) in place of token ids."""


class Score(Wire, frozen=True, tag="score", kw_only=True):
    """Teacher forcing: the log probability of each token of ``continuation`` after ``prompt``."""

    prompt: list[int]
    continuation: list[int]
    request_id: str


class Abort(Wire, frozen=True, tag="abort", kw_only=True):
    """Abort a request that is running; its ``Generate`` is answered with ``finish_reason`` ``abort``.

    One that has ended is aborted at vLLM's scheduler all the same, as when a client goes in the moment of its answer.
    """

    request_id: str


class Inspect(Wire, frozen=True, tag="inspect"):
    """Ask for :class:`EngineFacts`."""


class InspectCaches(Wire, frozen=True, tag="inspect-caches"):
    """Ask every rank for its tensors: :class:`CacheFacts`."""


class ResetPrefixCache(Wire, frozen=True, tag="reset-prefix-cache"):
    """Forget cached prefixes; the reply's ``value`` says whether vLLM agreed."""


class ReadCounters(Wire, frozen=True, tag="read-counters"):
    """Ask for vLLM's counters; the engine must keep statistics."""


class Shutdown(Wire, frozen=True, tag="shutdown"):
    """Shut the engine down and leave; the reply's ``value`` says that no thread of the connector, no thread of ZeroMQ's
    (of an engine in one process) and no worker process was left."""


Command = Generate | Score | Abort | Inspect | InspectCaches | ReadCounters | ResetPrefixCache | Shutdown


class Call(Wire, frozen=True):
    """A command with its number."""

    number: int
    command: Command


class Generation(Wire, frozen=True, tag="generation", kw_only=True):
    """The end of a ``Generate``."""

    request_id: str
    tokens: list[int]
    logprobs: list[float]
    """Of the tokens chosen, one each."""
    finish_reason: str
    cached_tokens: int
    """Prompt tokens that were not computed here: found in the prefix cache, or received."""
    prompt_logprobs: list[float] = []
    """Of the prompt's tokens from the second on, where they were asked for."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the connector returned for the router."""
    guesses: list[list[int]] = []
    """What speculative decoding proposed, step by step; empty when the workers are other processes."""
    prompt_steps: list[int] = []
    """In how many steps the prompt was computed here, and how many of its tokens in each."""
    seconds: float = 0.0


class Scores(Wire, frozen=True, tag="scores"):
    """The answer to ``Score``."""

    logprobs: list[float]


class GroupFacts(Wire, frozen=True, tag="group", kw_only=True):
    """One KV cache group as the engine has it."""

    kind: str
    """Class name of the spec."""
    block_tokens: int
    layers: list[str]


class TensorFacts(Wire, frozen=True, tag="tensor", kw_only=True):
    """One layer's cache tensor as the engine has it."""

    shape: list[int]
    stride: list[int]
    dtype: str


class EngineFacts(Wire, frozen=True, tag="facts", kw_only=True):
    """What can be seen of an engine from inside its process."""

    num_blocks: int
    free_blocks: int
    """Blocks in the pool that no request and no connector holds (cached ones included)."""
    running: int
    waiting: int
    """Requests that the scheduler holds, by queue."""
    held: int
    """All requests the scheduler knows, also finished ones whose blocks wait for the connector."""
    groups: list[GroupFacts]
    tensors: dict[str, TensorFacts]
    """By layer; a layer with several tensors has its first one here. Empty when the workers are other processes."""


class CacheFacts(Wire, frozen=True, tag="caches"):
    """The answer to ``InspectCaches``."""

    ranks: list[dict[str, TensorFacts]]
    """Of each rank, by layer; a layer with several tensors has its first one here."""


class Counter(Wire, frozen=True, kw_only=True):
    """One number that vLLM counts, by name (without ``_total``) and labels."""

    name: str
    labels: dict[str, str]
    value: float


class Counters(Wire, frozen=True, tag="counters"):
    """The answer to ``ReadCounters``."""

    counters: list[Counter]


class Done(Wire, frozen=True, tag="done"):
    """The answer to a command that has no other."""

    value: bool = True


class Failed(Wire, frozen=True, tag="failed"):
    """The command raised, or (``number`` 0) the engine could not be built or has died."""

    error: str


Answer = Generation | Scores | EngineFacts | CacheFacts | Counters | Done | Failed


class Reply(Wire, frozen=True):
    """An answer with the number of its command; number 0 is the engine itself: ready, or dead."""

    number: int
    answer: Answer
