"""The second, brute check of a plan: by its bytes alone, knowing nothing of how it was made.

The binder proves its result by construction (``docs/proof.md``). This check sorts all destinations and looks; it is on
in tests and with ``verify="paranoid"``.
"""

from collections.abc import Sequence

import numpy as np

from kvferry.errors import PlanError, PlanReason
from kvferry.layout import Region
from kvferry.layout.nest import Int64s
from kvferry.plan.descriptors import Descriptors


def verify_descriptors(descriptors: Descriptors, *, src: Sequence[Region], dst: Sequence[Region]) -> None:
    """Raise unless every descriptor lies in one region on each side and no destination byte is written twice."""
    if not descriptors.count:
        return
    _inside(descriptors.src, descriptors.nbytes, src, "source")
    _inside(descriptors.dst, descriptors.nbytes, dst, "destination")
    order = np.argsort(descriptors.dst, kind="stable")
    starts, stops = descriptors.dst[order], (descriptors.dst + descriptors.nbytes)[order]
    twice = np.flatnonzero(stops[:-1] > starts[1:])
    if twice.size:
        at = int(twice[0])
        raise PlanError(
            PlanReason.OVERLAPPING_MEMORY,
            f"two descriptors write byte {int(starts[at + 1])}: [{int(starts[at])}, {int(stops[at])}) and "
            f"[{int(starts[at + 1])}, {int(stops[at + 1])})",
        )


def _inside(start: Int64s, nbytes: Int64s, regions: Sequence[Region], what: str) -> None:
    ordered = sorted(regions, key=lambda r: r.address)
    lows = np.array([r.address for r in ordered], dtype=np.int64)
    highs = np.array([r.stop for r in ordered], dtype=np.int64)
    place = np.searchsorted(lows, start, side="right") - 1
    outside = (place < 0) | (start + nbytes > highs[np.maximum(place, 0)])
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise PlanError(
            PlanReason.OUTSIDE_REGION,
            f"descriptor {at}: {what} [{int(start[at])}, {int(start[at] + nbytes[at])}) lies in no one region",
        )
