"""Cut a client's request into pieces of one prompt and one choice, and write the two engine requests of a piece.

``kv_transfer_params`` is one per HTTP request, and vLLM hands the same to every prompt of a list and to every
one of ``n`` choices. One transfer id would then be pulled several times. So each (prompt, choice) becomes a
piece with requests of its own; the prefix cache of the prefill engine makes the second choice of a prompt
cheap. Choice ``i`` of a seeded request gets seed + i, as vLLM does itself.

The prefill request asks for one token that nobody reads. ``min_tokens`` 1 keeps it from being a stop token: a
prefill that ends by *stopping* is not kept for decode by vLLM's own connector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.ids import EngineId, TransferId
from kvferry.router.config import Prefill
from kvferry.router.faults import bad_request

Json = Mapping[str, object]

_NOT_FOR_PREFILL = frozenset(
    # What shapes the output only. What shapes the prompt (tools, templates, truncation) must stay.
    {"stream", "stream_options", "n", "stop", "stop_token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "echo"}
    | {
        "logprob_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "kv_transfer_params",
        "repetition_detection",
    }
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One prompt and one choice of a client's request."""

    choice: int
    """Its index in the client's answer."""
    first_of_prompt: bool
    """Whether its prompt tokens count in the usage: a prompt counts once, whatever ``n``."""
    body: Json

    @property
    def decode_only(self) -> bool:
        """Whether a prefill would be wasted or wrong, so that decode must compute the prompt itself.

        Prompt logprobs: the decode engine computes the whole prompt anyway. Beam search: vLLM passes no transfer
        parameters on. Truncation without a stated output length: vLLM then truncates to another length than for the
        one token of the prefill, and the two engines would hold different prompts.
        """
        body = self.body
        if body.get("use_beam_search") or body.get("prompt_logprobs") is not None:
            return True
        if body.get("echo") and body.get("logprobs") is not None:
            return True
        length = body.get("max_completion_tokens") or body.get("max_tokens")
        default_length = "prompt" in body and "max_tokens" not in body
        return body.get("truncate_prompt_tokens") is not None and not (length or default_length)


def cut(body: Json, *, limit: int) -> tuple[Piece, ...]:
    """The pieces of a request, in the order of the client's choices."""
    choices = _choices(body)
    body = _unsteered(body)
    listed = _listed(body)
    count = len(listed.prompts) if listed else 1
    if count * choices > limit:
        raise bad_request(f"{count} prompts x {choices} choices are more than {limit}", param="prompt")
    prompts = [{**body, listed.key: prompt} for prompt in listed.prompts] if listed else [dict(body)]
    if choices == 1:
        return tuple(Piece(place, True, prompt) for place, prompt in enumerate(prompts))
    return tuple(
        Piece(place * choices + choice, choice == 0, _one_choice(prompt, choice))
        for place, prompt in enumerate(prompts)
        for choice in range(choices)
    )


def prefill_body(piece: Piece, transfer: TransferId) -> dict[str, object]:
    """What the prefill engine is asked."""
    body = {key: value for key, value in piece.body.items() if key not in _NOT_FOR_PREFILL}
    body |= {"stream": False, "max_tokens": 1, "min_tokens": 1}
    if body.get("max_completion_tokens") is not None:
        body["max_completion_tokens"] = 1
    body["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer,
    }
    return body


@dataclass(frozen=True, slots=True)
class Handoff:
    """A computed prompt that waits to be pulled."""

    transfer: TransferId
    prefill: Prefill
    engine_id: EngineId
    releasable: bool
    """Whether the producer understands a release."""
    extra: Json = field(default_factory=dict)
    """What the prefill engine itself wants decode to be told; it goes before what the directory says."""
    copies: tuple["Handoff", ...] = ()
    """The same prompt at other engines, for when this one fails."""


def decode_body(piece: Piece, handoff: Handoff | None) -> dict[str, object]:
    """What the decode engine is asked; without a handoff it computes the prompt itself."""
    if handoff is None:
        return dict(piece.body)
    params: dict[str, object] = {
        "remote_engine_id": handoff.engine_id,
        "remote_bootstrap_addr": handoff.prefill.bootstrap,
        **handoff.extra,
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": handoff.transfer,
    }
    if handoff.copies:
        params["remote_alternatives"] = [_named(one) for one in handoff.copies]
    return {**piece.body, "kv_transfer_params": params}


def _named(copy: Handoff) -> dict[str, object]:
    """One entry of ``remote_alternatives``, a field of kvferry's own; others do not read it."""
    return {
        "transfer_id": copy.transfer,
        "remote_engine_id": copy.engine_id,
        "remote_bootstrap_addr": copy.prefill.bootstrap,
    }


def _unsteered(body: Json) -> Json:
    """Without transfer parameters of the client's own: the address in there is one that an engine connects to.

    vLLM takes them from ``vllm_xargs`` too, and there in any form, which its engines may not outlive.
    """
    kept = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    extra = kept.get("vllm_xargs")
    if isinstance(extra, Mapping):
        kept["vllm_xargs"] = {key: value for key, value in extra.items() if key != "kv_transfer_params"}
    return kept


def _choices(body: Json) -> int:
    choices = body.get("n")
    if choices is None:
        return 1
    if not isinstance(choices, int) or isinstance(choices, bool) or choices < 1:
        raise bad_request(f"n must be a positive integer, got {choices!r}", param="n")
    if choices > 1 and body.get("use_beam_search"):
        raise bad_request("beam search with n > 1 is not routed", param="n")
    return choices


@dataclass(frozen=True, slots=True)
class _Listed:
    """A list of prompts, and where it stands."""

    key: str
    prompts: Sequence[object]


def _listed(body: Json) -> _Listed | None:
    """The prompts that are to be cut apart; what is not a list of prompts is one, for the engine to judge."""
    for key in ("prompt", "prompt_embeds"):
        value = body.get(key)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            others = {"prompt", "prompt_embeds"} - {key}
            if any(body.get(other) for other in others):
                raise bad_request("a list of prompts cannot be mixed with prompt_embeds", param="prompt")
            return _Listed(key, value)
    return None


def _one_choice(body: dict[str, object], choice: int) -> dict[str, object]:
    one = {**body, "n": 1}
    seed = one.get("seed")
    if isinstance(seed, int):
        one["seed"] = seed + choice
    return one
