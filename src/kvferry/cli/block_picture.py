"""The memory of a block (or of a few) as a picture to scale: frames, pages, and one page enlarged.

From top to bottom: every distinct frame as one bar for each group that owns it, all bars on one scale; what no
component reaches is hatched; below a bar of attention pages, one page is enlarged to show the order inside it. Equal
frames of other layers are named, not drawn again. Where the bytes of a block are spread over the whole pool, the pool
is drawn, on a scale of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.frames import Frame, frames_of, spans_in_block
from kvferry.cli.inspection import colour_key
from kvferry.cli.layers import Alike, alike, axes_of, name_layers, pattern_of, shape_of
from kvferry.cli.output import said
from kvferry.cli.page_picture import PageView, draw_page
from kvferry.cli.svg import (
    HATCH,
    HEADING,
    INK,
    LABEL,
    LINE,
    NOTE,
    PALETTE,
    TITLE,
    Box,
    Canvas,
    Edge,
    Face,
    fit,
    shade,
    text_width,
)
from kvferry.layout import Component, Layout

WIDTH = 1180.0
LEFT = 150.0
BAR = WIDTH - LEFT - 30.0
HEIGHT = 44.0
FRAMES_DRAWN = 8
BLOCKS_DRAWN = 64
NAMES_SHOWN = 90
TICK = 78.0
"""Pixels that the label of a tick needs."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks ``first..last``, the last one included."""

    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def words(self) -> str:
        return f"block {self.first}" if self.count == 1 else f"blocks {self.first}..{self.last}"


@dataclass(frozen=True, slots=True)
class _Scene:
    """What all parts of one picture share."""

    canvas: Canvas
    layout: Layout
    blocks: BlockRange
    colours: dict[tuple[int, str], str]
    scale: float
    """Pixels a byte of all framed bars."""

    def colour(self, component: Component) -> str:
        return self.colours[colour_key(component)]


def draw_blocks(layout: Layout, blocks: BlockRange) -> str:
    """An SVG of ``blocks`` in every distinct frame of ``layout``."""
    frames = _distinct(frames_of(layout))
    keys = list(dict.fromkeys(colour_key(c) for c in layout.components))
    colours = {key: PALETTE[i % len(PALETTE)] for i, key in enumerate(keys)}
    widest = max((frame.stride for frame, _ in frames if frame.is_framed), default=1) * blocks.count
    scene = _Scene(Canvas(WIDTH), layout, blocks, colours, BAR / widest)
    y = _head(scene)
    for frame, copies in frames[:FRAMES_DRAWN]:
        y = _draw_frame(scene, frame, copies=copies, y=y + 18)
    if len(frames) > FRAMES_DRAWN:
        scene.canvas.text(LEFT, y + 22, f"and {len(frames) - FRAMES_DRAWN} more kinds of frames", face=NOTE)
        y += 30
    return scene.canvas.render(height=y + 16)


def _distinct(frames: Sequence[Frame]) -> list[tuple[Frame, tuple[Frame, ...]]]:
    """Each kind of frame once, with all frames of its kind."""
    kinds: dict[tuple[object, ...], list[Frame]] = {}
    for frame in frames:
        kind = tuple((shape_of(c), c.address - frame.origin) for c in frame.components)
        kinds.setdefault(kind, []).append(frame)
    return [(members[0], tuple(members)) for members in kinds.values()]


def _head(scene: _Scene) -> float:
    canvas, layout = scene.canvas, scene.layout
    canvas.text(24, 34, f"Memory of {scene.blocks.words}, engine {layout.engine_id}", face=TITLE)
    entries = [
        (scene.colour(one.first), f"{one.first.component} (group {one.first.group}): {said(one.first.live_bytes)}")
        for one in _legend(layout)
    ]
    return canvas.legend(24, 50, [*entries, (HATCH, "padding: no component's")])


def _legend(layout: Layout) -> list[Alike]:
    first: dict[tuple[int, str], Alike] = {}
    for same in alike(layout.components):
        first.setdefault(colour_key(same.first), same)
    return list(first.values())


def _draw_frame(scene: _Scene, frame: Frame, *, copies: Sequence[Frame], y: float) -> float:
    indices = [c.layer_index for copy in copies for c in copy.components]
    alike_words = f", {len(copies)} frames alike" if len(copies) > 1 else ""
    if not frame.is_framed:
        return _draw_pool(scene, frame, layers=f"{name_layers(indices)}{alike_words}", y=y)
    words = f"{name_layers(indices)}{alike_words}: {said(frame.stride)} for a block"
    scene.canvas.line((24, y), (WIDTH - 24, y))
    scene.canvas.text(24, y + 22, words, face=HEADING)
    names = ", ".join(dict.fromkeys(pattern_of(c) for copy in copies for c in copy.components))
    scene.canvas.text(24 + text_width(words, HEADING) + 18, y + 22, _short(names), face=NOTE)
    y += 34
    if scene.blocks.count > 1:
        y = _name_blocks(scene, frame, y)
    for group in frame.groups:
        y = _draw_lane(scene, frame, group=group, y=y) + 8
    y = _draw_ruler(scene, frame, y)
    for view in _pages(frame):
        y = draw_page(scene.canvas, _lensed(scene, view, y), view, scene.colour)
    return y


def _short(words: str) -> str:
    return words if len(words) <= NAMES_SHOWN else words[: NAMES_SHOWN - 3] + "..."


def _name_blocks(scene: _Scene, frame: Frame, y: float) -> float:
    wide = frame.stride * scene.scale
    for place in range(scene.blocks.count):
        number = scene.blocks.first + place
        words = fit((f"block {number}", str(number)), wide)
        scene.canvas.text(LEFT + (place + 0.5) * wide, y + 8, words, face=Face(size=11, anchor="middle"))
    return y + 14


def _draw_lane(scene: _Scene, frame: Frame, *, group: int, y: float) -> float:
    canvas, kind = scene.canvas, scene.layout.groups[group].kind
    members = frame.of_group(group)
    live = frame.live_in_block(group)
    canvas.text(24, y + 17, f"group {group}, {kind}", face=Face(size=12, bold=True))
    canvas.text(24, y + 32, f"{said(live)} live, {live / frame.stride:.1%}", face=NOTE)
    bar = Box(LEFT, y, frame.stride * scene.blocks.count * scene.scale, HEIGHT)
    canvas.rect(bar, fill=HATCH, stroke=LINE, tip=f"padding: {frame.stride - live:,} bytes of each block")
    strips = _strips(members, 1 / scene.scale)
    for place in range(scene.blocks.count):
        if scene.blocks.first + place >= min(c.num_blocks for c in members):
            break
        for component in members:
            _draw_component(scene, frame, component=component, place=place, strip=Box(LEFT, y, *strips[component.key]))
    for place in range(1, scene.blocks.count):
        x = LEFT + place * frame.stride * scene.scale
        canvas.line((x, y - 4), (x, y + HEIGHT + 4), stroke=INK)
    return y + HEIGHT


def _draw_component(scene: _Scene, frame: Frame, *, component: Component, place: int, strip: Box) -> None:
    """``strip.width`` and ``strip.height`` say which part of the bar's height is the component's."""
    colour, scale = scene.colour(component), scene.scale
    start = LEFT + (component.address - frame.origin + place * frame.stride) * scale
    top, height = strip.y + strip.width * HEIGHT, strip.height * HEIGHT
    tip = f"{component.layer} {component.component}: {axes_of(component)}; {component.live_bytes:,} bytes"
    for offset, run in spans_in_block(component, 1 / scale):
        scene.canvas.rect(Box(start + offset * scale, top, run * scale, height), fill=colour, tip=tip)
    if component.pages > 1 and component.page_stride * scale >= 3:
        for page in range(1, component.pages):
            x = start + page * component.page_stride * scale
            scene.canvas.line((x, top), (x, top + height), stroke="#ffffff")
    pages = f"{component.pages} pages of {said(component.live_bytes // component.pages)}"
    wordings = (f"{component.component}: {pages}", pages) if component.pages > 1 else ()
    sized = f"{component.component}: {said(component.live_bytes)}"
    width = component.last_in_block * scale
    words = fit((*wordings, sized, component.component), width)
    if component.pages > 1 and words:
        _plate(scene.canvas, Box(start, top, width, height), words=words, colour=colour)
    else:
        face = Face(size=12, fill="#ffffff", anchor="middle", bold=True)
        scene.canvas.text(start + width / 2, top + height / 2 + 4, words, face=face)


def _plate(canvas: Canvas, box: Box, *, words: str, colour: str) -> None:
    """A label on ground of its own, so that page boundaries do not run through it."""
    wide = len(words) * 7.2 + 14
    middle = box.x + box.width / 2
    canvas.rect(Box(middle - wide / 2, box.y + box.height / 2 - 10, wide, 20), fill=colour)
    face = Face(size=12, fill="#ffffff", anchor="middle", bold=True)
    canvas.text(middle, box.y + box.height / 2 + 4, words, face=face)


def _strips(members: Sequence[Component], finest: float) -> dict[tuple[str, str], tuple[float, float]]:
    """(top, height) as parts of the bar: components whose bytes alternate too finely to be seen share the height."""
    spans = sorted(
        (c.address + offset, c.address + offset + run, place)
        for place, c in enumerate(members)
        for offset, run in spans_in_block(c, finest)
    )
    tangled: dict[int, None] = {}
    reach, owner = -1.0, -1
    for start, stop, place in spans:
        if start < reach and place != owner:
            tangled.update(dict.fromkeys((owner, place)))
        if stop > reach:
            reach, owner = stop, place
    order = sorted(tangled)
    part = 1 / max(1, len(order))
    return {
        c.key: (order.index(place) * part, part) if place in tangled else (0.0, 1.0) for place, c in enumerate(members)
    }


def _draw_ruler(scene: _Scene, frame: Frame, y: float) -> float:
    """Bytes from the start of the first block drawn, in steps of a power of two."""
    total = frame.stride * scene.blocks.count
    step = 1
    while step * scene.scale < TICK:
        step *= 2
    scene.canvas.line((LEFT, y), (LEFT + total * scene.scale, y))
    for at in range(0, total + 1, step):
        x = LEFT + at * scene.scale
        scene.canvas.line((x, y), (x, y + 4))
        scene.canvas.text(x, y + 15, said(at) if at else "0", face=Face(size=10, fill=NOTE.fill, anchor="middle"))
    return y + 24


def _pages(frame: Frame) -> list[PageView]:
    """One page of each group's first layer with a token axis."""
    views = []
    for group in frame.groups:
        members = [c for c in frame.of_group(group) if c.token_axis is not None]
        if members:
            mine = tuple(c for c in members if c.layer == members[0].layer)
            views.append(PageView(mine, min(c.address for c in mine) - frame.origin))
    return views


def _lensed(scene: _Scene, view: PageView, y: float) -> Box:
    """A funnel from the first page in the bar to the box in which it is enlarged; returns that box."""
    left = LEFT + view.offset * scene.scale
    box = Box(LEFT, y + 52, BAR, 54)
    right = left + view.nbytes * scene.scale
    scene.canvas.rect(Box(left, y - 5, right - left, 3), fill=NOTE.fill, tip="the page that is enlarged below")
    scene.canvas.funnel(Edge(left, right, y - 2), Edge(box.x, box.right, box.y - 24))
    return box


def _draw_pool(scene: _Scene, frame: Frame, *, layers: str, y: float) -> float:
    """A block whose bytes are spread: the whole pool, other blocks in grey."""
    canvas = scene.canvas
    canvas.line((24, y), (WIDTH - 24, y))
    words = f"{layers}: the bytes of a block are spread over {said(frame.held_bytes)} of {frame.num_blocks:,} blocks"
    canvas.text(24, y + 22, words, face=HEADING)
    y += 36
    scale = BAR / frame.held_bytes
    for component in frame.components:
        canvas.text(24, y + 17, f"{component.component}, group {component.group}", face=Face(size=12, bold=True))
        canvas.rect(Box(LEFT, y, BAR, HEIGHT), fill=shade("#8a8f98", 0.75), stroke=LINE, tip="other blocks")
        for number in range(scene.blocks.first, min(scene.blocks.last + 1, component.num_blocks)):
            start = component.address - frame.origin + number * component.block_stride
            spans = spans_in_block(component, 1 / scale)
            for offset, run in spans:
                box = Box(LEFT + (start + offset) * scale, y, max(run * scale, 1.5), HEIGHT)
                canvas.rect(box, fill=scene.colour(component), tip=f"{component.layer}, block {number}: {run:,} bytes")
        y += HEIGHT + 8
    canvas.text(LEFT, y + 8, f"grey: other blocks; {axes_of(frame.components[0])}", face=LABEL)
    return y + 20
