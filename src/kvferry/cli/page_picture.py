"""One page (kernel block) enlarged: the order inside it, the outer axis above, the next axis below."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.cli.output import said
from kvferry.cli.svg import HATCH, INK, LABEL, LINE, NOTE, Box, Canvas, Face, fit, shade, text_width
from kvferry.layout import TOKEN, Axis, Component

FINEST = 2.5
"""Pixels below which segments are not told apart."""


@dataclass(frozen=True, slots=True)
class PageView:
    """A page of one layer: its components and where in the frame it begins."""

    components: tuple[Component, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes drawn: to the next page, or to the last live byte."""
        first = self.components[0]
        inside = max(_reach(c.axes, c.content.nbytes) for c in self.components)
        alike = len({(c.pages, c.page_stride) for c in self.components}) == 1
        if first.pages > 1 and alike and inside <= first.page_stride:  # else pages reach into each other
            return first.page_stride
        low = min(c.address for c in self.components)
        return max(c.address + c.last_in_block for c in self.components) - low

    @property
    def tokens(self) -> int:
        """Positions in the page."""
        token = self.components[0].token_axis
        return token.count * self.components[0].row_tokens if token else 1


def draw_page(canvas: Canvas, box: Box, view: PageView, colour: Callable[[Component], str]) -> float:
    """Draw ``view`` into ``box``; returns the y below its caption."""
    part = "One page enlarged" if view.components[0].pages > 1 else "The same, enlarged"
    canvas.text(box.x, box.y - 8, f"{part}: {view.tokens} tokens, {said(view.nbytes)}", face=Face(size=12, bold=True))
    canvas.rect(box, fill=HATCH, stroke=LINE, tip="padding")
    low = min(c.address for c in view.components)
    y = box.bottom + 15
    for component in view.components:
        _draw_inside(
            canvas,
            box,
            component=component,
            scale=box.width / view.nbytes,
            offset=component.address - low,
            colour=colour(component),
        )
        canvas.text(box.x, y, f"{component.component}: {_nesting(component)}", face=NOTE)
        y += 15
    return y + 6


def _nesting(component: Component) -> str:
    """``2 heads, 36,864 B apart; in each 64 tokens, 576 B apart; in each 576 B``."""
    words = [f"{_count(axis, component)}, {axis.stride:,} B apart" for axis in _outer_first(component)]
    return "; in each ".join([*words, f"{component.content.nbytes:,} B of {component.content.type}"])


def _count(axis: Axis, component: Component) -> str:
    if axis.name == TOKEN and component.row_tokens > 1:
        return f"{axis.count} rows of {component.row_tokens} tokens"
    return f"{axis.count} {axis.name}{'s' if axis.count > 1 else ''}"


def _outer_first(component: Component) -> Sequence[Axis]:
    return sorted((a for a in component.axes if a.count > 1), key=lambda a: -a.stride)


def _draw_inside(canvas: Canvas, box: Box, *, component: Component, scale: float, offset: int, colour: str) -> None:
    axes = _outer_first(component)
    whole = _reach(axes, component.content.nbytes)
    area = Box(box.x + offset * scale, box.y, whole * scale, box.height)
    if not axes or axes[0].stride * scale < FINEST:
        canvas.rect(area, fill=colour, tip=_nesting(component))
        _label(canvas, area, wordings=(_summary(component, axes), component.component), fill="#ffffff")
        return
    outer, inner = axes[0], axes[1:]
    upper = Box(area.x, area.y, area.width, area.height * (0.5 if inner else 1))
    tones = (colour, shade(colour, 0.22))
    for part in _draw_axis(canvas, upper, steps=_Steps(component, outer, inner, scale), tones=tones, ink="#ffffff"):
        if inner:
            _draw_inner(
                canvas,
                Box(part.x, part.bottom, part.width, area.bottom - part.bottom),
                component=component,
                axes=inner,
                colour=colour,
            )


def _draw_inner(canvas: Canvas, box: Box, *, component: Component, axes: Sequence[Axis], colour: str) -> None:
    axis = axes[0]
    scale = box.width / _reach(axes, component.content.nbytes)
    if axis.stride * scale < FINEST:
        canvas.rect(box, fill=shade(colour, 0.45), tip=_nesting(component))
        words = f"{_count(axis, component)}, {axis.stride:,} B apart"
        _label(canvas, box, wordings=(words, _count(axis, component)), fill=INK)
        return
    tones = (shade(colour, 0.42), shade(colour, 0.62))
    _draw_axis(canvas, box, steps=_Steps(component, axis, axes[1:], scale), tones=tones, ink=INK)


@dataclass(frozen=True, slots=True)
class _Steps:
    """One axis of a component as segments side by side; ``inner`` are the axes inside each."""

    component: Component
    axis: Axis
    inner: Sequence[Axis]
    scale: float

    def number(self, step: int) -> int:
        """The global coordinate of a segment, or its first token."""
        return step * self.component.row_tokens if self.axis.name == TOKEN else self.axis.start + step

    @property
    def labels(self) -> tuple[str, int]:
        """What stands before each number, and every how many segments one is labelled."""
        wide = self.axis.stride * self.scale
        last = str(self.number(self.axis.count - 1))
        for before in (f"{self.axis.name} ", ""):
            if text_width(before + last, LABEL) + 6 <= wide:
                return before, 1
        every = 1
        while every * wide < text_width(last, LABEL) + 30:
            every *= 2
        return "", every


def _draw_axis(canvas: Canvas, box: Box, *, steps: _Steps, tones: tuple[str, str], ink: str) -> list[Box]:
    """Segments in two tones, as many labelled as there is room for; returns their boxes."""
    width = _reach(steps.inner, steps.component.content.nbytes) * steps.scale
    before, every = steps.labels
    parts = []
    for step in range(steps.axis.count):
        part = Box(box.x + step * steps.axis.stride * steps.scale, box.y, width, box.height)
        canvas.rect(part, fill=tones[step % 2], tip=f"{steps.axis.name} {steps.number(step)}")
        parts.append(part)
    for step in range(0, steps.axis.count, every):
        part = parts[step]
        words = f"{before}{steps.number(step)}"
        where = part.x + (width / 2 if every == 1 else 2)
        face = Face(LABEL.size, ink, "middle" if every == 1 else "start")
        if every == 1 or where + text_width(words, LABEL) <= box.right:
            canvas.text(where, part.y + part.height / 2 + 4, words, face=face)
    return parts


def _summary(component: Component, axes: Sequence[Axis]) -> str:
    return f"{component.component}: " + " x ".join(_count(axis, component) for axis in axes)


def _reach(axes: Sequence[Axis], nbytes: int) -> int:
    return sum((a.count - 1) * a.stride for a in axes) + nbytes


def _label(canvas: Canvas, box: Box, *, wordings: Sequence[str], fill: str) -> None:
    words = fit(wordings, box.width, face=LABEL)
    if words:
        canvas.text(box.x + box.width / 2, box.y + box.height / 2 + 4, words, face=Face(12, fill, "middle"))
