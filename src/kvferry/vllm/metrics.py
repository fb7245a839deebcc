"""The Prometheus metrics of ``FerryConnector``: one table, from which they and ``docs/metrics.md`` are made.

vLLM serves them at its own ``/metrics`` with its labels (``model_name``, ``engine``) and ours after them. Each rank of
an engine counts for itself, so with two ranks on both sides one transfer counts twice on either.
"""

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "vllm:kvferry_"
"""vLLM clears and collects what has its own name in it."""

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BYTES: Final = tuple(float(1 << power) for power in range(12, 38, 2))
COPIES: Final = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16_384.0, 65_536.0, 262_144.0, 1_048_576.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family."""

    name: str
    """Without the prefix; Prometheus adds ``_total`` to a counter's."""
    kind: Literal["counter", "gauge", "histogram"]
    side: Literal["producer", "consumer", "both"]
    """Who reports it."""
    text: str
    """Its help text, one sentence or two."""
    labels: tuple[str, ...] = ()
    """Labels of ours, after vLLM's."""
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As it is registered."""
        return PREFIX + self.name

    @property
    def exposed_name(self) -> str:
        """As ``/metrics`` shows the family's samples (a histogram's with ``_bucket``, ``_sum``, ``_count``)."""
        return self.full_name + ("_total" if self.kind == "counter" else "")


TRANSFERS: Final = Metric(
    "transfers",
    "counter",
    "both",
    "Transfers that ended on a rank, by side (producer, consumer) and outcome (done, failed, aborted, expired).",
    ("side", "outcome"),
)
FAILURES: Final = Metric(
    "failures",
    "counter",
    "both",
    "Transfers that ended on a rank other than done, by side and reason; the reasons are the protocol's closed list.",
    ("side", "reason"),
)
SENT_BYTES: Final = Metric("sent_bytes", "counter", "producer", "Bytes of caches that a producer wrote to consumers.")
DESCRIPTORS: Final = Metric("descriptors", "counter", "producer", "Copies that these writes were cut into.")
RECEIVED_TOKENS: Final = Metric(
    "received_tokens", "counter", "consumer", "Prompt tokens whose cache a consumer rank got instead of computing it."
)
WRITE_BYTES: Final = Metric(
    "write_bytes", "histogram", "producer", "Bytes of one write, from one rank to one rank.", buckets=BYTES
)
WRITE_DESCRIPTORS: Final = Metric(
    "write_descriptors", "histogram", "producer", "Copies of one write, from one rank to one rank.", buckets=COPIES
)
BIND: Final = Metric(
    "bind_seconds", "histogram", "producer", "Time from block tables to proven copies, per write.", buckets=SECONDS
)
WRITE: Final = Metric(
    "write_seconds",
    "histogram",
    "producer",
    "Time from proven copies to the engine's word that every byte has landed, per write.",
    buckets=SECONDS,
)
RESOLVE: Final = Metric(
    "resolve_seconds",
    "histogram",
    "consumer",
    "Time in which a fetch finds its producer, layouts and plan; long for the first fetch from each producer only.",
    buckets=SECONDS,
)
WAIT: Final = Metric(
    "wait_seconds",
    "histogram",
    "consumer",
    "Time from a fetch's pulls to its end: the producer's computing and writing, and the network.",
    buckets=SECONDS,
)
VERIFIED_PAGES: Final = Metric(
    "verified_pages",
    "counter",
    "consumer",
    "Pages (one block of one component of a layer) whose digest was compared with the producer's and was equal.",
)
VERIFIED_BYTES: Final = Metric("verified_bytes", "counter", "consumer", "Bytes of these pages.")
MISMATCHES: Final = Metric(
    "verify_mismatches",
    "counter",
    "consumer",
    "Pulls of which at least one page was not what the producer has. Each fails its fetch; any is a reason to look.",
)
RETRIES: Final = Metric(
    "retries",
    "counter",
    "consumer",
    "Fetches that failed and were tried again with another producer that the router had named.",
)
REFUSED_CONNECTIONS: Final = Metric(
    "refused_connections",
    "counter",
    "producer",
    "Connections that a guarded message socket has not let in, by their key or address. One that speaks no CURVE at "
    "the secure socket does not get as far and is not counted.",
)
REFUSED_ORDERS: Final = Metric(
    "refused_orders",
    "counter",
    "producer",
    "Registrations and releases that the bootstrap service has refused: not signed, signed wrongly, too old, or sent "
    "before. Of the rank that serves it.",
)
ENGINES_RENEWED: Final = Metric(
    "engines_renewed",
    "counter",
    "producer",
    "Times that the transfer engine was destroyed and made anew because writes did not come to an end: a wedged pair "
    "of engines, a peer that takes nothing. Its other writes fail with it.",
)
FENCES: Final = Metric(
    "fences",
    "counter",
    "consumer",
    "Times that a producer in doubt was fenced: the engine that receives from it destroyed, or its writers proven to "
    "have ended or stopped. Fetches under way from it fail.",
)
HELD: Final = Metric(
    "held_blocks",
    "gauge",
    "both",
    "Cache blocks that the connector keeps from re-use as a transfer may touch them.",
)
QUARANTINED: Final = Metric(
    "quarantined_blocks",
    "gauge",
    "consumer",
    "Held blocks whose fetch has failed already and into which a late write may still come. Stays above zero only "
    "while that is not disproven.",
)

METRICS: Final = (
    TRANSFERS, FAILURES, SENT_BYTES, DESCRIPTORS, RECEIVED_TOKENS, WRITE_BYTES, WRITE_DESCRIPTORS, BIND, WRITE,
    RESOLVE, WAIT, VERIFIED_PAGES, VERIFIED_BYTES, MISMATCHES, RETRIES, REFUSED_CONNECTIONS,
    REFUSED_ORDERS, ENGINES_RENEWED, FENCES, HELD, QUARANTINED,
)  # fmt: skip
"""All of them, in the order of the page."""

LOGGED: Final = {
    "writes": "writes to other ranks of which every byte arrived",
    "MB written": "megabytes (2^20 bytes) of these writes",
    "MB/s while writing": "the same over the sum of their write times",
    "descriptors per write": "mean number of copies",
    "bind ms mean, p90": "time from block tables to proven copies",
    "write ms mean, p90": "time until the engine says that every byte has landed",
    "fetches": "fetches that brought all they were to bring",
    "tokens fetched": "prompt tokens of these fetches",
    "wait ms mean, p90": "time from a fetch's pulls to its end",
    "verified pages": "pages whose digest was equal to the producer's",
    "verify mismatches": "pulls with a page that was not",
    "retries": "failed fetches that were tried again with another producer",
    "not done: SIDE OUTCOME REASON": "transfers that failed, were aborted or expired",
    "blocks held": "cache blocks kept from re-use for transfers now",
    "blocks quarantined": "those of them whose fetch has failed and is not proven quiet",
}
"""Names in vLLM's periodic log line ``KV Transfer metrics``, in its order."""
