"""What a producer checks before a pull gets to its machine: is it for us, do we know the layouts, is there a plan.

Everything here concerns the pull as a whole and is refused as a whole, before anything of it was done. What concerns
one request of it (positions, block tables) is found when its write is bound, and fails that request alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import PlanError, ProtocolReason, RemoteProtocolError
from kvferry.layout import Binding, Region, regions_of
from kvferry.plan import Plan
from kvferry.protocol import Pull, PulledRequest, PullExtension, Side, Span
from kvferry.runtime.pairing import pulls_expected
from kvferry.runtime.plans import Plans
from kvferry.runtime.sides import Local


class LayoutMissError(RemoteProtocolError):
    """Placements that this producer does not hold; the consumer is to send them along."""

    def __init__(self, missing: tuple[str, ...]) -> None:
        super().__init__(ProtocolReason.LAYOUT_MISS, f"{len(missing)} placements of the peer are not known here")
        self.missing = missing


ListReader = Callable[[PulledRequest, Span, int], PulledRequest]
"""From a request without positions, what was published and the length of the whole prompt, to one with positions."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A pull that can be served."""

    extension: PullExtension | None
    """``None``: of vLLM's own connector."""
    plan: Plan
    producer: int
    """This rank, as the plan numbers producers."""
    consumer: int
    """Rank of the consumer, as the plan numbers them."""
    binding: Binding
    regions: tuple[Region, ...]
    """The consumer's registered memory."""
    address: str
    """Where the consumer receives, in the transport's own form."""
    peer: str
    """The consumer's engine, as far as it has a name."""
    expected: int
    """How many ranks of the consumer's side will pull from this rank."""
    pull: int = 0
    """The pull's own number, where its sender gives one."""
    idle: bool = False
    """Nothing is to be written for it, whatever it lists."""
    lists: ListReader | None = None
    """Gives the block lists of such a pull their positions; ``None``: they came with them."""


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
    consumer = extension.consumer
    for fingerprint in dict.fromkeys(consumer.fingerprints):
        if (encoded := extension.placements.get(fingerprint)) is not None:
            plans.learn(fingerprint, encoded)
    if missing := plans.missing(consumer.fingerprints):
        raise LayoutMissError(missing)
    binding = Binding(extension.bases)
    plan = plans.between(local.side().fingerprints, consumer.fingerprints)
    return Admitted(
        extension=extension,
        plan=plan,
        producer=local.index,
        consumer=consumer.index,
        binding=binding,
        address=extension.address,
        peer=consumer.engine_id,
        expected=pulls_expected(plan, local.index),
        pull=extension.pull,
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
    if extension.verify is not None and local.pages is None:
        raise RemoteProtocolError(
            ProtocolReason.INCOMPATIBLE_PEER,
            "the consumer wants digests of the pages, and this producer's lie on a device that nobody here reads",
        )
