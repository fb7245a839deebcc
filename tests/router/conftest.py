"""A router between small engines, all of them real HTTP servers."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from kvferry.router import Cooldown, Decode, Patience, Prefill, RouterConfig, build_app
from kvferry.testing.openai_engine import BootstrapPeer, HttpPeer, OpenAiEngine


@dataclass(slots=True)
class ManualClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class EngineProcess:
    """A small engine in a process of its own, to be killed."""

    def __init__(self, mode: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.testing.openai_engine", str(port), mode],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.wait_for("listening")

    def wait_for(self, line: str) -> None:
        """Until the process says so."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == line + "\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)

    def begin_stop(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass(slots=True)
class Site:
    """Engines, their bootstrap services, a router and a client."""

    prefills: list[Any]
    bootstraps: list[BootstrapPeer]
    decodes: list[Any]
    clock: ManualClock = field(default_factory=ManualClock)
    options: dict[str, Any] = field(default_factory=dict)
    router: HttpPeer | None = None
    client: httpx.Client | None = None

    def start(self) -> None:
        config = RouterConfig(
            prefills=tuple(
                Prefill(prefill.url, bootstrap.url)
                for prefill, bootstrap in zip(self.prefills, self.bootstraps, strict=True)
            ),
            decodes=tuple(Decode(decode.url) for decode in self.decodes),
            **{"patience": Patience(connect=2, prefill=5, decode=5), "cooldown": Cooldown(5, 60), **self.options},
        )
        self.router = HttpPeer(build_app(config, clock=self.clock))
        self.client = httpx.Client(base_url=self.router.url, timeout=30, trust_env=False)

    def complete(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        assert self.client is not None
        return self.client.post("/v1/completions", json={"model": "toy", **body}, headers=headers)

    def chat(self, **body: Any) -> httpx.Response:
        assert self.client is not None
        messages = [{"role": "user", "content": "hi"}]
        return self.client.post("/v1/chat/completions", json={"model": "toy", "messages": messages, **body})

    def get(self, path: str) -> httpx.Response:
        assert self.client is not None
        return self.client.get(path)

    def metric(self, sample: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(sample + " ")]
        return float(lines[0].split()[-1]) if lines else 0.0

    def prefilled(self) -> list[dict[str, Any]]:
        return [request.body for prefill in self.prefills for request in getattr(prefill, "received", [])]

    def decoded(self) -> list[dict[str, Any]]:
        return [request.body for decode in self.decodes for request in getattr(decode, "received", [])]


Engines = int | list[Any]
"""So many engines in this process, or these."""


def _engines(wanted: Engines) -> list[Any]:
    return [OpenAiEngine() for _ in range(wanted)] if isinstance(wanted, int) else wanted


MakeSite = Callable[..., Site]


@pytest.fixture
def make_site() -> Iterator[MakeSite]:
    """Builds sites of any shape and takes them down."""
    with ExitStack() as stack:

        def make(
            prefills: Engines = 1, decodes: Engines = 1, *, kvferry: bool = True, ranks: int = 1, **options: Any
        ) -> Site:
            prefills, decodes = _engines(prefills), _engines(decodes)
            bootstraps = [BootstrapPeer(f"P{i}", kvferry=kvferry, ranks=ranks) for i in range(len(prefills))]
            site = Site(prefills, bootstraps, decodes, options=options)
            site.start()
            assert site.client is not None
            stack.callback(_stop, site)
            return site

        yield make


def _stop(site: Site) -> None:
    assert site.client is not None
    assert site.router is not None
    site.client.close()
    peers = (site.router, *site.prefills, *site.bootstraps, *site.decodes)
    for peer in peers:
        peer.begin_stop()
    for peer in peers:
        peer.stop()


@pytest.fixture
def engine_process() -> Iterator[Callable[[str], EngineProcess]]:
    """Starts engines in processes of their own."""
    with ExitStack() as stack:

        def start(mode: str) -> EngineProcess:
            process = EngineProcess(mode)
            stack.callback(process.stop)
            return process

        yield start
