"""Random cases made into what ``random_case`` does not draw: far apart, far out, dealt and grouped otherwise.

A *morph* changes a case in place. Some keep what a case means (the same bytes, further apart); others change it, and
some make it one that must be refused: the oracle says which. Each is small, so that a failure names its cause; two or
three of them in a row are what finds something.
"""

import copy
import random
from collections.abc import Callable
from math import lcm

from kvferry.testing.case_model import Json, chance
from kvferry.testing.strategies import Case

Morph = Callable[[Case, random.Random], None]

END = 2**63 - 1
"""Of addresses."""

FAR = 2**56
"""Positions: far out, and rows that hold five times five as many still end below 2**62."""

BEYOND = 2**50
"""A stride past everything that a small case holds."""


def morph(case: Case, rng: random.Random) -> tuple[str, ...]:
    """Change ``case`` by one to three morphs; their names."""
    names = tuple(rng.choice(sorted(MORPHS)) for _ in range(rng.choice([1, 1, 2, 3])))
    for name in names:
        MORPHS[name](case, rng)
    return names


def _files(case: Case) -> list[Json]:
    return [*case.producers, *case.consumers]


def _sides(case: Case) -> list[tuple[list[Json], list[Json]]]:
    """(files, tables) of each side."""
    return [(case.producers, case.request["producer"]), (case.consumers, case.request["consumer"])]


def _entry(group: Json) -> int:
    size: int = (group.get("context_parallel") or {"size": 1})["size"]
    return int(group["block_tokens"]) * size


# ------------------------------------------------------------------------------------------------------------- memory


def _wide_strides(case: Case, rng: random.Random) -> None:
    """Few bytes, far apart, up to the last address that there is."""
    for files, _ in _sides(case):
        times = rng.choice([2, 3, 2**20, 2**31, 2**40])
        for file in files:
            low = min(region["address"] for region in file["regions"])
            span = max(region["address"] + region["nbytes"] for region in file["regions"]) - low
            fitting = max(1, min(times, END // span))
            _stretch(file, low, times=fitting, base=rng.choice([0, END - span * fitting]))


def _stretch(file: Json, low: int, *, times: int, base: int) -> None:
    for placed in (*file["regions"], *file["components"]):
        placed["address"] = (placed["address"] - low) * times + base
    for region in file["regions"]:
        region["nbytes"] *= times
    for part in file["components"]:
        # What steps only once may have any stride, so it may have left the numbers.
        for name in ("block_stride", "kernel_stride"):
            part[name] = min(part[name] * times, END)
        for axis in part["axes"]:
            axis["stride"] = min(axis["stride"] * times, END)


def _second_axis(case: Case, rng: random.Random) -> None:
    """One more sharded axis of one component, outside of everything, so that boxes overlap in two directions."""
    keys = sorted({(part["layer"], part["component"]) for file in _files(case) for part in file["components"]})
    reach = max(region["address"] + region["nbytes"] for file in _files(case) for region in file["regions"])
    if not keys or reach > BEYOND:
        return
    key, name, total = rng.choice(keys), rng.choice(["aa", "zz"]), rng.choice([2, 3])
    for file in _files(case):
        for part in file["components"]:
            if (part["layer"], part["component"]) == key and name not in [axis["name"] for axis in part["axes"]]:
                start = rng.choice([0, 0, rng.randrange(total)])
                count = rng.choice([total - start, rng.randint(1, total - start)])
                axis = {"name": name, "start": start, "count": count, "total": total, "stride": BEYOND}
                part["axes"].insert(rng.randint(0, len(part["axes"])), axis)
        file["regions"] = [
            {**region, "address": region["address"] + step * BEYOND}
            for step in range(total)
            for region in file["regions"]
        ]


def _fewer_blocks(case: Case, rng: random.Random) -> None:
    """One component of one worker has fewer blocks than the others of its group."""
    parts = [part for file in _files(case) for part in file["components"]]
    if parts:
        part = rng.choice(parts)
        part["num_blocks"] = max(1, part["num_blocks"] - rng.randint(1, 2))


# ---------------------------------------------------------------------------------------------------------- positions


def _far_out(case: Case, rng: random.Random) -> None:
    step = lcm(*(_entry(group) for file in _files(case) for group in file["groups"]))
    away = step * rng.choice([1, 2, 5, FAR // step])
    if case.request["tokens"]["stop"] + away >= 2 * FAR:
        return
    for name in ("start", "stop"):
        case.request["tokens"][name] += away
    for _, tables in _sides(case):
        for table in tables:
            if "first_token" in table:
                table["first_token"] += away


def _other_range(case: Case, rng: random.Random) -> None:
    tokens = case.request["tokens"]
    start = max(0, tokens["start"] + rng.randint(-2, 3))
    tokens["start"], tokens["stop"] = start, max(start, tokens["stop"] + rng.randint(-4, 2))


def _fuller_rows(case: Case, rng: random.Random) -> None:
    """Every row holds so many times the positions; range, window and chunk need not end with one."""
    times, off = rng.choice([2, 3, 5]), rng.randint(-2, 2)
    for file in _files(case):
        for part in file["components"]:
            if file["groups"][part["group"]]["kind"] == "attention":
                part["tokens_per_row"] *= times
        for group in file["groups"]:
            group["block_tokens"] *= times
            if group.get("context_parallel"):
                group["context_parallel"]["interleave"] *= times
            for name in ("sliding_window", "chunk"):
                if group.get(name):
                    group[name] = max(1, group[name] * times + off)
    for name in ("start", "stop"):
        case.request["tokens"][name] *= times
    for _, tables in _sides(case):
        for table in tables:
            if "first_token" in table:
                table["first_token"] *= times
    _other_range(case, rng)


def _window_and_chunk(case: Case, rng: random.Random) -> None:
    """Either, both or none, of all attention groups; also such as no prompt reaches."""
    window, chunk = rng.choice([None, rng.randint(1, 12), END]), rng.choice([None, rng.randint(1, 12), END])
    for file in _files(case):
        for group in file["groups"]:
            if group["kind"] == "attention":
                group |= {"sliding_window": window, "chunk": chunk}


# ------------------------------------------------------------------------------------------------- groups and workers


def _other_groups(case: Case, rng: random.Random) -> None:
    """A group twice, perhaps dealt out in another way; workers of a side differ in which layers are in which."""
    files, tables = rng.choice(_sides(case))
    attention = [place for place, group in enumerate(files[0]["groups"]) if group["kind"] == "attention"]
    if not attention:
        return
    place, other = rng.choice(attention), len(files[0]["groups"])
    tables.append(_shuffled(tables[place], rng))
    _deal(case, files, place, rng)
    for file in files:
        for part in file["components"]:
            if part["group"] == place and chance(rng, 50):
                part["group"] = other


def _shuffled(table: Json, rng: random.Random) -> Json:
    """The same entries, in other blocks."""
    ids = [block for block in table["blocks"] if block is not None]
    rng.shuffle(ids)
    return {**table, "blocks": [None if block is None else ids.pop() for block in table["blocks"]]}


def _deal(case: Case, files: list[Json], place: int, rng: random.Random) -> None:
    """Append a group like ``place`` to all files of a side: as it is, for whole ranks, or dealt out over some."""
    way, size = rng.choice(["alike", "alike", "whole", "dealt"]), rng.choice([2, 3])
    row = max(part["tokens_per_row"] for file in _files(case) for part in file["components"])
    for number, file in enumerate(files):
        group = copy.deepcopy(file["groups"][place])
        if way != "alike":
            group.pop("context_parallel", None)
        if way == "dealt" and group["block_tokens"] % row == 0:
            group["context_parallel"] = {"rank": number % size, "size": size, "interleave": row}
        file["groups"].append(group)


def _parts_apart(case: Case, rng: random.Random) -> None:
    """Components of one layer in two groups."""
    files, tables = rng.choice(_sides(case))
    place, other = rng.randrange(len(tables)), len(tables)
    tables.append(copy.deepcopy(tables[place]))
    keys = sorted({(part["layer"], part["component"]) for file in files for part in file["components"]})
    moved = {key for key in keys if chance(rng, 50)}
    for file in files:
        file["groups"].append(copy.deepcopy(file["groups"][place]))
        for part in file["components"]:
            if part["group"] == place and (part["layer"], part["component"]) in moved:
                part["group"] = other


def _share_of_one(case: Case, rng: random.Random) -> None:
    """Context parallel over a single rank, which is none."""
    for file in rng.choice(_sides(case))[0]:
        for group in file["groups"]:
            if group["kind"] == "attention" and not group.get("context_parallel"):
                group["context_parallel"] = {"rank": 0, "size": 1, "interleave": group["block_tokens"]}


def _other_order(case: Case, rng: random.Random) -> None:
    for file in _files(case):
        rng.shuffle(file["components"])
    for files, _ in _sides(case):
        rng.shuffle(files)


def _one_copy_more(case: Case, rng: random.Random) -> None:
    files, _ = rng.choice(_sides(case))
    if len(files) < 5:
        files.append(copy.deepcopy(rng.choice(files)))


MORPHS: dict[str, Morph] = {
    "wide strides": _wide_strides,
    "a second sharded axis": _second_axis,
    "fewer blocks of one component": _fewer_blocks,
    "positions far out": _far_out,
    "another range": _other_range,
    "rows of more tokens": _fuller_rows,
    "window and chunk": _window_and_chunk,
    "a layer in unequal groups": _other_groups,
    "parts of a layer in two groups": _parts_apart,
    "context parallel over one rank": _share_of_one,
    "another order": _other_order,
    "one copy more": _one_copy_more,
}
