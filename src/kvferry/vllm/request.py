"""What the connector reads from, and does to, one vLLM request.

The router's contract is that of vLLM's MooncakeConnector: ``kv_transfer_params`` with ``do_remote_decode`` and
``transfer_id`` for the prefill engine; ``do_remote_prefill``, ``transfer_id``, ``remote_engine_id`` and
``remote_bootstrap_addr`` for the decode engine. One key is ours: ``remote_alternatives``, a list of maps of the last
three, names other producers that have computed the same prompt. Parameters come from a client and are read as such:
what is missing or of another type counts as absent, and the request is computed locally.
"""

import hashlib
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import MAX_NAME, PromptMark, Source
from kvferry.runtime import Alternative

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_ALTERNATIVES = 8
"""Of one request; more are not read."""

_KEY_BYTES = 64
"""Of a digest's key, at most."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which transfer a decode request continues, and where its cache comes from."""

    transfer: TransferId
    source: Source
    alternatives: tuple[Alternative, ...] = ()
    """Who else has it, in the router's order."""


def drop_other_parameters(request: "Request") -> bool:
    """Forget parameters that are no table, and say so. vLLM itself takes them for one, and its engine ends by it.

    A client can send such: what it gives as ``vllm_xargs`` is not looked at before it is here.
    """
    if request.kv_transfer_params is None or isinstance(request.kv_transfer_params, dict):
        return False
    request.kv_transfer_params = None
    return True


def name_for_peers(request_id: str) -> RequestId:
    """What peers call a request: as vLLM does, or by a digest where a client has chosen a name without end."""
    return RequestId(request_id if len(request_id) <= MAX_NAME else _digest(request_id.encode()))


def wants_prefill(request: "Request") -> bool:
    """A decode request whose one transfer has not been dealt with yet."""
    return bool(_params(request).get("do_remote_prefill"))


def wants_decode(request: "Request") -> bool:
    """A prefill request whose cache another engine goes on from."""
    return bool(_params(request).get("do_remote_decode"))


def mark_dealt_with(request: "Request") -> None:
    """One transfer for each request: also a preempted one is computed here when it comes back."""
    if request.kv_transfer_params is not None:
        request.kv_transfer_params["do_remote_prefill"] = False


def transfer_of(request: "Request") -> TransferId | None:
    """The transfer id that the router gave."""
    transfer = _text(_params(request), "transfer_id")
    return None if transfer is None else TransferId(transfer)


def origin_of(request: "Request") -> Origin | None:
    """Where a decode request's cache comes from; ``None`` when the parameters do not say it all."""
    params, transfer = _params(request), transfer_of(request)
    engine, bootstrap = _text(params, "remote_engine_id"), _text(params, "remote_bootstrap_addr")
    if transfer is None or engine is None or bootstrap is None:
        return None
    return Origin(transfer, Source(EngineId(engine), bootstrap.rstrip("/")), _alternatives(params, transfer))


def _alternatives(params: Mapping[str, Any], first: TransferId) -> tuple[Alternative, ...]:
    """The other producers that the parameters name; entries that do not say it all count as absent."""
    listed = params.get("remote_alternatives")
    found: dict[str, Alternative] = {}
    for entry in listed[:MAX_ALTERNATIVES] if isinstance(listed, list) else ():
        if not isinstance(entry, Mapping):
            continue
        names = (_text(entry, key) for key in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr"))
        transfer, engine, bootstrap = names
        if transfer and engine and bootstrap and transfer != first:
            source = Source(EngineId(engine), bootstrap.rstrip("/"))
            found.setdefault(transfer, Alternative(TransferId(transfer), source))
    return tuple(found.values())


def leave_last_token(request: "Request") -> bool:
    """Make a prefill request end one token before its prompt does; says whether it does now.

    A one-token prompt stays as it is: there is nothing before its last token, and its consumer fetches nothing.
    Prompts that no consumer fetches (embeddings, prompt logprobs) stay whole too, and so does one that goes on: what
    its next piece is put behind must be all of it.
    """
    if request.num_prompt_tokens < 2 or request.resumable:
        return False
    if request.skip_reading_prefix_cache or not has_plain_prompt(request):
        return False
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # a copy: the caller may still hold the list
    del request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    return True


def prompt_marks(request: "Request", tokens: int) -> tuple[PromptMark, ...]:
    """What a cache of the prompt's first ``tokens`` tokens is of, at the lengths at which a consumer may stop.

    That is one token earlier too: one side may follow the N-1 rule where the other does not.
    """
    return tuple(PromptMark(stop, prompt_digest(request, stop)) for stop in (tokens - 1, tokens) if stop > 0)


def prompt_digest(request: "Request", tokens: int) -> str:
    """Of the prompt's first ``tokens`` tokens and its adapter: what decides the cache, but for images and the like.

    Images are left out since vLLM may name them by request, differently on the two sides.
    """
    adapter = request.lora_request.lora_name.encode() if request.lora_request is not None else b""
    ids = array("q", (request.prompt_token_ids or ())[:tokens])
    if sys.byteorder == "big":
        ids.byteswap()
    return _digest(ids.tobytes(), key=adapter if len(adapter) <= _KEY_BYTES else _digest(adapter).encode())


def has_plain_prompt(request: "Request") -> bool:
    """The prompt is token ids alone. Embeddings are computed on each side."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def _params(request: "Request") -> Mapping[str, Any]:
    return request.kv_transfer_params or {}


def _digest(data: bytes, *, key: bytes = b"") -> str:
    return hashlib.blake2b(data, digest_size=16, key=key).hexdigest()


def _text(params: Mapping[str, Any], key: str) -> str | None:
    value = params.get(key)
    return value if isinstance(value, str) and 0 < len(value) <= MAX_NAME else None
