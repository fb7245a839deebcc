"""A prefill engine and a decode engine joined by a connector, and the part of a router between them.

The flow is the one that routers for vLLM's MooncakeConnector use: the prefill request carries ``do_remote_decode`` and
a fresh transfer id and asks for one token; the decode request carries ``do_remote_prefill``, the same transfer id, the
engine id of the prefill engine and the address of its bootstrap service. The two may be sent one after the other or at
once: the decode side then waits.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import httpx
import msgspec

from kvferry.testing.engine_wire import Answer, EngineSpec, Failed, Generate, Generation
from kvferry.testing.engines import CALL_TIMEOUT_S, Engine, EngineError
from kvferry.testing.ports import free_port

FERRY: Final[Mapping[str, Any]] = {"kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry.vllm"}
UPSTREAM: Final[Mapping[str, Any]] = {"kv_connector": "MooncakeConnector"}
WATCHED_UPSTREAM: Final[Mapping[str, Any]] = {
    **UPSTREAM,
    "kv_connector_module_path": "kvferry.testing.upstream_connector",
}
"""The same, and what lands in it can be read; it also runs under a plain ``vllm serve`` without an accelerator."""


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Two engine specs, and how to reach the first one's bootstrap service."""

    prefill: EngineSpec
    decode: EngineSpec
    bootstrap: str


def pair_spec(
    prefill: EngineSpec,
    decode: EngineSpec,
    *,
    connector: Mapping[str, Any] = FERRY,
    options: Mapping[str, Any] | None = None,
) -> PairSpec:
    """Join two engines: the connector, its ``options``, a free bootstrap port. Other fields stay as they are."""
    port = free_port()
    sides = [("kv_producer", prefill), ("kv_consumer", decode)]
    joined = [
        msgspec.structs.replace(
            spec,
            kv_transfer={
                **connector,
                "kv_role": role,
                "engine_id": f"{spec.name}-{secrets.token_hex(4)}",
                "kv_connector_extra_config": dict(options or {}),
            },
            environment={**spec.environment, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)},
        )
        for role, spec in sides
    ]
    return PairSpec(joined[0], joined[1], f"http://127.0.0.1:{port}")


@dataclass(frozen=True, slots=True)
class Served:
    """One request that went through both engines."""

    transfer_id: str
    prefill: Generation
    decode: Generation
    seconds: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request under way in both engines."""

    transfer_id: str
    request_id: str
    prefill: "Future[Answer]"
    decode: "Future[Answer]"
    began: float

    def result(self, timeout: float = CALL_TIMEOUT_S) -> Served:
        """Wait for both engines."""
        answers = []
        for side, future in (("prefill", self.prefill), ("decode", self.decode)):
            answer = future.result(timeout)
            if isinstance(answer, Failed):
                raise EngineError(f"{self.request_id}: {side} failed: {answer.error}")
            answers.append(cast(Generation, answer))
        return Served(self.transfer_id, answers[0], answers[1], time.monotonic() - self.began)


class Pair:
    """Two running engines and the addresses between them."""

    def __init__(self, spec: PairSpec, prefill: Engine, decode: Engine) -> None:
        self.spec = spec
        self.prefill = prefill
        self.decode = decode
        self.prefill_engine_id = query_engine_id(spec.bootstrap)

    def submit(self, prompt: Sequence[int], *, max_tokens: int, name: str) -> Ticket:
        """Send to both at once; the decode side waits for the prefill side."""
        transfer_id = f"xfer-{secrets.token_hex(8)}"
        began = time.monotonic()
        prefill = self.prefill.submit(self.prefill_command(prompt, transfer_id, name))
        decode = self.decode.submit(self.decode_command(prompt, transfer_id, name, max_tokens=max_tokens))
        return Ticket(transfer_id, name, prefill, decode, began)

    def generate(self, prompt: Sequence[int], *, max_tokens: int, name: str) -> Served:
        """Prefill, then decode: as routers do that send one after the other."""
        transfer_id = f"xfer-{secrets.token_hex(8)}"
        began = time.monotonic()
        prefill = self.prefill.submit(self.prefill_command(prompt, transfer_id, name))
        prefill.result(CALL_TIMEOUT_S)
        decode = self.decode.submit(self.decode_command(prompt, transfer_id, name, max_tokens=max_tokens))
        return Ticket(transfer_id, name, prefill, decode, began).result()

    def prefill_command(self, prompt: Sequence[int], transfer_id: str, name: str) -> Generate:
        """The prefill half of a request."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        return Generate(prompt=list(prompt), max_tokens=1, request_id=f"{name}-p", kv_transfer_params=params)

    def decode_command(self, prompt: Sequence[int], transfer_id: str, name: str, *, max_tokens: int) -> Generate:
        """The decode half of a request."""
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_engine_id": self.prefill_engine_id,
            "remote_bootstrap_addr": self.spec.bootstrap,
        }
        return Generate(prompt=list(prompt), max_tokens=max_tokens, request_id=f"{name}-d", kv_transfer_params=params)


def query_engine_id(bootstrap: str, *, timeout: float = 20.0) -> str:
    """The engine id that a bootstrap service lists for data-parallel rank 0; waits until it lists one."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            listed = httpx.get(f"{bootstrap}/query", timeout=5.0).raise_for_status().json()
        except httpx.HTTPError:
            listed = {}
        if listed:
            return str(next(iter(listed.values()))["engine_id"])
        if time.monotonic() > deadline:
            raise EngineError(f"{bootstrap}/query lists no engine after {timeout:.0f} s")
        time.sleep(0.05)


def report_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Connector options with the transfer report switched on, in a file in ``folder``."""
    return {**options, "transfer_report": str(folder / "transfers.jsonl")}
