"""What the router counts, in a registry of its own (two routers in one process do not meet)."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.router.faults import RefusedError, UpstreamError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """All counters of one router."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_router_requests_total",
            "Client requests by route and by the status they ended with (499: the client left).",
            ("route", "status"),
            registry=self._registry,
        )
        self.attempts = Counter(
            "kvferry_router_attempts_total",
            "Requests to engines by role, engine and outcome (ok, refused, cancelled, or the reason of a fault).",
            ("role", "engine", "outcome"),
            registry=self._registry,
        )
        self.releases = Counter(
            "kvferry_router_releases_total",
            "Prefilled prompts that no decode engine took, by what became of them.",
            ("outcome",),
            registry=self._registry,
        )
        self.open_requests = Gauge(
            "kvferry_router_open_requests", "Client requests being served.", registry=self._registry
        )
        self.prefill_seconds = Histogram(
            "kvferry_router_prefill_seconds",
            "Time of a prefill that succeeded.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_output_seconds = Histogram(
            "kvferry_router_first_output_seconds",
            "Time from the start of a piece to its first output (stream) or its whole answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """The exposition that Prometheus scrapes."""
        return generate_latest(self._registry)


@contextmanager
def counted(metrics: Metrics, role: str, engine: str) -> Iterator[None]:
    """Count one request to an engine by the way it ends."""
    outcome = "ok"
    try:
        yield
    except UpstreamError as fault:
        outcome = fault.reason.value
        raise
    except RefusedError:
        outcome = "refused"
        raise
    except (asyncio.CancelledError, GeneratorExit):
        outcome = "cancelled"
        raise
    finally:
        metrics.attempts.labels(role, engine, outcome).inc()
