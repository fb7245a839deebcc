"""Recurrent state: one raw page per block, cut into the parts that tensor parallelism shards separately.

A block of a state layer holds its states one after another (a convolution's last inputs, then the recurrent state,
then whatever records the model keeps), by the spec's shapes and element sizes; the rest of the page is padding.
Ranks do not cut the convolution state as a whole: each of its sections (queries, keys, values; or x, B, C) is cut
on its own, and B and C of a single group are not cut but copied. So every section is a component with its own channel
axis, and a transfer between unequal tensor parallel sizes is once more an intersection of boxes.

Plain integers in and out: no torch, no vLLM.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from kvferry.errors import ConfigError, ConfigReason
from kvferry.layout import Axis, Content
from kvferry.vllm.layouts.backends import Part, opaque_type
from kvferry.vllm.layouts.heads import Heads, TensorRank, replicated


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Shape and element of one of a layer's states, on this rank."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Live bytes in one block."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """What the spec and the model say of one state layer."""

    layer: str
    kind: str
    """vLLM's name of the kind of state: ``MAMBA1``, ``MAMBA2``, ``GDN_ATTN``, ``SHORT_CONV``, ``LINEAR``."""
    states: tuple[StateTensor, ...]
    tp: TensorRank
    channels_first: bool
    """Orientation of the convolution state: ``(channel, tap)``, else ``(tap, channel)``."""
    replicated: bool = False
    """Whether every rank holds the whole state."""
    whole_channels: int | None = None
    """Channels of the convolution state without tensor parallelism, where some may be copied and not cut."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    channels: Heads


def state_parts(spec: StateSpec) -> tuple[Part, ...]:
    """The components of a block, in the order in which they lie in it."""
    cut = _KINDS.get(spec.kind)
    if cut is None or len(spec.states) < cut.states:
        return (_record(spec, "state", offset=0, nbytes=sum(s.nbytes for s in spec.states)),)
    parts: list[Part] = []
    offset = 0
    for place, state in enumerate(spec.states):
        if place == cut.conv:
            parts += _conv_parts(spec, state, sections=cut.sections(spec), offset=offset)
        elif place == cut.recurrent:
            parts.append(_recurrent_part(spec, state, axis=cut.axis, offset=offset))
        else:
            parts.append(_record(spec, f"record.{place}", offset=offset, nbytes=state.nbytes))
        offset += state.nbytes
    return tuple(parts)


def _conv_parts(spec: StateSpec, state: StateTensor, *, sections: tuple[_Section, ...], offset: int) -> Iterator[Part]:
    if len(state.shape) != 2:
        raise _refused(spec, f"a convolution state of shape {state.shape} has not two axes")
    channels, taps = state.shape if spec.channels_first else state.shape[::-1]
    if sum(s.channels.count for s in sections) != channels:
        counts = [s.channels.count for s in sections]
        raise _refused(spec, f"sections of {counts} channels do not make up the {channels} of its convolution state")
    item = state.itemsize
    channel_stride, tap_stride = (taps * item, item) if spec.channels_first else (item, channels * item)
    first = 0
    for section in sections:
        held = section.channels
        axes = (
            Axis("channel", held.first, held.count, held.total, channel_stride),
            Axis("tap", 0, taps, taps, tap_stride),
        )
        yield Part(section.name, offset + first * channel_stride, axes, Content(item, state.dtype))
        first += held.count


def _recurrent_part(spec: StateSpec, state: StateTensor, *, axis: str, offset: int) -> Part:
    nbytes = prod(state.shape[1:]) * state.itemsize
    held = _cut(spec, state.shape[0])
    inner = "x".join(str(n) for n in state.shape[1:])
    box = (Axis(axis, held.first, held.count, held.total, nbytes),)
    return Part("ssm", offset, box, Content(nbytes, f"{state.dtype}:{inner}"))


def _record(spec: StateSpec, name: str, *, offset: int, nbytes: int) -> Part:
    shard = (0, 1) if spec.replicated else (spec.tp.rank, spec.tp.size)
    axes = (Axis("shard", shard[0], 1, shard[1], nbytes),)
    shapes = "+".join(f"{s.dtype}{list(s.shape)}".replace(" ", "") for s in spec.states)
    orientation = "DS" if spec.channels_first else "SD"
    kind = opaque_type(spec.kind, shapes, order=orientation, tokens=nbytes)
    return Part(name, offset, axes, Content(nbytes, kind))


def _cut(spec: StateSpec, count: int) -> Heads:
    if spec.replicated or spec.tp.size == 1:
        return replicated(count)
    return Heads(spec.tp.rank * count, count, spec.tp.size * count)


# ------------------------------------------------------------------------------- which sections a convolution has


def _conv_channels(spec: StateSpec) -> int:
    return spec.states[0].shape[0 if spec.channels_first else 1]


def _one_section(spec: StateSpec) -> tuple[_Section, ...]:
    return (_Section("conv", _cut(spec, _conv_channels(spec))),)


def _gdn_sections(spec: StateSpec) -> tuple[_Section, ...]:
    """Queries, keys, values; values are as wide as all heads of the recurrent state, the rest is halved."""
    values = spec.states[1].shape[0] * spec.states[1].shape[1]
    rest = _conv_channels(spec) - values
    if rest < 2 or rest % 2:
        raise _refused(spec, f"{_conv_channels(spec)} channels are not queries and keys besides {values} of values")
    return tuple(
        _Section(f"conv.{n}", _cut(spec, c)) for n, c in zip("qkv", (rest // 2, rest // 2, values), strict=True)
    )


def _mamba2_sections(spec: StateSpec) -> tuple[_Section, ...]:
    """x is as wide as all heads of the recurrent state; B and C share the rest, cut by group or copied."""
    x = spec.states[1].shape[0] * spec.states[1].shape[1]
    rest = _conv_channels(spec) - x
    if rest < 2 or rest % 2:
        raise _refused(spec, f"{_conv_channels(spec)} channels are not B and C besides {x} of x")
    group = _mamba2_groups(spec, rest // 2, x)
    return (_Section("conv.x", _cut(spec, x)), _Section("conv.B", group), _Section("conv.C", group))


def _mamba2_groups(spec: StateSpec, local: int, x: int) -> Heads:
    if spec.replicated or spec.tp.size == 1:
        return replicated(local)
    if spec.whole_channels is None:
        raise _refused(spec, f"{local} channels of B on each of {spec.tp.size} ranks, cut or copied is not known")
    whole = (spec.whole_channels - spec.tp.size * x) // 2
    if whole == spec.tp.size * local:
        return _cut(spec, local)
    if whole == local:
        return replicated(local)
    raise _refused(
        spec, f"B has {local} channels on each of {spec.tp.size} ranks and {whole} in all: neither cut nor copied"
    )


def _refused(spec: StateSpec, what: str) -> ConfigError:
    return ConfigError(ConfigReason.UNSUPPORTED_MODEL, f"layer {spec.layer!r} ({spec.kind}): {what}")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Which of the states is what; ``sections`` cuts the convolution, ``axis`` names what shards the recurrence."""

    conv: int | None
    recurrent: int | None
    axis: str
    sections: Callable[[StateSpec], tuple[_Section, ...]]

    @property
    def states(self) -> int:
        return 1 + max(place for place in (self.conv, self.recurrent) if place is not None)


_KINDS = {
    "MAMBA1": _Kind(0, 1, "channel", _one_section),
    "MAMBA2": _Kind(0, 1, "head", _mamba2_sections),
    "GDN_ATTN": _Kind(0, 1, "head", _gdn_sections),
    "SHORT_CONV": _Kind(0, None, "head", _one_section),
    "LINEAR": _Kind(None, 0, "head", _one_section),
}
