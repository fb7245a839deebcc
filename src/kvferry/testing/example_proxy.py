"""The proxy that vLLM gives as an example for its MooncakeConnector, in front of a pair.

It is one file of vLLM's source archive, ``examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py``, not
of its wheel, and needs nothing that vLLM does not bring. It sends a prompt to both engines at once, so the decode
engine asks for a cache that is yet to be computed; data parallel ranks take turns, and a client that leaves is told of
to decode alone.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from kvferry.testing.ports import free_port
from kvferry.testing.serve import ServedPair, Server

_START_TIMEOUT_S = 60.0


class _Proxy(Server):
    """It has no ``/health``: it answers 503 until it has asked the prefill engines' services who they are."""

    @property
    def healthy(self) -> bool:
        """Whether it would pass a request on; this one is none, and it fails over it."""
        try:
            answer = httpx.post(f"{self.url}/v1/completions", content=b"none", timeout=5.0, trust_env=False)
        except httpx.TransportError:
            return False
        return answer.status_code != httpx.codes.SERVICE_UNAVAILABLE


@contextmanager
def serve_example_proxy(pair: ServedPair, script: Path, *, log: Path) -> Iterator[str]:
    """Run that file in front of a pair; yields its URL."""
    port = free_port()
    command = [
        *(sys.executable, str(script), "--host", "127.0.0.1", "--port", str(port)),
        *("--prefill", pair.prefill.url, str(pair.bootstrap_port), "--decode", pair.decode.url),
    ]
    proxy = _Proxy("proxy", command, url=f"http://127.0.0.1:{port}", log=log, environment={})
    try:
        proxy.wait_healthy(_START_TIMEOUT_S)
        yield proxy.url
    finally:
        proxy.stop()
