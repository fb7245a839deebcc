"""The records of a layout file: labelled strided boxes, the groups that index them, the memory they lie in.

One component is one box. The byte of block ``b``, kernel block ``q``, axis coordinates ``x_i`` and content byte ``c``
lies at ``address + b*block_stride + q*kernel_stride + sum((x_i - start_i) * stride_i) + c``. Field names and meaning
are those of the layout file (``kvferry.layout/1``); every record is checked when it is built, so a record that exists
is well formed by itself. What needs two records to judge is checked in :mod:`kvferry.layout.check`.

Each of these is a frozen ``msgspec.Struct``: the file form, the wire form and the form in memory are one.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvferry.errors import PlanError, PlanReason

LIMIT = 2**63 - 1
"""All integers of a layout are below 2**63, so that NumPy's int64 holds every address."""

TOKEN = "token"

Count = Annotated[int, Meta(ge=1, le=LIMIT)]
Offset = Annotated[int, Meta(ge=0, le=LIMIT)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]


class InvalidLayoutError(PlanError, ValueError):
    """A record that contradicts itself. A ``ValueError`` too, so that msgspec adds the path of the field."""

    def __init__(self, message: str) -> None:
        super().__init__(PlanReason.INVALID_LAYOUT, message)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every record: immutable, hashable, closed against unknown fields."""


class Axis(Record, frozen=True):
    """One labelled axis of a component; a rank holds ``[start, start + count)`` of ``total``."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    start: Offset
    count: Count
    total: Count
    stride: Count
    """Bytes from one coordinate to the next."""

    def __post_init__(self) -> None:
        _positive({"count": self.count, "total": self.total, "stride": self.stride}, f"axis {self.name!r}")
        if self.start < 0 or self.start + self.count > self.total:
            raise InvalidLayoutError(
                f"axis {self.name!r} holds [{self.start}, {self.start + self.count}) of a total of {self.total}: "
                "start + count must not exceed total"
            )

    @property
    def stop(self) -> int:
        """One past the last coordinate that the rank holds."""
        return self.start + self.count


class Content(Record, frozen=True):
    """What stands at one coordinate: so many bytes, of a type that both sides must name alike."""

    nbytes: Count
    type: Name

    def __post_init__(self) -> None:
        _positive({"nbytes": self.nbytes}, "content")


class ContextParallel(Record, frozen=True):
    """Positions dealt out over ``size`` ranks, ``interleave`` at a time; this rank holds every ``size``-th deal."""

    rank: Offset
    size: Count
    interleave: Count

    def __post_init__(self) -> None:
        _positive({"size": self.size, "interleave": self.interleave}, "context_parallel")
        if not 0 <= self.rank < self.size:
            raise InvalidLayoutError(f"context_parallel rank {self.rank} is not below its size {self.size}")


class Group(Record, frozen=True):
    """Layers that share one block table."""

    kind: Literal["attention", "state"]
    block_tokens: Count
    """Positions in one table entry (of one rank's share, under context parallel)."""
    sliding_window: Count | None = None
    """What the engine retains: its window and any extra positions it keeps."""
    chunk: Count | None = None
    """Chunk of chunked local attention."""
    context_parallel: ContextParallel | None = None

    def __post_init__(self) -> None:
        _positive({"block_tokens": self.block_tokens}, f"{self.kind} group")
        if self.kind == "state":
            for field in ("sliding_window", "chunk", "context_parallel"):
                if getattr(self, field) is not None:
                    raise InvalidLayoutError(f"a state group has no {field}: it holds one whole state in a block")
        share = self.context_parallel
        if share is not None and self.block_tokens % share.interleave:
            raise InvalidLayoutError(
                f"context_parallel interleave {share.interleave} does not divide block_tokens {self.block_tokens}"
            )
        if self.entry_tokens > LIMIT:
            raise InvalidLayoutError(
                f"one table entry covers block_tokens {self.block_tokens} x context_parallel size "
                f"{share.size if share else 1} positions, past 2**63 - 1"
            )

    @property
    def share(self) -> ContextParallel | None:
        """The context-parallel share where there is more than one rank, else None."""
        share = self.context_parallel
        return share if share is not None and share.size > 1 else None

    @property
    def entry_tokens(self) -> int:
        """Consecutive positions that one table entry covers, over all context-parallel ranks."""
        return self.block_tokens * (self.share.size if self.share else 1)

    @property
    def agreement(self) -> tuple[str, int | None, int | None]:
        """What two groups must have in common for their components to be exchanged."""
        return (self.kind, self.sliding_window, self.chunk)

    def without_rank(self) -> "Group":
        """The group as all ranks of a side must agree on it."""
        if self.context_parallel is None:
            return self
        return msgspec.structs.replace(self, context_parallel=msgspec.structs.replace(self.context_parallel, rank=0))


class Component(Record, frozen=True):
    """One tensor, or part of a tensor, that is addressed or sharded in its own way."""

    layer: Name
    layer_index: Offset
    component: Name
    group: Offset
    address: Offset
    """Absolute in a :class:`Layout`, an offset into its storage in a placement."""
    num_blocks: Count
    block_stride: Count
    axes: tuple[Axis, ...]
    content: Content
    kernel_blocks: Count | UnsetType = UNSET
    kernel_stride: Offset | UnsetType = UNSET
    tokens_per_row: Count | UnsetType = UNSET
    """These three may be absent (not null) in a state, which has one kernel block and no rows."""
    optional: bool = False
    """On a consumer: plan without this component when no producer has its (layer, component)."""

    def __post_init__(self) -> None:
        _positive({"num_blocks": self.num_blocks, "block_stride": self.block_stride}, self.label)
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise InvalidLayoutError(f"{self.label} names an axis twice: {names}")

    @property
    def label(self) -> str:
        """How messages name this component."""
        return f"layer {self.layer!r} component {self.component!r}"

    @property
    def key(self) -> tuple[str, str]:
        """(layer, component): what pairs it with a peer's component, and is unique in a layout."""
        return (self.layer, self.component)

    @property
    def pages(self) -> int:
        """Kernel blocks in one block; a state has one."""
        return 1 if self.kernel_blocks is UNSET else self.kernel_blocks

    @property
    def page_stride(self) -> int:
        """Bytes from one kernel block of a block to the next; without meaning where there is one."""
        return 0 if self.kernel_stride is UNSET else self.kernel_stride

    @property
    def row_tokens(self) -> int:
        """Consecutive positions in one row."""
        return 1 if self.tokens_per_row is UNSET else self.tokens_per_row

    @property
    def token_axis(self) -> Axis | None:
        """The local axis that counts rows in a kernel block; None for a state."""
        return next((axis for axis in self.axes if axis.name == TOKEN), None)

    @property
    def global_axes(self) -> tuple[Axis, ...]:
        """The axes that say which part of the model a rank holds, in order of name."""
        return tuple(sorted((a for a in self.axes if a.name != TOKEN), key=lambda a: a.name))

    @property
    def last_in_block(self) -> int:
        """Bytes from the start of a block to one past its last live byte."""
        reach = (self.pages - 1) * self.page_stride + sum((a.count - 1) * a.stride for a in self.axes)
        return reach + self.content.nbytes

    @property
    def stop(self) -> int:
        """One past the last live byte of the last block, in the terms of ``address``."""
        return self.address + (self.num_blocks - 1) * self.block_stride + self.last_in_block

    @property
    def live_bytes(self) -> int:
        """Live bytes in one block (padding left out)."""
        live = self.content.nbytes * self.pages
        for axis in self.axes:
            live *= axis.count
        return live


class Region(Record, frozen=True):
    """Memory registered for transfer: ``[address, address + nbytes)``."""

    address: Offset
    nbytes: Count
    memory: Annotated[str, Meta(pattern=r"^(cpu|cuda:[0-9]{1,4})\Z")] = "cpu"

    def __post_init__(self) -> None:
        _positive({"nbytes": self.nbytes}, "region")
        if self.stop > LIMIT:
            raise InvalidLayoutError(f"region [{self.address}, {self.stop}) reaches past 2**63 - 1")

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.address + self.nbytes


class Parallel(Record, frozen=True):
    """Where the worker stands among its engine's ranks: for people and reports, never for planning."""

    tp_rank: Offset
    tp_size: Count
    pp_rank: Offset
    pp_size: Count
    pcp_rank: Offset
    pcp_size: Count

    def __post_init__(self) -> None:
        for kind in ("tp", "pp", "pcp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise InvalidLayoutError(f"parallel {kind}_rank {rank} is not below {kind}_size {size}")


class Layout(Record, frozen=True):
    """Where one worker keeps its KV cache: what a layout file holds. Without regions it is a placement."""

    engine_id: Name
    parallel: Parallel
    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    components: tuple[Component, ...]
    format: Literal["kvferry.layout/1"] = "kvferry.layout/1"


def _positive(values: dict[str, int], where: str) -> None:
    for field, value in values.items():
        if value < 1:
            raise InvalidLayoutError(f"{where}: {field} is {value}, must be at least 1")
