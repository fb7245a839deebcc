"""What a producer checks before a pull gets to its machine: is it for us, do we know the layouts, is there a plan.

Everything here concerns the pull as a whole and is refused as a whole, before anything of it was done. What concerns
one request of it (positions, block tables) is found when its write is bound, and fails that request alone.
"""

from dataclasses import dataclass

from kvferry.errors import PlanError, ProtocolReason, RemoteProtocolError
from kvferry.layout import Binding, Region, regions_of
from kvferry.plan import Plan
from kvferry.protocol import Pull, PullExtension, Side
from kvferry.runtime.plans import Plans
from kvferry.runtime.sides import Local


class LayoutMissError(RemoteProtocolError):
    """Placements that this producer does not hold; the consumer is to send them along."""

    def __init__(self, missing: tuple[str, ...]) -> None:
        super().__init__(ProtocolReason.LAYOUT_MISS, f"{len(missing)} placements of the peer are not known here")
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Admitted:
    """A pull that can be served."""

    extension: PullExtension
    plan: Plan
    consumer: int
    """Rank of the consumer, as the plan numbers them."""
    binding: Binding
    regions: tuple[Region, ...]
    """The consumer's registered memory."""


def admit(pull: Pull, local: Local, plans: Plans, *, transport: str) -> Admitted:
    """Check a pull against this rank; raises :class:`RemoteProtocolError` or ``PlanError``."""
    extension = pull.kvferry
    if not isinstance(extension, PullExtension):
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER,
            "this kvferry serves kvferry consumers only; the pull has no kvferry extension",
        )
    _check_addressed(extension.producer, local)
    _check_peer(extension, local, transport)
    for fingerprint, encoded in extension.placements.items():
        plans.learn(fingerprint, encoded)
    consumer = extension.consumer
    if missing := plans.missing(consumer.fingerprints):
        raise LayoutMissError(missing)
    binding = Binding(extension.bases)
    return Admitted(
        extension=extension,
        plan=plans.between(local.side().fingerprints, consumer.fingerprints),
        consumer=consumer.index,
        binding=binding,
        regions=regions_of(plans.placement(consumer.fingerprints[consumer.index]), binding),
    )


def refusal_of(error: RemoteProtocolError | PlanError) -> tuple[ProtocolReason, str]:
    """How an error of :func:`admit` is said to the peer."""
    if isinstance(error, PlanError):
        return ProtocolReason.PLAN_REFUSED, str(error)
    return error.reason, error.message


def _check_addressed(said: Side, local: Local) -> None:
    here = local.incarnation
    if (said.engine_id, said.epoch) != (here.engine_id, here.epoch):
        raise RemoteProtocolError(
            ProtocolReason.STALE_INCARNATION,
            f"the pull is for {said.engine_id}@{said.epoch[:8]}, this is {here}",
        )
    if said.index != local.index or said.fingerprints != local.side().fingerprints:
        raise RemoteProtocolError(
            ProtocolReason.STALE_INCARNATION,
            f"the pull is for rank {said.index} of {len(said.fingerprints)} other layouts, this is rank {local.index} "
            f"of {len(local.placements)}",
        )


def _check_peer(extension: PullExtension, local: Local, transport: str) -> None:
    consumer = extension.consumer
    if not consumer.index < len(consumer.fingerprints):
        raise RemoteProtocolError(
            ProtocolReason.MALFORMED, f"consumer rank {consumer.index} of {len(consumer.fingerprints)} ranks"
        )
    if consumer.model != local.model:
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER, f"the consumer serves model {consumer.model!r}, this is {local.model!r}"
        )
    if extension.transport != transport:
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER,
            f"the consumer receives over {extension.transport!r}, this producer sends over {transport!r}",
        )
