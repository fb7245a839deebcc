"""The two sides of ``check``, ``explain`` and ``plan`` as files on a command line.

A placement (a layout file without regions) has offsets for addresses. For looking at a pair that is as good as memory,
so it is given one region that spans all it holds; ``plan`` alone insists on real memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.cli.plan import FileLimit
from kvferry.errors import PlanError, PlanReason
from kvferry.layout import BoundLayout, Layout, Region, bind_layout, parse_layout


@dataclass(frozen=True, slots=True)
class Worker:
    """One layout file."""

    path: Path
    layout: Layout
    """As it stands in the file."""
    bound: BoundLayout
    """Checked, with memory even where the file has none."""

    @property
    def is_placement(self) -> bool:
        return not self.layout.regions


def read_worker(path: Path, limit: FileLimit) -> Worker:
    """Read and check one layout or placement; messages begin with the file's name."""
    data = limit.read(path, PlanReason.INVALID_LAYOUT)
    try:
        layout = parse_layout(data)
        return Worker(path, layout, bind_layout(with_memory(layout)))
    except PlanError as error:
        raise PlanError(error.reason, f"{path}: {error.message}") from error


def read_side(paths: Sequence[Path], limit: FileLimit) -> list[Worker]:
    """All files of one side, in argument order."""
    return [read_worker(path, limit) for path in paths]


def with_memory(layout: Layout) -> Layout:
    """``layout`` itself, or a placement with one region around all its components."""
    if layout.regions or not layout.components:
        return layout
    low = min(c.address for c in layout.components)
    high = max(c.stop for c in layout.components)
    return msgspec.structs.replace(layout, regions=(Region(low, high - low),))
