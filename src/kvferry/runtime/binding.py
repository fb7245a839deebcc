"""From the tables of a message or an order to descriptors: the door between protocol and plan."""

from collections.abc import Sequence

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Placement
from kvferry.plan import BlockTable, TransferRequest
from kvferry.protocol import Span, Table


def request_for(span: Span, producer: Sequence[Table], consumer: Sequence[Table]) -> TransferRequest:
    """The planner's request for moving the positions of ``span``."""
    return TransferRequest(span.start, span.stop, block_tables(producer), block_tables(consumer))


def block_tables(tables: Sequence[Table]) -> tuple[BlockTable, ...]:
    """The planner's form of block tables."""
    return tuple(BlockTable.of(table.blocks, first_token=table.first_token) for table in tables)


def check_covered(wanted: Span, published: Span, placement: Placement) -> None:
    """Refuse positions that were not published, and a state at another position than the published one.

    A state is that of one position only, so where there is one the two ends must agree on it to the token.
    """
    has_state = any(group.kind == "state" for group in placement.groups)
    if wanted.stop > published.stop or (has_state and wanted.stop != published.stop):
        raise PlanError(
            PlanReason.MISSING_POSITIONS,
            f"the consumer wants positions up to {wanted.stop}, the producer published {published.stop}"
            + (" and its state is that of its last one" if has_state else ""),
        )
