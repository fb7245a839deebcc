"""Between pages: where the blocks of a tensor are, told by the tensor itself.

A registered cache is a view ``[rows, slots, states, content]``. Its first axis counts kernel blocks, whatever any
configuration says: ``rows / num_blocks`` is the number of kernel blocks in a block, and the stride of that axis is the
distance from one to the next. How many bytes are live comes from the spec. Each number has one source; where a
second source tells the same, both must agree, and a contradiction is refused with both values.

Plain integers in and out: no torch, no vLLM.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import prod

from kvferry.layout import InvalidLayoutError


@dataclass(frozen=True, slots=True)
class View:
    """A tensor without torch: the address of its first element, its shape, its strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides):
            raise InvalidLayoutError(f"a view of shape {self.shape} has strides {self.strides}")

    @property
    def is_dense_inside(self) -> bool:
        """Whether everything behind the first axis is one run in the order of the axes."""
        run = self.itemsize
        for count, stride in zip(reversed(self.shape[1:]), reversed(self.strides[1:]), strict=True):
            if count > 1 and stride != run:
                return False
            run *= count
        return True


@dataclass(frozen=True, slots=True)
class Paging:
    """How block ids become addresses."""

    num_blocks: int
    block_stride: int
    kernel_blocks: int
    kernel_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpec:
    """What the spec says of one block: the shape of its live bytes."""

    block_tokens: int
    slots: int
    """Heads, or whatever the backend keeps in the view's second axis."""
    state_tokens: Fraction
    """Tokens that one state covers; below one where a token has several."""
    content_nbytes: int
    """Live bytes at one (slot, state)."""
    page_nbytes: int
    """Live bytes of one block by the spec's own account."""


def paging_of(view: View, num_blocks: int, *, layer: str) -> Paging:
    """Blocks and kernel blocks of ``view``, whose first axis counts kernel blocks."""
    rows, stride = view.shape[0], view.strides[0]
    if num_blocks < 1 or rows % num_blocks or rows < num_blocks:
        raise InvalidLayoutError(
            f"layer {layer!r}: {rows} tensor rows are not a multiple of {num_blocks} blocks: "
            "rows of the tensor over blocks of the configuration must be a whole number of kernel blocks"
        )
    ratio = rows // num_blocks
    return Paging(num_blocks, ratio * stride, ratio, stride if ratio > 1 else 0)


def split_further(paging: Paging, pieces: int, piece_nbytes: int) -> Paging:
    """Kernel blocks that the tensor does not show: a packed page that the backend cuts by itself."""
    if paging.kernel_blocks != 1:
        raise InvalidLayoutError(
            f"a page already split into {paging.kernel_blocks} kernel blocks is to be cut into {pieces} more"
        )
    return Paging(paging.num_blocks, paging.block_stride, pieces, piece_nbytes)


def check_page(view: View, spec: PageSpec, paging: Paging, *, layer: str) -> None:
    """Raise unless the tensor and the spec tell of the same page."""
    where, ratio = f"layer {layer!r}", paging.kernel_blocks
    if len(view.shape) != 4:
        raise InvalidLayoutError(f"{where}: the cache has shape {view.shape}, not [blocks, heads, tokens, content]")
    if spec.page_nbytes % ratio or spec.block_tokens % ratio:
        raise InvalidLayoutError(
            f"{where}: a page of {spec.page_nbytes} bytes and {spec.block_tokens} tokens is not divisible by "
            f"its {ratio} kernel blocks"
        )
    _check_length(view, spec, paging=paging, where=where)
    kernel_tokens = spec.block_tokens // ratio
    states = Fraction(kernel_tokens) / spec.state_tokens
    _same(where, "slots", view.shape[1], spec.slots)
    _same(where, f"states of a {kernel_tokens}-token kernel block", Fraction(view.shape[2]), states)
    _same(where, "content bytes", view.shape[3] * view.itemsize, spec.content_nbytes)
    _same(where, "live bytes of a kernel block", prod(view.shape[1:]) * view.itemsize, spec.page_nbytes // ratio)
    if view.shape[3] > 1 and view.strides[3] != view.itemsize:
        raise InvalidLayoutError(
            f"{where}: elements of {view.itemsize} bytes lie {view.strides[3]} apart: the content must be one run"
        )


def _check_length(view: View, spec: PageSpec, *, paging: Paging, where: str) -> None:
    """The bytes that one kernel block would move must fit between it and the next one."""
    stride = view.strides[0]
    apart = spec.slots > 1 and view.strides[1] >= stride * view.shape[0]
    length = spec.page_nbytes // paging.kernel_blocks // (spec.slots if apart else 1)
    if view.shape[0] > 1 and length > stride:
        raise InvalidLayoutError(
            f"{where}: transfer length {length} exceeds block stride {stride}: "
            f"{view.shape[0]} rows for {paging.num_blocks} blocks of {spec.page_nbytes} live bytes"
        )


def _same(where: str, what: str, tensor: int | Fraction, spec: int | Fraction) -> None:
    if tensor != spec:
        raise InvalidLayoutError(f"{where}: {what}: the tensor has {tensor}, the spec {spec}")


def positive_stride(count: int, stride: int, fallback: int) -> int:
    """The stride of an axis; an axis of one coordinate may have any, so a zero there is replaced."""
    return stride if count > 1 or stride > 0 else fallback
