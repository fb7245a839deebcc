"""A small SVG writer: shapes in, one self-contained picture out.

Pictures are drawn for people who open a file: a white ground (so they read the same in a dark viewer), system fonts,
text that is escaped, a tooltip on every shape that is too small for a label. Nothing here knows what a layout is.

>>> canvas = Canvas(width=100)
>>> canvas.rect(Box(0, 0, 10, 10), fill="#000", tip="a < b")
>>> "<title>a &lt; b</title>" in canvas.render(height=20)
True
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

PALETTE = ("#2f6fb0", "#e08a1e", "#3f9b63", "#b5486b", "#7a5ab5", "#2a9aa6", "#a8862a", "#c95a3c", "#5f7f34", "#8a8f98")
"""Distinguishable for most colour-blind readers, dark enough under white labels."""

INK = "#1f2933"
FAINT = "#66727f"
LINE = "#b8c1cb"
HATCH = "url(#padding)"
"""Fill of bytes that nobody reads."""

FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
GLYPH = 0.56
"""Width of an average character, in font sizes."""

_UNSAYABLE = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class Edge:
    """One end of a ribbon."""

    left: float
    right: float
    y: float


@dataclass(frozen=True, slots=True)
class Face:
    """How a text looks."""

    size: float = 12
    fill: str = INK
    anchor: Anchor = "start"
    bold: bool = False


LABEL = Face()
NOTE = Face(size=11, fill=FAINT)
TITLE = Face(size=17, bold=True)
HEADING = Face(size=13.5, bold=True)


@dataclass(slots=True)
class Canvas:
    """Shapes in drawing order."""

    width: float
    _shapes: list[str] = field(default_factory=list)

    def rect(self, box: Box, *, fill: str, stroke: str = "none", tip: str = "") -> None:
        """A filled rectangle; a shape is never thinner than a hair."""
        width = max(box.width, 0.4)
        self._shapes.append(
            f'<rect x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(width)}" height="{_n(box.height)}" '
            f'fill={quoteattr(fill)} stroke={quoteattr(stroke)} stroke-width="0.8"{_closed("rect", tip)}'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], *, stroke: str = LINE) -> None:
        """A thin straight line."""
        self._shapes.append(
            f'<line x1="{_n(start[0])}" y1="{_n(start[1])}" x2="{_n(end[0])}" y2="{_n(end[1])}" '
            f'stroke={quoteattr(stroke)} stroke-width="0.8"/>'
        )

    def text(self, x: float, y: float, words: str, *, face: Face = LABEL) -> None:
        """Words whose baseline is at ``y``."""
        weight = ' font-weight="600"' if face.bold else ""
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(face.size)}" fill={quoteattr(face.fill)} '
            f'text-anchor="{face.anchor}"{weight}>{_told(words)}</text>'
        )

    def ribbon(self, top: Edge, bottom: Edge, *, fill: str, tip: str) -> None:
        """A band between two edges, curved so that crossings can be followed."""
        (a, b, y0), (c, d, y1) = (top.left, top.right, top.y), (bottom.left, bottom.right, bottom.y)
        b, d = max(b, a + 0.5), max(d, c + 0.5)
        mid = (y0 + y1) / 2
        path = (
            f"M{_n(a)} {_n(y0)} C{_n(a)} {_n(mid)} {_n(c)} {_n(mid)} {_n(c)} {_n(y1)} "
            f"L{_n(d)} {_n(y1)} C{_n(d)} {_n(mid)} {_n(b)} {_n(mid)} {_n(b)} {_n(y0)} Z"
        )
        self._shapes.append(f'<path d="{path}" fill={quoteattr(fill)} fill-opacity="0.38"{_closed("path", tip)}')

    def funnel(self, top: Edge, bottom: Edge) -> None:
        """A pale straight-sided band that leads from a part to its enlargement."""
        corners = ((top.left, top.y), (top.right, top.y), (bottom.right, bottom.y), (bottom.left, bottom.y))
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
        self._shapes.append(f'<polygon points="{points}" fill="#eaeef2"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> float:
        """Swatches with words from (x, y), wrapped at the width; returns the y below."""
        at = x
        for fill, words in entries:
            need = 22 + text_width(words, LABEL) + 18
            if at > x and at + need > self.width - x:
                at, y = x, y + 20
            self.rect(Box(at, y, 14, 12), fill=fill, stroke=LINE)
            self.text(at + 20, y + 10.5, words)
            at += need
        return y + 20

    def render(self, *, height: float) -> str:
        """The whole file."""
        w, h = _n(self.width), _n(height)
        body = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
            f"font-family={quoteattr(FONT)}>\n"
            '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f4f6f8"/>'
            '<line x1="0" y1="0" x2="0" y2="6" stroke="#aab4bf" stroke-width="1.6"/></pattern></defs>\n'
            f'<rect width="{w}" height="{h}" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


def text_width(words: str, face: Face) -> float:
    """About how wide ``words`` are."""
    return len(words) * face.size * GLYPH


def fit(words: Sequence[str], width: float, *, face: Face = LABEL) -> str:
    """The first of several wordings, longest first, that fits into ``width``; empty when none does."""
    return next((w for w in words if text_width(w, face) + 6 <= width), "")


def shade(colour: str, towards_white: float) -> str:
    """``colour`` (#rrggbb) mixed with white.

    >>> shade("#000000", 0.5)
    '#808080'
    """
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * towards_white):02x}" for p in parts)


def _closed(tag: str, tip: str) -> str:
    return f"><title>{_told(tip)}</title></{tag}>" if tip else "/>"


def _told(words: str) -> str:
    """``words`` as text of the file; what XML has no way to say is a question mark."""
    return escape(_UNSAYABLE.sub("?", words))


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
