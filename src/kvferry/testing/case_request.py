"""Random block tables: prefix hits, windows, lookahead, holes, one state a request, scattered and consecutive ids."""

import random
from dataclasses import dataclass

from kvferry.testing.case_model import Group, Json, Side, chance

Sketch = list[bool]
"""A table before it has ids: whether each entry has a block."""


@dataclass(slots=True)
class Draft:
    first_token: int | None
    entries: Sketch


def draw_range(rng: random.Random, sides: list[Side]) -> tuple[int, int]:
    """(start, stop), so that no table grows beyond some eight entries."""
    spans = [group.span for side in sides for group in side.groups if group.kind == "attention"] or [4]
    most = min(8 * min(spans), 40)
    stop = rng.randint(1, most) if chance(rng, 96) else 0
    if chance(rng, 40):
        stop = min(most, -(-stop // max(spans)) * max(spans))
    if chance(rng, 8):
        return stop, stop
    return (0 if chance(rng, 45) else rng.randint(0, max(0, stop - 1))), stop


def draw_draft(rng: random.Random, side: Side, group: Group, start: int, stop: int) -> Draft:
    if group.kind == "state":
        return _state(rng, side, group, stop)
    low, span = group.low(start, stop), group.span
    if side.is_producer:
        first = rng.randint(0, low // span) if chance(rng, 40) else 0
        last = -(-stop // span) + rng.choice([0, 0, 0, 1, 2])
    else:
        first = start // span if chance(rng, 65) else rng.randint(0, stop // span)
        last = -(-stop // span) + rng.choice([-1, 0, 0, 0, 0, 0, 0, 1, 1, 2])
    hide = chance(rng, 50)
    entries = [not (hide and (i + 1) * span <= low) for i in range(first, max(first, last))]
    if not side.is_producer and entries and chance(rng, 10):
        entries[rng.randint(0, len(entries) - 1)] = False
    return Draft(first * span, entries)


def _state(rng: random.Random, side: Side, group: Group, stop: int) -> Draft:
    present = side.is_producer or chance(rng, 93)
    if chance(rng, 50):
        return Draft(None, [present])
    holder = max(stop - 1, 0) // group.block_tokens
    first = rng.randint(max(0, holder - 4), holder)
    percent = 0 if chance(rng, 70) else 60
    before = [chance(rng, percent) for _ in range(holder - first)]
    return Draft(first * group.block_tokens, [*before, present, *([True] if chance(rng, 15) else [])])


@dataclass(slots=True)
class Tables:
    tables: list[Json]
    num_blocks: list[int]
    """Of each group."""


def draw_tables(rng: random.Random, side: Side, drafts: list[Draft]) -> Tables:
    """Gives ids to the drafts; groups of an overlay draw from one pool."""
    pools = [[i] for i in range(len(side.groups)) if i not in side.overlay]
    if side.overlay:
        pools.append(side.overlay)
    tables: list[Json] = [{} for _ in side.groups]
    sizes = [1] * len(side.groups)
    for pool in pools:
        wanted = sum(sum(drafts[i].entries) for i in pool)
        size = max(1, wanted + rng.randint(0, 3))
        ids = _ids(rng, wanted, size=size)
        for i in pool:
            sizes[i] = size
            blocks = [ids.pop(0) if present else None for present in drafts[i].entries]
            tables[i] = {"blocks": blocks}
            if drafts[i].first_token is not None:
                tables[i]["first_token"] = drafts[i].first_token
    return Tables(tables, sizes)


def _ids(rng: random.Random, wanted: int, *, size: int) -> list[int]:
    if chance(rng, 45):
        first = rng.randint(0, size - wanted)
        ids = list(range(first, first + wanted))
        return list(reversed(ids)) if chance(rng, 12) else ids
    return rng.sample(range(size), wanted)
