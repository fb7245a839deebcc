"""Tell a producer that nobody will come for a prompt.

Upstream's own connector has no such message: what is never pulled is held until it expires (480 s by
default). A kvferry bootstrap service offers ``POST /kvferry/release {"engine_id", "transfer_ids", "reason"}``
and says so in ``/query``. It is always safe to send: the producer forgets a transfer that nobody pulls, and
one whose pull is under way ends when its memory is quiet. Releases run behind the client's back, once, and
only their outcome is counted: expiry is the safety net.
"""

import asyncio
import logging

from kvferry.router.engines import Engines
from kvferry.router.faults import RefusedError, UpstreamError
from kvferry.router.metrics import Metrics
from kvferry.router.pieces import Handoff

logger = logging.getLogger(__name__)


class Releaser:
    """Owns the releases that are on their way."""

    def __init__(self, engines: Engines, *, metrics: Metrics) -> None:
        self._engines = engines
        self._metrics = metrics
        self._on_their_way: set[asyncio.Task[None]] = set()

    def release(self, handoff: Handoff, *, reason: str) -> None:
        """Order a release; returns at once, so that it can be called while being cancelled."""
        if not handoff.releasable:
            self._metrics.releases.labels("unsupported").inc()
            return
        task = asyncio.create_task(self._send(handoff, reason))
        self._on_their_way.add(task)
        task.add_done_callback(self._on_their_way.discard)

    async def drain(self) -> None:
        """Wait for the releases under way; each takes at most the control timeout."""
        await asyncio.gather(*self._on_their_way)

    async def _send(self, handoff: Handoff, reason: str) -> None:
        body = {"engine_id": handoff.engine_id, "transfer_ids": [handoff.transfer], "reason": reason}
        try:
            await self._engines.post_control(f"{handoff.prefill.bootstrap}/kvferry/release", body=body)
        except UpstreamError as fault:
            logger.warning("release of %s at %s failed: %s", handoff.transfer, handoff.prefill.bootstrap, fault)
            self._metrics.releases.labels("failed").inc()
        except RefusedError as refusal:
            logger.warning("release of %s refused: status %d", handoff.transfer, refusal.answer.status)
            self._metrics.releases.labels("failed").inc()
        else:
            self._metrics.releases.labels("accepted").inc()
