"""The messages of a consumer rank: a pull for each producer rank, and the word that nothing more is wanted."""

import itertools
from dataclasses import dataclass

from kvferry.ids import RequestId, TransferId
from kvferry.layout import encode_placement
from kvferry.protocol import (
    FEATURES,
    VERSION,
    AbortNotice,
    Note,
    Pull,
    PullExtension,
    QuietAsk,
    Receiver,
    Side,
    Span,
    Table,
    VerifyAsk,
    Wanted,
    make_pull,
)
from kvferry.runtime.producers import RemoteEngine
from kvferry.runtime.sides import Local
from kvferry.transport import Transport


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one pull asks for: no blocks when it only releases."""

    request: RequestId
    transfer: TransferId
    span: Span
    tables: tuple[Table, ...]
    prompt: str | None = None
    """Digest of the prompt's tokens up to the end of ``span``."""
    verify: VerifyAsk | None = None
    """Which digests the producer is to send back."""


class PullMaker:
    """Makes the messages of one consumer rank."""

    def __init__(self, local: Local, host: str) -> None:
        self._local = local
        self._host = host
        self._numbers = itertools.count(1)

    def pull(self, pulled: Pulled, engine: RemoteEngine, rank: int, *, receiver: Transport, inline: bool) -> Pull:
        """A pull for ``rank`` of ``engine``; ``inline`` sends our placements along."""
        local = self._local
        placements = {one.fingerprint: encode_placement(one) for one in local.placements} if inline else {}
        extension = PullExtension(
            version=VERSION,
            pull=next(self._numbers),
            consumer=local.side(),
            producer=addressed(engine, rank),
            transport=receiver.name,
            address=receiver.address(),
            bases=local.binding.bases,
            requests={},
            placements={str(name): data for name, data in placements.items()},
            features=FEATURES,
            verify=pulled.verify,
        )
        shown = Receiver(
            hostname=self._host, port=0, tp_rank=local.tp_rank, tp_size=local.tp_size, pp_size=local.pp_size
        )
        wanted = Wanted(pulled.request, pulled.transfer, pulled.span, pulled.tables, pulled.prompt)
        return make_pull(shown, [wanted], extension)

    def quiet_ask(self, ask: int) -> Note:
        """Every pull that was made until now is given up; the rank that gets this is to say when it is quiet."""
        below = next(self._numbers)
        return Note(kvferry=QuietAsk(version=VERSION, ask=ask, consumer=self._local.side(), below=below))

    def abort(self, transfer: TransferId, *, expected: int, failed: bool) -> Note:
        """Nothing more of this transfer is wanted."""
        notice = AbortNotice(
            version=VERSION,
            consumer=self._local.side(),
            transfers=(transfer,),
            expected=expected,
            failed=failed,
        )
        return Note(kvferry=notice)


def addressed(engine: RemoteEngine, rank: int) -> Side:
    """A producer rank, as this side knows it."""
    return Side(
        engine_id=engine.incarnation.engine_id,
        epoch=engine.incarnation.epoch,
        index=rank,
        fingerprints=engine.fingerprints,
        model=engine.model,
    )
