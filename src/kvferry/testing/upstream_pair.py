"""Engines under two connectors in one deployment: kvferry's and vLLM's own, as prefill and as decode.

Every engine gets a role, a connector and, as a prefill engine, a bootstrap service of its own. :class:`Fleet` is what a
router knows of them: requests go through any prefill and any decode engine.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from kvferry.testing.engine_wire import EngineSpec
from kvferry.testing.engines import Engine
from kvferry.testing.pair import FERRY, WATCHED_UPSTREAM, Pair, PairSpec
from kvferry.testing.ports import free_port
from kvferry.testing.transfer_report import layouts_beside

Kind = Literal["ferry", "upstream"]
Role = Literal["prefill", "decode", "both"]

FERRY_OPTIONS: Final[Mapping[str, Any]] = {"transport": "mooncake", "upstream_peers": "allow"}
_ROLES: Final[Mapping[Role, str]] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
UPSTREAM_OPTIONS: Final[Mapping[str, Any]] = {"mooncake_protocol": "tcp"}


_ANYBODYS: Final = ("transfer_report", "flip_a_byte")
"""Options that vLLM's connector as tests load it knows too."""


def member(spec: EngineSpec, role: Role, kind: Kind, **options: Any) -> EngineSpec:
    """An engine of a fleet; ``options`` go to kvferry's connector.

    With a ``transfer_report`` engines of both connectors tell there what they receive, and kvferry's what they send.
    """
    if kind == "ferry":
        extra = {**FERRY_OPTIONS, **options}
        if role == "prefill" and "transfer_report" in options:
            extra["layout_dump"] = layouts_beside(options["transfer_report"])
    else:
        extra = {**UPSTREAM_OPTIONS, **{name: options[name] for name in _ANYBODYS if name in options}}
    transfer = {
        **(FERRY if kind == "ferry" else WATCHED_UPSTREAM),
        "kv_role": _ROLES[role],
        "engine_id": f"{spec.name}-{secrets.token_hex(4)}",
        "kv_connector_extra_config": extra,
    }
    environment = {**spec.environment, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port())}
    return msgspec.structs.replace(spec, kv_transfer=transfer, environment=environment)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running engines, by name."""

    engines: Mapping[str, Engine]

    @classmethod
    def of(cls, engines: Sequence[Engine]) -> "Fleet":
        """By the names of their specifications."""
        return cls({engine.spec.name: engine for engine in engines})

    def pair(self, prefill: str, decode: str) -> Pair:
        """The two engines, as a router would use them."""
        first, second = self.engines[prefill], self.engines[decode]
        bootstrap = f"http://127.0.0.1:{first.spec.environment['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"
        return Pair(PairSpec(first.spec, second.spec, bootstrap), first, second)
