"""One fault put into a case that was right: what the contract says must be refused, or turns out to be no fault at all.

A fault only changes the dictionaries; whether the case must be refused now, and with which reasons, is the oracle's to
say. Each function returns nothing and may leave the case alone where it does not apply.
"""

import random
from collections.abc import Callable

from kvferry.testing.case_model import Json, chance

Sides = tuple[list[Json], list[Json], Json]
"""(producers, consumers, request)."""


def _files(case: Sides, rng: random.Random) -> list[Json]:
    return case[0] if chance(rng, 50) else case[1]


def _file(case: Sides, rng: random.Random) -> Json:
    return rng.choice(_files(case, rng))


def _parts(files: list[Json], kind: str | None = None) -> list[Json]:
    return [
        part
        for file in files
        for part in file["components"]
        if kind is None or file["groups"][part["group"]]["kind"] == kind
    ]


def _tables(case: Sides, rng: random.Random) -> list[Json]:
    tables: list[Json] = case[2]["producer" if chance(rng, 50) else "consumer"]
    return tables


# ------------------------------------------------------------------------------------------------------------ layout


def unknown_field(case: Sides, rng: random.Random) -> None:
    file = _file(case, rng)
    rng.choice([file, file["parallel"], rng.choice(file["regions"]), *file["components"][:1]])["colour"] = 1


def missing_field(case: Sides, rng: random.Random) -> None:
    file = _file(case, rng)
    place = rng.choice([file, file["parallel"], *file["components"][:1], *file["groups"][:1]])
    place.pop(rng.choice([k for k in sorted(place) if k not in _OPTIONAL] or sorted(place)))


_OPTIONAL = {"sliding_window", "chunk", "context_parallel", "memory", "optional"}


def bad_number(case: Sides, rng: random.Random) -> None:
    part = rng.choice(_parts(_files(case, rng)) or [{}])
    name = rng.choice(["address", "num_blocks", "block_stride", "kernel_blocks", "kernel_stride", "tokens_per_row"])
    part[name] = rng.choice([-1, 2**63, "7", 1.5, None, True, 2**62])


def placement(case: Sides, rng: random.Random) -> None:
    _file(case, rng)["regions"] = []


def wrong_format(case: Sides, rng: random.Random) -> None:
    rng.choice([_file(case, rng), case[2]])["format"] = "kvferry.layout/2"


def unequal_groups(case: Sides, rng: random.Random) -> None:
    files = [side for side in (case[0], case[1]) if len(side) > 1]
    if files:
        groups = rng.choice(files)[-1]["groups"]
        if chance(rng, 50):
            groups.append(dict(rng.choice(groups)))
        else:
            rng.choice(groups)["sliding_window"] = 77


def axis_out_of_range(case: Sides, rng: random.Random) -> None:
    axes = [axis for part in _parts(_files(case, rng)) for axis in part["axes"]]
    if axes:
        axis = rng.choice(axes)
        axis["start"] = axis["total"] - axis["count"] + 1


def twice_the_axis(case: Sides, rng: random.Random) -> None:
    part = rng.choice(_parts(_files(case, rng)) or [{"axes": []}])
    part["axes"] += [dict(axis) for axis in part["axes"][:1]]


def block_does_not_divide(case: Sides, rng: random.Random) -> None:
    part = rng.choice(_parts(_files(case, rng), "attention") or [{"kernel_blocks": 0}])
    part["kernel_blocks"] += 1


def group_out_of_range(case: Sides, rng: random.Random) -> None:
    for part in _parts(_files(case, rng))[:1]:
        part["group"] = 9


def component_twice(case: Sides, rng: random.Random) -> None:
    file = _file(case, rng)
    file["components"] += [dict(part) for part in file["components"][:1]]


def bad_ring(case: Sides, rng: random.Random) -> None:
    for file in _files(case, rng):
        for group in file["groups"]:
            if group["kind"] == "attention":
                ring = group.get("context_parallel") or {"rank": 0, "size": 1, "interleave": 1}
                group["context_parallel"] = {**ring, rng.choice(["interleave", "rank"]): 7}


def state_with_kernel_blocks(case: Sides, rng: random.Random) -> None:
    for part in _parts(_files(case, rng), "state")[:1]:
        part["kernel_blocks"] = 2


# ------------------------------------------------------------------------------------------------------------ memory


def onto_another(case: Sides, rng: random.Random) -> None:
    file = _file(case, rng)
    parts = file["components"]
    if len(parts) > 1:
        one, other = rng.sample(parts, 2)
        one["address"] = other["address"] + rng.randint(0, 1)
    elif parts:
        parts[0]["block_stride"] = 1


def short_stride(case: Sides, rng: random.Random) -> None:
    """A length longer than the stride: whole pages put on every kernel block."""
    for part in _parts(_files(case, rng)):
        name = rng.choice(["block_stride", "kernel_stride"])
        part[name] = max(1, part[name] // rng.choice([2, 3, 12]))


def short_region(case: Sides, rng: random.Random) -> None:
    region = rng.choice(_file(case, rng)["regions"] or [{"nbytes": 2}])
    region["nbytes"] = max(1, region["nbytes"] - rng.randint(1, 9))


def moved_away(case: Sides, rng: random.Random) -> None:
    part = rng.choice(_parts(_files(case, rng)) or [{"address": 0}])
    part["address"] += rng.choice([1, 3, 5000])


def regions_overlap(case: Sides, rng: random.Random) -> None:
    file = _file(case, rng)
    file["regions"] += [dict(region) for region in file["regions"][:1]]


# ----------------------------------------------------------------------------------------------------------- request


def backwards(case: Sides, rng: random.Random) -> None:
    tokens = case[2]["tokens"]
    tokens["start"] = tokens["stop"] + rng.randint(1, 3)


def table_count(case: Sides, rng: random.Random) -> None:
    tables = _tables(case, rng)
    if chance(rng, 50):
        tables.pop()
    else:
        tables.append({"first_token": 0, "blocks": []})


def unaligned_first_token(case: Sides, rng: random.Random) -> None:
    table = rng.choice(_tables(case, rng))
    table["first_token"] = table.get("first_token", 0) + 1


def no_first_token(case: Sides, rng: random.Random) -> None:
    rng.choice(_tables(case, rng)).pop("first_token", None)


def id_out_of_range(case: Sides, rng: random.Random) -> None:
    table = rng.choice(_tables(case, rng))
    if table["blocks"]:
        table["blocks"][rng.randint(0, len(table["blocks"]) - 1)] = rng.choice([-1, 60, 2**63, 2**40])


def id_twice(case: Sides, rng: random.Random) -> None:
    """In one table, or in two whose groups may overlay."""
    tables = _tables(case, rng)
    one, other = rng.choice(tables), rng.choice(tables)
    ids = [block for block in other["blocks"] if block is not None]
    if ids and one["blocks"]:
        one["blocks"][rng.randint(0, len(one["blocks"]) - 1)] = rng.choice(ids)


def id_twice_at_the_end(case: Sides, rng: random.Random) -> None:
    """An entry beyond what moves: the whole table counts."""
    tables = _tables(case, rng)
    one, other = rng.choice(tables), rng.choice(tables)
    ids = [block for block in other["blocks"] if block is not None]
    if ids and "first_token" in one:
        one["blocks"].append(rng.choice(ids))


def request_field(case: Sides, rng: random.Random) -> None:
    rng.choice([case[2], case[2]["tokens"], rng.choice(_tables(case, rng))])["epoch"] = 3


# ------------------------------------------------------------------------------------------------------------- pairs


def other_content(case: Sides, rng: random.Random) -> None:
    part = rng.choice(_parts(case[1]) or [{"content": {}, "axes": []}])
    if chance(rng, 40):
        part["content"]["type"] = "fp8:other"
    elif chance(rng, 50) and any(axis["name"] != "token" for axis in part["axes"]):
        rng.choice([axis for axis in part["axes"] if axis["name"] != "token"])["total"] += 1
    elif part["content"].get("nbytes", 1) > 1:
        part["content"]["nbytes"] -= 1


def other_reach(case: Sides, rng: random.Random) -> None:
    files = _files(case, rng)
    index = rng.randint(0, len(files[0]["groups"]) - 1)
    for file in files:
        if file["groups"][index]["kind"] == "attention":
            file["groups"][index][rng.choice(["sliding_window", "chunk"])] = 6


def layer_gone(case: Sides, rng: random.Random) -> None:
    parts = _parts(case[1])
    if parts:
        gone = rng.choice(parts)
        whole = chance(rng, 50)
        for file in case[0]:
            file["components"] = [
                part
                for part in file["components"]
                if part["layer"] != gone["layer"] or not (whole or part["component"] == gone["component"])
            ]


def producer_gone(case: Sides, rng: random.Random) -> None:
    if len(case[0]) > 1:
        case[0].pop(rng.randint(0, len(case[0]) - 1))


def narrower(case: Sides, rng: random.Random) -> None:
    """Producers that hold one coordinate less, of one component."""
    axes = [a for part in _parts(case[0]) for a in part["axes"] if a["name"] != "token" and a["count"] > 1]
    for axis in axes[: rng.randint(1, 2)]:
        axis["count"] -= 1


def hole(case: Sides, rng: random.Random) -> None:
    table = rng.choice(case[2]["producer"])
    if table["blocks"]:
        table["blocks"][rng.randint(0, len(table["blocks"]) - 1)] = None


def short_table(case: Sides, rng: random.Random) -> None:
    table = rng.choice(case[2]["producer"])
    if "first_token" in table:
        table["blocks"] = table["blocks"][: len(table["blocks"]) // 2]


Fault = Callable[[Sides, random.Random], None]

LAYOUT: list[Fault] = [
    unknown_field,
    missing_field,
    bad_number,
    bad_number,
    placement,
    wrong_format,
    unequal_groups,
    axis_out_of_range,
    twice_the_axis,
    block_does_not_divide,
    group_out_of_range,
    component_twice,
    bad_ring,
    state_with_kernel_blocks,
]
MEMORY: list[Fault] = [onto_another, onto_another, short_stride, short_region, moved_away, regions_overlap]
REQUEST: list[Fault] = [
    backwards,
    table_count,
    unaligned_first_token,
    no_first_token,
    id_out_of_range,
    id_out_of_range,
    request_field,
]
TWICE: list[Fault] = [id_twice, id_twice_at_the_end]
PAIR: list[Fault] = [
    other_content,
    other_content,
    other_reach,
    layer_gone,
    layer_gone,
    layer_gone,
    producer_gone,
    producer_gone,
    producer_gone,
    narrower,
    narrower,
    hole,
    hole,
    hole,
    short_table,
    short_table,
]


def put_fault(case: Sides, rng: random.Random) -> str:
    """Puts one fault in; returns its name."""
    fault = rng.choice(rng.choice([LAYOUT, MEMORY, MEMORY, REQUEST, TWICE, TWICE, PAIR, PAIR, PAIR]))
    fault(case, rng)
    return fault.__name__
