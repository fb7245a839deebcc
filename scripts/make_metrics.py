"""Write ``docs/metrics.md`` from the table in :mod:`kvferry.vllm.metrics`.

python scripts/make_metrics.py           write the page
python scripts/make_metrics.py --check   exit 1 when the page is not what would be written
"""

import sys
from pathlib import Path

from kvferry.errors import ProtocolReason
from kvferry.protocol import Fate
from kvferry.vllm.metrics import LOGGED, METRICS, Metric

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

HEAD = """# Metrics of FerryConnector

vLLM serves these at its own `/metrics`, with its labels `model_name` and `engine` before ours. Every rank counts for
itself: with two ranks on both sides, one request's transfer counts twice on either side. Statistics need vLLM's
`--disable-log-stats` to be absent. Behind `MultiConnector` they carry the same names.

This page is written by `scripts/make_metrics.py` from the source.

| metric | kind | labels | from | meaning |
|---|---|---|---|---|
"""

LOG_HEAD = """
## The log line

vLLM sums up what happened since the last time, every ten seconds in which something did, as `KV Transfer metrics: ...`.
Names without anything to say are left out.

| name | meaning |
|---|---|
"""

ALERTS = """
## What to alert on

* `vllm:kvferry_failures_total` with `side="consumer"` grows: requests lose their cache. Each one is a WARNING line
  `transfer ID: failed (REASON: ...)` of the rank that has it.
* `vllm:kvferry_quarantined_blocks` stays above zero for more than a minute: a producer can neither be reached nor
  proven gone, and its consumer's blocks are kept from re-use.
* `reason="expired"` on producers grows: routers hand out prompts whose decode requests never come. `publish_timeout`
  says how long their blocks are kept.
* The 90th percentile of `vllm:kvferry_wait_seconds` rises while that of `vllm:kvferry_write_seconds` on the producers
  does not: the time goes into computing prompts or waiting in line there, not into moving bytes.
"""


def page() -> str:
    """The whole page."""
    outcomes = ", ".join(f"`{fate.value}`" for fate in Fate)
    reasons = ", ".join(f"`{reason.value}`" for reason in ProtocolReason)
    values = f"\nValues of `outcome`: {outcomes}. Values of `reason`: {reasons}.\n"
    logged = "\n".join(f"| `{name}` | {text} |" for name, text in LOGGED.items())
    return HEAD + "\n".join(_row(one) for one in METRICS) + "\n" + values + LOG_HEAD + logged + "\n" + ALERTS


def _row(one: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{one.exposed_name}` | {one.kind} | {labels} | {one.side} | {one.text} |"


def main() -> int:
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
