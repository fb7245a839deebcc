"""A plan as a picture: source pages above, destination pages below, and the runs between them, all on one scale.

One panel for each kind of component (its first layer), the first few blocks that move, the first few ranks. A run that
was joined over several blocks is shown where it touches the blocks that are drawn; what is not drawn is counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.cli.frames import spans_in_block
from kvferry.cli.layers import axes_of
from kvferry.cli.output import said
from kvferry.cli.plan_scene import Scene, Window, windows_of
from kvferry.cli.svg import HATCH, HEADING, LINE, NOTE, PALETTE, TITLE, Box, Canvas, Edge, Face, fit

WIDTH = 1180.0
LEFT = 120.0
BAR = WIDTH - LEFT - 30.0
HEIGHT = 34.0
BETWEEN = 130.0
GAP = 16.0
PANELS = 4
RIBBONS = 600
STAYS = "#dfe4ea"
"""Live bytes that no run between the drawn blocks touches."""


def draw_plan(scene: Scene) -> str:
    """An SVG of what ``scene`` moves."""
    canvas = Canvas(WIDTH)
    start, stop = scene.request.start, scene.request.stop
    canvas.text(24, 34, f"Plan of tokens [{start:,}, {stop:,})", face=TITLE)
    sums = f"{scene.descriptors:,} descriptors, {said(scene.total_bytes)} from {scene.sides}"
    canvas.text(24, 54, sums, face=NOTE)
    entries = [(_colour(p), f"from producer {p}: {scene.names[0][p]}") for p in scene.active_producers]
    y = canvas.legend(
        24, 66, [*entries, (STAYS, "live: stays, or goes to a block not drawn"), (HATCH, "not this component's")]
    )
    keys = scene.kinds
    for key in keys[:PANELS]:
        y = _Panel(canvas, scene, key).draw(y + 12)
    if not keys:
        canvas.text(24, y + 24, "nothing to move: the consumer needs no byte that it does not have", face=HEADING)
        y += 36
    if len(keys) > PANELS:
        canvas.text(24, y + 20, f"and {len(keys) - PANELS} more kinds of components", face=NOTE)
        y += 28
    return canvas.render(height=y + 14)


def _colour(producer: int) -> str:
    return PALETTE[producer % len(PALETTE)]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A window and where it is drawn."""

    window: Window
    box: Box


@dataclass(slots=True)
class _Panel:
    """One component of one layer."""

    canvas: Canvas
    scene: Scene
    key: tuple[str, str]
    scale: float = 1.0
    drawn: int = 0
    left_out: int = 0

    def draw(self, y: float) -> float:
        """Draw from ``y`` down; returns the y below."""
        rows = windows_of(self.scene, self.key)
        self.scale = min((BAR - GAP * (len(row) - 1)) / sum(w.nbytes for w in row) for row in (rows.src, rows.dst))
        canvas, top = self.canvas, y + 78
        canvas.line((24, y), (WIDTH - 24, y))
        canvas.text(24, y + 22, f"{self.key[0]}, {self.key[1]}", face=HEADING)
        canvas.text(24, y + 38, self._note(rows.src[0], rows.dst[0]), face=NOTE)
        src = self._row(rows.src, top)
        dst = self._row(rows.dst, top + HEIGHT + BETWEEN)
        for box, word in ((src[0].box, "producer"), (dst[0].box, "consumer")):
            canvas.text(24, box.y + 15, word, face=Face(size=12, bold=True))
            canvas.text(24, box.y + 29, "pages", face=NOTE)
        for one in src:
            for other in dst:
                self._ribbons(one, other)
        self._labels(src, above=True)
        self._labels(dst, above=False)
        bottom = dst[0].box.bottom + 42
        self._scale_bar(bottom)
        canvas.text(LEFT + 190, bottom + 8, "; ".join(self._rest(rows.left_out)), face=NOTE)
        return bottom + 18

    def _note(self, src: Window, dst: Window) -> str:
        held = axes_of(src.component), axes_of(dst.component)
        return f"producer: {held[0]}; consumer: {held[1]}"

    def _row(self, windows: Sequence[Window], y: float) -> list[_Placed]:
        placed, x = [], LEFT
        for window in windows:
            box = Box(x, y, window.nbytes * self.scale, HEIGHT)
            self.canvas.rect(box, fill=HATCH, stroke=LINE, tip="not this component's")
            for offset, run in self._live(window):
                live = Box(x + offset * self.scale, y, run * self.scale, HEIGHT)
                self.canvas.rect(live, fill=STAYS, tip=f"{window.words}: stays, or goes to a block that is not drawn")
            self._pages(window, box)
            placed.append(_Placed(window, box))
            x = box.right + GAP
        return placed

    def _pages(self, window: Window, box: Box) -> None:
        """Ticks above and below the bar where a kernel block begins."""
        step = window.component.page_stride * self.scale
        if window.component.pages == 1 or step < 3 or window.nbytes < window.component.page_stride:
            return
        for page in range(window.component.pages):
            x = box.x + page * step
            self.canvas.line((x, box.y - 3), (x, box.y), stroke=NOTE.fill)
            self.canvas.line((x, box.bottom), (x, box.bottom + 3), stroke=NOTE.fill)

    def _live(self, window: Window) -> Iterable[tuple[int, int]]:
        low = window.offset
        for offset, run in spans_in_block(window.component, 1 / self.scale):
            start, stop = max(offset, low), min(offset + run, low + window.nbytes)
            if start < stop:
                yield start - low, stop - start

    def _ribbons(self, one: _Placed, other: _Placed) -> None:
        found = self.scene.between(one.window, other.window)
        room = RIBBONS - self.drawn
        self.drawn += min(room, len(found))
        self.left_out += max(0, len(found) - room)
        colour = _colour(one.window.worker)
        for src, dst, nbytes in found[:room]:
            top = one.box.x + src * self.scale
            low = other.box.x + dst * self.scale
            wide = nbytes * self.scale
            tip = f"{nbytes:,} bytes: {one.window.words} +{src:,} to {other.window.words} +{dst:,}"
            self.canvas.rect(Box(top, one.box.y, wide, HEIGHT), fill=colour, stroke="#ffffff", tip=tip)
            self.canvas.rect(Box(low, other.box.y, wide, HEIGHT), fill=colour, stroke="#ffffff", tip=tip)
            ends = Edge(top, top + wide, one.box.bottom), Edge(low, low + wide, other.box.y)
            self.canvas.ribbon(*ends, fill=colour, tip=tip)

    def _labels(self, row: Sequence[_Placed], *, above: bool) -> None:
        for placed in row:
            box, window = placed.box, placed.window
            middle = box.x + box.width / 2
            first, second = (box.y - 18, box.y - 5) if above else (box.bottom + 14, box.bottom + 27)
            room = box.width + GAP - 2
            short = f"{'P' if above else 'D'}{window.worker} block {window.block}"
            words = fit((window.words, short, short.replace(" block ", ": "), str(window.block)), room)
            self.canvas.text(middle, first, words, face=Face(size=12, anchor="middle", bold=True))
            tokens = fit((window.tokens, window.tokens.removeprefix("tokens ")), room, face=NOTE)
            self.canvas.text(middle, second, tokens, face=Face(NOTE.size, NOTE.fill, "middle"))

    def _scale_bar(self, y: float) -> None:
        size = 1
        while size * 2 * self.scale <= 120:
            size *= 2
        self.canvas.rect(Box(LEFT, y, size * self.scale, 3), fill=NOTE.fill)
        self.canvas.text(LEFT + size * self.scale + 8, y + 6, said(size), face=NOTE)

    def _rest(self, left_out: Sequence[str]) -> list[str]:
        words = [f"{self.drawn:,} runs drawn"]
        if self.left_out:
            words.append(f"and {self.left_out:,} more runs between these blocks")
        return [*words, *left_out]
