"""The consumer's half of integrity on request: asks for digests in its pulls, and compares before a fetch may end.

``verify`` is the consumer's option; a producer that can answers whoever asks. A consumer that asks is never left
without: a producer that cannot make digests (an older kvferry, vLLM's own connector) is refused when it is found, and
an answer without them is a mismatch.

A pull is checked when its producer names it as served: every byte of it is in place then, and nothing else writes into
these cells. Only after that does the machine hear of the answer, so no request goes on before its pages are checked.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from kvferry.errors import ConfigError, ConfigReason, ProtocolReason, RemoteProtocolError
from kvferry.plan import BlockTable, Plan, TransferRequest
from kvferry.protocol import Reply, ReplyExtension, Status, VerifyAsk
from kvferry.runtime.binding import block_tables
from kvferry.runtime.producers import RemoteEngine
from kvferry.runtime.pulling import Pulled
from kvferry.runtime.sides import Local
from kvferry.runtime.verify import FEATURE, SAMPLE_EVERY, Hashers, Wrong, compare, sums_wanted
from kvferry.runtime.verify_pages import Job

VerifyMode = Literal["off", "sample", "full"]


@dataclass(frozen=True, slots=True)
class Verified:
    """Pages that were compared and are right."""

    pages: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Verified") -> "Verified":
        return Verified(self.pages + other.pages, self.nbytes + other.nbytes, self.seconds + other.seconds)


def still_busy(reply: Reply) -> Reply:
    """An answer that names nothing yet, from the one that names a pull as served: its pages are being compared."""
    ours = reply.kvferry
    if isinstance(ours, ReplyExtension):
        ours = structs.replace(ours, parts=(), failed=(), digests={})
    return structs.replace(reply, status=Status.CONTINUE, ok_reqs=None, err_reqs=None, kvferry=ours)


class Checker:
    """What one consumer rank verifies, and how."""

    def __init__(
        self,
        local: Local,
        mode: VerifyMode,
        *,
        enter_thread: Callable[[], None] | None = None,
        seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        if mode != "off" and local.pages is None:
            raise ConfigError(
                ConfigReason.INVALID_VALUE,
                f"option verify is {mode!r}, but the cache of rank {local.index} lies on a device that nobody here "
                "reads, and pages are compared by reading them",
            )
        self._local = local
        self._mode = mode
        self._seed = seed
        self._hashers = Hashers(enter_thread)

    def is_content_with(self, engine: RemoteEngine) -> bool:
        """Whether a producer can give what is asked for here."""
        return self._mode == "off" or FEATURE in engine.features

    def demand(self, engine: RemoteEngine) -> None:
        """Refuse a producer that cannot give what is asked for here."""
        if not self.is_content_with(engine):
            raise RemoteProtocolError(
                ProtocolReason.INCOMPATIBLE_PEER,
                f"verify is {self._mode!r} here, and producer {engine.incarnation} cannot make digests of its pages: "
                "it is an older kvferry, or vLLM's own connector",
            )

    def ask(self, plan: Plan, engine: RemoteEngine) -> VerifyAsk | None:
        """What to ask of the ranks of a producer in new pulls."""
        if self._mode == "off":
            return None
        every = 1 if self._mode == "full" else SAMPLE_EVERY
        return VerifyAsk(every=every, seed=self._seed(), sums=sums_wanted(plan, engine.features))

    async def check(self, plan: Plan, rank: int, pulled: Pulled, reply: Reply) -> Verified | Wrong:
        """Compare what producer ``rank`` says that it sent with what is here."""
        reader = self._local.pages
        assert pulled.verify is not None, "only pulls that asked are checked"  # noqa: S101
        assert reader is not None, "who cannot read its pages does not ask"  # noqa: S101
        began = time.perf_counter()
        nothing = tuple(BlockTable.empty() for _ in plan.producers[rank].groups)
        request = TransferRequest(pulled.span.start, pulled.span.stop, nothing, block_tables(pulled.tables))
        job = Job(plan, (rank, self._local.index), request, pulled.verify)
        here = await self._hashers.digests(job, side="consumer", reader=reader)
        sent = reply.kvferry.digests if isinstance(reply.kvferry, ReplyExtension) else {}
        wrong = compare(job, here, sent.get(pulled.request, b""))
        return wrong or Verified(here.pages, here.nbytes, time.perf_counter() - began)

    async def close(self) -> None:
        """Wait for what is under way."""
        await self._hashers.close()
