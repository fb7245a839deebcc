"""Statistics in vLLM's form: from the workers' intervals to its log line and its Prometheus registry.

vLLM asks every worker and the scheduler once a step, joins what they say into one object, sends its dictionary to
the front end, and there logs it every few seconds and hands it to the metrics. So the dictionary is plain (lists,
numbers, strings) and survives pickle and msgpack:

* ``writes``: rows of :class:`kvferry.runtime.Write`; ``receives``: rows of :class:`kvferry.runtime.Receive`;
* ``ends``: ``side outcome reason`` to a number;
* ``counts``: names of :class:`kvferry.runtime.tally.Counted` to a number;
* ``holds``: blocks held and blocks quarantined now, from the scheduler alone; absent where nothing has changed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.runtime import End, Interval, Receive, Write
from kvferry.runtime.tally import Counted
from kvferry.vllm import metrics
from kvferry.vllm.holds import HeldBlocks


class FerryStats(KVConnectorStats):
    """What one or several ranks did in an interval."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = _nothing() | dict(data or {})

    @classmethod
    def of_worker(cls, intervals: Sequence[Interval]) -> "FerryStats | None":
        """What the runtimes of one rank counted; ``None`` for nothing."""
        if not any(intervals):
            return None
        ends: Counter[End] = Counter()
        counts: Counter[Counted] = Counter()
        for one in intervals:
            ends.update(one.ends)
            counts.update(one.counts)
        return cls(
            {
                "writes": [list(row) for one in intervals for row in one.writes],
                "receives": [list(row) for one in intervals for row in one.receives],
                "ends": {" ".join(end).strip(): count for end, count in ends.items()},
                "counts": dict(counts),
            }
        )

    @classmethod
    def of_scheduler(cls, held: HeldBlocks) -> "FerryStats":
        """How many blocks are held now."""
        return cls({"holds": [held.held, held.quarantined]})

    def reset(self) -> None:
        """Forget everything."""
        self.data = _nothing()

    def is_empty(self) -> bool:
        """Whether nothing happened. "No block is held any more" is something."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> "FerryStats":
        """Join another rank's, or a later interval; returns this one, changed."""
        self.data["writes"] = [*self.data["writes"], *other.data["writes"]]
        self.data["receives"] = [*self.data["receives"], *other.data["receives"]]
        self.data["ends"] = dict(Counter(self.data["ends"]) + Counter(other.data["ends"]))
        self.data["counts"] = dict(Counter(self.data["counts"]) + Counter(other.data["counts"]))
        if "holds" in other.data:
            self.data["holds"] = other.data["holds"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: names of :data:`kvferry.vllm.metrics.LOGGED`, those that have something to say."""
        return {
            **_reduced_writes([Write(*row) for row in self.data["writes"]]),
            **_reduced_receives([Receive(*row) for row in self.data["receives"]]),
            **{name.replace("_", " "): count for name, count in self.data["counts"].items() if name in _LOGGED_COUNTS},
            **{f"not done: {end}": count for end, count in sorted(self.data["ends"].items()) if " done" not in end},
            **dict(zip(("blocks held", "blocks quarantined"), self.data.get("holds", ()), strict=False)),
        }


class FerryPromMetrics(KVConnectorPromMetrics):
    """The metrics of :data:`kvferry.vllm.metrics.METRICS` in vLLM's registry."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {one.name: self._family(one) for one in metrics.METRICS}
        self._counted = {one.name: one for one in metrics.METRICS if one.kind == "counter" and not one.labels}
        for index in per_engine_labelvalues:
            for one in metrics.METRICS:
                if not one.labels:
                    # Shown as zero from the start, so that the first increase is an increase.
                    self._child(one, index)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one joined object of one engine, given as its dictionary."""
        for row in transfer_stats_data["writes"]:
            self._observe_write(Write(*row), engine_idx)
        for row in transfer_stats_data["receives"]:
            self._observe_receive(Receive(*row), engine_idx)
        for said, count in transfer_stats_data["ends"].items():
            side, outcome, *reason = said.split(" ")
            self._child(metrics.TRANSFERS, engine_idx, side, outcome).inc(count)
            if reason:
                self._child(metrics.FAILURES, engine_idx, side, *reason).inc(count)
        for name, count in transfer_stats_data["counts"].items():
            self._child(self._counted[name], engine_idx).inc(count)
        if "holds" in transfer_stats_data:
            held, quarantined = transfer_stats_data["holds"]
            self._child(metrics.HELD, engine_idx).set(held)
            self._child(metrics.QUARANTINED, engine_idx).set(quarantined)

    def _observe_write(self, row: Write, engine: int) -> None:
        self._child(metrics.SENT_BYTES, engine).inc(row.nbytes)
        self._child(metrics.DESCRIPTORS, engine).inc(row.descriptors)
        self._child(metrics.WRITE_BYTES, engine).observe(row.nbytes)
        self._child(metrics.WRITE_DESCRIPTORS, engine).observe(row.descriptors)
        self._child(metrics.BIND, engine).observe(row.bind)
        self._child(metrics.WRITE, engine).observe(row.write)

    def _observe_receive(self, row: Receive, engine: int) -> None:
        self._child(metrics.RECEIVED_TOKENS, engine).inc(row.tokens)
        self._child(metrics.RESOLVE, engine).observe(row.resolve)
        self._child(metrics.WAIT, engine).observe(row.wait)

    def _family(self, one: metrics.Metric) -> Any:
        names = {"name": one.full_name, "documentation": one.text, "labelnames": [*self._labelnames, *one.labels]}
        match one.kind:
            case "counter":
                return self._counter_cls(**names)
            case "gauge":
                return self._gauge_cls(**names, multiprocess_mode="mostrecent")
            case "histogram":
                return self._histogram_cls(**names, buckets=list(one.buckets))

    def _child(self, one: metrics.Metric, engine: int, *labels: str) -> Any:
        return self._families[one.name].labels(*self.per_engine_labelvalues[engine], *labels)


_LOGGED_COUNTS = frozenset({"verified_pages", "verify_mismatches", "retries"})


def _nothing() -> dict[str, Any]:
    return {"writes": [], "receives": [], "ends": {}, "counts": {}}


def _reduced_writes(rows: Sequence[Write]) -> dict[str, int | float]:
    if not rows:
        return {}
    megabytes = sum(row.nbytes for row in rows) / 2**20
    seconds = sum(row.write for row in rows)
    return {
        "writes": len(rows),
        "MB written": round(megabytes, 3),
        "MB/s while writing": round(megabytes / seconds, 1) if seconds else 0.0,
        "descriptors per write": round(sum(row.descriptors for row in rows) / len(rows), 1),
        **_spread("bind ms", [row.bind for row in rows]),
        **_spread("write ms", [row.write for row in rows]),
    }


def _reduced_receives(rows: Sequence[Receive]) -> dict[str, int | float]:
    if not rows:
        return {}
    return {
        "fetches": len(rows),
        "tokens fetched": sum(row.tokens for row in rows),
        **_spread("wait ms", [row.wait for row in rows]),
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {
        f"{name} mean": round(float(np.mean(seconds)) * 1e3, 3),
        f"{name} p90": round(float(np.percentile(seconds, 90)) * 1e3, 3),
    }
