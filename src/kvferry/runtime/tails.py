"""What lies behind the last position of a prompt, for a consumer that expects whole blocks.

A transfer moves positions and nothing else. A kvferry consumer clears what no transfer writes; vLLM's own connector
expects its producer to write whole blocks, and vLLM leaves the blocks of a load as they were. Attention masks what is
behind the last position, but a masked NaN still spoils the sum, and where a block held a recurrent state before, its
bytes read as keys and values may well be NaN. So beside a state such a consumer is sent the rest of the last block
too: at the producer vLLM has cleared it.

The rest is a request like any other, planned and proven. What both write (the state, which is that of the last position
in both) is written once.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Group
from kvferry.plan import BlockTable, Descriptors, Plan, TransferRequest


def tail_of(request: TransferRequest, plan: Plan) -> TransferRequest | None:
    """The positions behind ``request`` for which both last blocks have room; ``None`` where nothing needs them."""
    sides = ((plan.producer_side.groups, request.producer), (plan.consumer_side.groups, request.consumer))
    if not any(group.kind == "state" for group in sides[0][0]):
        return None
    ends = [end for groups, tables in sides for end in _ends(groups, tables)]
    stop = min(ends, default=request.stop)
    if stop <= request.stop:
        return None
    return TransferRequest(request.stop, stop, request.producer, request.consumer)


def _ends(groups: Sequence[Group], tables: Sequence[BlockTable]) -> Iterator[int]:
    """The position behind the last block of each table that has positions."""
    for group, table in zip(groups, tables, strict=True):
        if table.first_token is not None and table.entries:
            yield table.first_token + table.entries * group.entry_tokens


def joined(first: Descriptors, rest: Descriptors) -> Descriptors:
    """The copies of both, each byte once: either may write what the other does (the state; what a plan writes along).

    >>> both = joined(Descriptors.of([0, 64], [512, 640], [8, 8]), Descriptors.of([4, 64], [516, 640], [8, 8]))
    >>> both.src.tolist(), both.dst.tolist(), both.nbytes.tolist()
    ([0, 64], [512, 640], [12, 8])
    """
    src, dst, nbytes = (np.concatenate([getattr(one, name) for one in (first, rest)]) for name in _COLUMNS)
    if not dst.size:
        return first
    order = np.argsort(dst, kind="stable")
    src, dst, nbytes = src[order], dst[order], nbytes[order]
    ends = np.maximum.accumulate(dst + nbytes)
    apart = dst[1:] > ends[:-1]
    alike = (src - dst)[1:] == (src - dst)[:-1]
    if (~apart & ~alike & (dst[1:] < ends[:-1])).any():
        raise PlanError(PlanReason.OVERLAPPING_MEMORY, "a prompt and the rest of its last block are read apart")
    starts = np.flatnonzero(np.concatenate([[True], apart | ~alike]))
    last = np.concatenate([starts[1:], [dst.size]]) - 1
    return Descriptors.proven(src[starts], dst[starts], ends[last] - dst[starts])


_COLUMNS: Final = ("src", "dst", "nbytes")
