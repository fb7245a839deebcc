"""Inside a page: the one table of attention backends whose order is known.

The view ``[blocks, slots, rows, content]`` of a cache is only a view: what lies where inside one kernel block is the
backend's own affair. Each entry of :data:`TABLE` names backends, says which pages it recognises (a width or a stride
that does not fit means that the backend does something else than what was read in its source), and turns such a page
into parts: components with their real axes. A page that no entry recognises is one opaque row with a ``shard`` axis:
it moves between equal shards of equal backends, and nowhere else.

Plain integers in and out: no torch, no vLLM.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from kvferry.errors import ConfigError, ConfigReason
from kvferry.layout import TOKEN, Axis, Content
from kvferry.vllm.layouts.geometry import positive_stride
from kvferry.vllm.layouts.heads import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One kernel block as the tensor shows it, and what is known of its content."""

    layer: str
    backend: str
    """vLLM's name of the attention backend."""
    kernel: str
    """What picks an order inside one backend: the CPU's instruction set, else the platform's name."""
    order: str
    """vLLM's name of the layout, for what is opaque."""
    cache: str
    """What an element is: a torch dtype, or the quantised cache's own name."""
    tokens: int
    state_tokens: Fraction
    slots: int
    rows: int
    width: int
    slot_stride: int
    row_stride: int
    itemsize: int
    heads: Heads
    repacked: bool
    """Whether the backend itself published the meaning of the slot axis: then slots are not heads."""
    key_size: int
    value_size: int

    @property
    def nbytes(self) -> int:
        """Live bytes of the kernel block of this rank."""
        return self.slots * self.rows * self.width

    @property
    def is_head_major(self) -> bool:
        """One run: all rows of a slot, then the next slot."""
        rows = self.rows == 1 or self.row_stride == self.width
        return rows and (self.slots == 1 or self.slot_stride == self.rows * self.width)

    @property
    def is_token_major(self) -> bool:
        """One run: all slots of a row, then the next row."""
        slots = self.slots == 1 or self.slot_stride == self.width
        return slots and (self.rows == 1 or self.row_stride == self.slots * self.width)

    @property
    def is_slot_dense(self) -> bool:
        """The rows of one slot are one run, wherever the slots are."""
        return self.rows == 1 or self.row_stride == self.width


@dataclass(frozen=True, slots=True)
class Part:
    """A component to be: the same in every kernel block, ``offset`` bytes after its start."""

    name: str
    offset: int
    axes: tuple[Axis, ...]
    content: Content
    tokens_per_row: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """Backends that order a page alike."""

    backends: frozenset[str]
    recognises: Callable[[Page], bool]
    parts: Callable[[Page], tuple[Part, ...]]


def parts_of(page: Page) -> tuple[Part, ...]:
    """The parts of ``page`` by the first entry that knows it, else one opaque row."""
    for entry in TABLE:
        if page.backend in entry.backends and entry.recognises(page):
            return entry.parts(page)
    return _opaque(page)


def cuts_pages(backend: str) -> bool:
    """Whether the order depends on the kernel block: the rows alone do not tell where a byte is."""
    return backend not in _ROWS


# ------------------------------------------------------------------------------------------------- axes and types


def _head(page: Page, stride: int) -> Axis:
    return Axis("head", page.heads.first, page.heads.count, page.heads.total, stride)


def _token(count: int, stride: int) -> Axis:
    return Axis(TOKEN, 0, count, count, stride)


def _whole(name: str, count: int, stride: int) -> Axis:
    return Axis(name, 0, count, count, stride)


def _row_tokens(page: Page) -> int:
    return max(1, page.state_tokens.numerator) if page.state_tokens >= 1 else 1


# ------------------------------------------------------------------------------- rows: [K | V] of one token and head


def _is_rows(page: Page) -> bool:
    whole = page.state_tokens.denominator == 1 or page.state_tokens.numerator == 1
    return not page.repacked and page.slots == page.heads.count and whole and not page.cache.startswith("nvfp4")


def _rows(page: Page) -> tuple[Part, ...]:
    copies = page.state_tokens.denominator
    row = positive_stride(page.rows, page.row_stride, page.width)
    axes = [_head(page, positive_stride(page.slots, page.slot_stride, page.rows * row))]
    if copies > 1:
        axes.append(_whole("state", copies, row))
    axes.append(_token(page.rows // copies, copies * row))
    return (Part("kv", 0, tuple(axes), Content(page.width, _row_type(page)), _row_tokens(page)),)


def _row_type(page: Page) -> str:
    sizes = f"k{page.key_size}+v{page.value_size}" if page.value_size else f"k{page.key_size}"
    plain = page.width == (page.key_size + page.value_size) * page.itemsize
    return f"{page.cache}:{sizes}" if plain else f"{page.cache}:{sizes}:packed{page.width}"


# ------------------------------------------------------------- CPU_ATTN: per head all keys by column, values by row


def _is_columns(page: Page) -> bool:
    even = page.key_size == page.value_size and page.width == 2 * page.key_size * page.itemsize
    return even and page.kernel in _COLUMN_KERNELS and page.is_slot_dense and _is_rows(page) and page.state_tokens == 1


def _columns(page: Page) -> tuple[Part, ...]:
    item, size, rows = page.itemsize, page.key_size, page.rows
    head = positive_stride(page.slots, page.slot_stride, rows * page.width)
    keys = (_head(page, head), _whole("dim", size, rows * item), _token(rows, item))
    values = (_head(page, head), _token(rows, size * item))
    return (
        Part("k", 0, keys, Content(item, page.cache)),
        Part("v", rows * size * item, values, Content(size * item, f"{page.cache}:v{size}")),
    )


# ------------------------------------------------------------------------------ the slot axis is {K, V}, not heads


def _is_sides(page: Page) -> bool:
    side = page.heads.count * page.key_size * page.itemsize
    return page.repacked and page.slots == 2 and page.width == side and page.state_tokens == 1


def _sides(page: Page) -> tuple[Part, ...]:
    size = page.key_size * page.itemsize
    axes = (_head(page, size), _token(page.rows, positive_stride(page.rows, page.row_stride, page.width)))
    return tuple(
        Part(name, side * page.slot_stride, axes, Content(size, f"{page.cache}:{name}{page.key_size}"))
        for side, name in enumerate("kv")
    )


_PACK_NBYTES = 16


def _is_packed_sides(page: Page) -> bool:
    return _is_sides(page) and page.is_slot_dense and page.key_size * page.itemsize % _PACK_NBYTES == 0


def _packed_sides(page: Page) -> tuple[Part, ...]:
    """Keys ``[head][dim / x][token][x]`` with x elements in 16 bytes, values ``[head][dim][token]``."""
    item, size, rows = page.itemsize, page.key_size, page.rows
    head = _head(page, size * rows * item)
    packs = _whole("pack", size * item // _PACK_NBYTES, rows * _PACK_NBYTES)
    return (
        Part("k", 0, (head, packs, _token(rows, _PACK_NBYTES)), Content(_PACK_NBYTES, f"{page.cache}:pack")),
        Part(
            "v",
            page.slot_stride,
            (head, _whole("dim", size, rows * item), _token(rows, item)),
            Content(item, page.cache),
        ),
    )


# ----------------------------------------------------- NVFP4: for K, then V: data of all heads, scales of all heads


def _is_nvfp4(page: Page) -> bool:
    sized = page.width == page.key_size // 2 + page.key_size // 16 and page.itemsize == 1
    sides = page.repacked and page.slots == 2 * page.heads.count
    return page.cache.startswith("nvfp4") and sized and sides and page.is_head_major and page.state_tokens == 1


def _nvfp4(page: Page) -> tuple[Part, ...]:
    """Kernels may interleave the scales of several tokens, so the scales of one head are one row of the page."""
    heads, rows = page.heads.count, page.rows
    data, scale = page.key_size // 2, page.key_size // 16
    parts = []
    for side, name in enumerate("kv"):
        start = side * heads * rows * page.width
        axes = (_head(page, rows * data), _token(rows, data))
        parts.append(Part(f"{name}.data", start, axes, Content(data, f"{page.cache}:{name}{page.key_size}")))
        scales = (_head(page, rows * scale), _token(1, rows * scale))
        content = Content(rows * scale, f"{page.cache}:{name}scale:{page.tokens}")
        parts.append(Part(f"{name}.scale", start + heads * rows * data, scales, content, page.tokens))
    return tuple(parts)


# --------------------------------------------------------------- one head: all data of the page, then all its scales


def _is_data_then_scale(page: Page) -> bool:
    known = page.width in _DATA_NBYTES and page.slots == 1 and page.is_slot_dense
    return known and page.state_tokens.denominator == 1 and page.kernel not in _SHUFFLING


def _data_then_scale(page: Page) -> tuple[Part, ...]:
    data = _DATA_NBYTES[page.width]
    scale, tokens = page.width - data, _row_tokens(page)
    return tuple(
        Part(
            name,
            offset,
            (_head(page, page.rows * size), _token(page.rows, size)),
            Content(size, f"{page.cache}:{name}{size}"),
            tokens,
        )
        for name, offset, size in (("data", 0, data), ("scale", page.rows * data, scale))
    )


# -------------------------------------------------------------------------------------------------------- opaque


def _opaque(page: Page) -> tuple[Part, ...]:
    if not (page.is_head_major or page.is_token_major):
        raise ConfigError(
            ConfigReason.UNSUPPORTED_MODEL,
            f"layer {page.layer!r}: the order inside a page of backend {page.backend!r} (cache {page.cache!r}, "
            f"{page.kernel}) is not known, and its page is not one run: {page.slots} slots of {page.rows} rows of "
            f"{page.width} bytes at strides {page.slot_stride} and {page.row_stride}",
        )
    axes = (shard_axis(page.heads, page.nbytes), _token(1, page.nbytes))
    kind = opaque_type(page.backend, page.cache, order=f"{page.order}-{page.kernel}", tokens=page.tokens)
    return (Part("kv", 0, axes, Content(page.nbytes, kind), page.tokens),)


def shard_axis(heads: Heads, nbytes: int) -> Axis:
    """One of so many different shards, whole."""
    return Axis("shard", heads.shard, 1, heads.shards, nbytes)


def opaque_type(backend: str, cache: str, *, order: str, tokens: int) -> str:
    """The type of bytes that only an equal worker can read."""
    return f"opaque:{backend}:{cache}:{order}:{tokens}"


_COLUMN_KERNELS = frozenset({"vec", "vec16"})
"""CPU_ATTN's plain vector kernels (AVX2, AVX-512); AMX, NEON, RVV, VSX and VXE order keys in their own way."""

_SHUFFLING = frozenset({"rocm"})
"""Platforms whose indexer kernels shuffle values inside a page."""

_DATA_NBYTES = {584: 576, 132: 128}
"""Bytes of data in a row of so many bytes: DeepSeek-V4's packed rows; fp8 index keys of 128 with one scale."""

_ROWS = frozenset(
    {
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLEX_ATTENTION",
        "FLASHINFER",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
        "ROCM_AITER_UNIFIED_ATTN",
        "TRITON_MLA",
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASHMLA",
        "FLASHMLA_SPARSE",
        "FLASH_ATTN_MLA",
        "FLASHINFER_MLA",
        "FLASHINFER_MLA_SPARSE",
        "ROCM_AITER_MLA",
        "TOKENSPEED_MLA",
    }
)
"""Backends that address rows by the tensor's strides: any order of blocks, heads, tokens and layers."""

_DEEPSEEK_V4 = frozenset({"FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", "DEEPSEEK_SPARSE_SWA"})
_INDEXERS = frozenset({"DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER"})

TABLE: tuple[Entry, ...] = (
    Entry(frozenset({"CPU_ATTN"}), _is_columns, _columns),
    Entry(frozenset({"FLASHINFER"}), _is_nvfp4, _nvfp4),
    Entry(frozenset({"ROCM_ATTN"}), _is_packed_sides, _packed_sides),
    Entry(frozenset({"B12X"}), _is_sides, _sides),
    Entry(_DEEPSEEK_V4 | _INDEXERS, _is_data_then_scale, _data_then_scale),
    Entry(_ROWS, _is_rows, _rows),
)
