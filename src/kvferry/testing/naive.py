"""The slow planner: one copy for each row, then neighbours joined: a reference to try the oracle with.

It goes from positions to addresses, where the oracle goes from addresses to positions, so that a slip in the address
formula of one shows against the other. It refuses nothing: give it cases that can be planned.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import lcm
from typing import Any

# As in ``case_model``: JSON as it is written to files.
Json = dict[str, Any]
Box = dict[str, int]
"""One coordinate of each global axis."""


@dataclass(slots=True)
class Row:
    """One row of one component to be copied."""

    part: Json
    box: Box
    position: int
    address: int


def plan_naively(
    producers: list[Json], consumers: list[Json], request: Json, *, rng: random.Random | None = None
) -> Json:
    """A plan in the form that ``kvferry plan --json`` prints. With ``rng`` it carries some of what it may."""
    turns = _count_turns(producers, consumers)
    pairs: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for index, consumer in enumerate(consumers):
        for row in _rows(consumer, producers, request=request, rng=rng):
            holders = _holders(producers, row.part, box=row.box, position=row.position)
            producer = holders[turns[tuple(holders)].index(index) % len(holders)]
            source = _source_address(producers[producer], request, row)
            copies = pairs.setdefault((producer, index), [])
            nbytes = row.part["content"]["nbytes"]
            pieces = _at_seams(
                source,
                row.address,
                nbytes=nbytes,
                src_regions=producers[producer]["regions"],
                dst_regions=consumer["regions"],
            )
            copies += [(row.part["group"], *piece) for piece in pieces]
    transfers: list[Json] = [
        {
            "producer": p,
            "consumer": c,
            "descriptors": _joined(copies, producers[p]["regions"], consumers[c]["regions"]),
        }
        for (p, c), copies in sorted(pairs.items())
    ]
    every = [copy for transfer in transfers for copy in transfer["descriptors"]]
    return {
        "format": "kvferry.plan/1",
        "transfers": transfers,
        "stats": {"descriptors": len(every), "bytes": sum(copy[2] for copy in every)},
    }


# ----------------------------------------------------------------------------------------------------- who holds what


def _find(file: Json, part: Json) -> Json | None:
    for other in file["components"]:
        if (other["layer"], other["component"]) == (part["layer"], part["component"]):
            found: Json = other
            return found
    return None


def _ring(file: Json, part: Json) -> tuple[int, int, int]:
    """(rank, size, interleave); the interleave is one block where there is no context parallel."""
    group = file["groups"][part["group"]]
    ring = group.get("context_parallel") or {"rank": 0, "size": 1, "interleave": group["block_tokens"]}
    return ring["rank"], ring["size"], ring["interleave"]


def _holds(file: Json, part: Json, *, box: Box, position: int) -> bool:
    for axis in part["axes"]:
        if axis["name"] != "token" and not 0 <= box[axis["name"]] - axis["start"] < axis["count"]:
            return False
    rank, size, interleave = _ring(file, part)
    return position < 0 or (position // interleave) % size == rank


def _holders(producers: list[Json], part: Json, *, box: Box, position: int) -> list[int]:
    found = []
    for index, producer in enumerate(producers):
        other = _find(producer, part)
        if other is not None and _holds(producer, other, box=box, position=position):
            found.append(index)
    return found


def _boxes(part: Json) -> Iterator[Box]:
    axes = [axis for axis in part["axes"] if axis["name"] != "token"]
    for choice in product(*(range(a["start"], a["start"] + a["count"]) for a in axes)):
        yield {axis["name"]: x for axis, x in zip(axes, choice, strict=True)}


def _count_turns(producers: list[Json], consumers: list[Json]) -> dict[tuple[int, ...], list[int]]:
    """For each set of producers that hold the same row: the consumers that need one of that set, in order."""
    turns: dict[tuple[int, ...], list[int]] = {}
    for index, consumer in enumerate(consumers):
        for part in consumer["components"]:
            others = [(p, other) for p in producers if (other := _find(p, part)) is not None]
            rings = [_ring(file, one) for file, one in [(consumer, part), *others]]
            for box in _boxes(part):
                for position in range(lcm(*(size * interleave for _, size, interleave in rings))):
                    if not _holds(consumer, part, box=box, position=position):
                        continue
                    holders = tuple(_holders(producers, part, box=box, position=position))
                    needing = turns.setdefault(holders, [])
                    if index not in needing:
                        needing.append(index)
    return turns


# ------------------------------------------------------------------------------------------------- positions to bytes


def _address(part: Json, box: Box, *, block: int, index: int) -> int:
    """Of the row that holds the ``index``-th rank-local position of a block."""
    address: int = part["address"] + block * part["block_stride"]
    for axis in part["axes"]:
        if axis["name"] == "token":
            kernel, within = divmod(index, axis["count"] * part["tokens_per_row"])
            address += kernel * part["kernel_stride"] + within // part["tokens_per_row"] * axis["stride"]
        else:
            address += (box[axis["name"]] - axis["start"]) * axis["stride"]
    return address


def _locate(file: Json, part: Json, *, table: Json, position: int) -> tuple[int, int, int] | None:
    """(entry, block, rank-local index in the block) of a position that the rank holds, if the table lists it."""
    _, size, interleave = _ring(file, part)
    span = file["groups"][part["group"]]["block_tokens"] * size
    entry, offset = divmod(position - table["first_token"], span)
    if not 0 <= entry < len(table["blocks"]) or table["blocks"][entry] is None:
        return None
    return entry, table["blocks"][entry], offset // (interleave * size) * interleave + offset % interleave


def _state_block(file: Json, part: Json, *, table: Json, stop: int) -> int | None:
    if "first_token" not in table:
        block: int | None = table["blocks"][0] if table["blocks"] else None
        return block
    located = _locate(file, part, table=table, position=stop - 1)
    return None if located is None else located[1]


def _source_address(file: Json, request: Json, row: Row) -> int:
    part = _find(file, row.part)
    assert part is not None
    table = request["producer"][part["group"]]
    if row.position < 0:
        block = _state_block(file, part, table=table, stop=request["tokens"]["stop"])
        assert block is not None
        return _address(part, row.box, block=block, index=0)
    located = _locate(file, part, table=table, position=row.position)
    assert located is not None
    return _address(part, row.box, block=located[1], index=located[2])


def _rows(consumer: Json, producers: list[Json], *, request: Json, rng: random.Random | None) -> Iterator[Row]:
    for part in consumer["components"]:
        if all(_find(producer, part) is None for producer in producers):
            continue
        table = request["consumer"][part["group"]]
        stop = request["tokens"]["stop"]
        if consumer["groups"][part["group"]]["kind"] == "state":
            block = _state_block(consumer, part, table=table, stop=stop) if stop else None
            if block is not None:
                for box in _boxes(part):
                    yield Row(part, box, -1, _address(part, box, block=block, index=0))
        elif table["blocks"]:
            for box in _boxes(part):
                yield from _attention_rows(consumer, producers, request, part=part, box=box, rng=rng)


def _attention_rows(
    consumer: Json, producers: list[Json], request: Json, *, part: Json, box: Box, rng: random.Random | None
) -> Iterator[Row]:
    group, table = consumer["groups"][part["group"]], request["consumer"][part["group"]]
    start, stop = request["tokens"]["start"], request["tokens"]["stop"]
    low = start
    if group.get("sliding_window") is not None:
        low = max(low, stop - group["sliding_window"])
    if group.get("chunk") is not None and stop > 0:
        low = max(low, (stop - 1) // group["chunk"] * group["chunk"])
    tokens = part["tokens_per_row"]
    entries: dict[int, list[tuple[int, int]]] = {}
    needed = set()
    end = table["first_token"] + len(table["blocks"]) * group["block_tokens"] * _ring(consumer, part)[1]
    for position in range(table["first_token"], end, tokens):
        located = _locate(consumer, part, table=table, position=position)
        if located is None or not _holds(consumer, part, box=box, position=position):
            continue
        entry, block, index = located
        entries.setdefault(entry, []).append((position, _address(part, box, block=block, index=index)))
        if max(position, low) < min(position + tokens, stop):
            needed.add(position)
    for rows in entries.values():
        busy = any(position in needed for position, _ in rows)
        for position, address in rows:
            if position not in needed:
                may = busy and rng is not None and rng.random() < 0.5 and position >= start
                if not may or not _listed(producers, request, part=part, box=box, position=position):
                    continue
            yield Row(part, box, position, address)


def _listed(producers: list[Json], request: Json, *, part: Json, box: Box, position: int) -> bool:
    for index in _holders(producers, part, box=box, position=position):
        other = _find(producers[index], part)
        assert other is not None
        if _locate(producers[index], other, table=request["producer"][other["group"]], position=position) is not None:
            return True
    return False


# ---------------------------------------------------------------------------------------------------- seams and joins


def _room(address: int, regions: list[Json]) -> int:
    """Bytes from an address to the end of its region."""
    for region in regions:
        if 0 <= address - region["address"] < region["nbytes"]:
            end: int = region["address"] + region["nbytes"]
            return end - address
    raise AssertionError(f"{address} lies in no region")


def _at_seams(
    src: int, dst: int, *, nbytes: int, src_regions: list[Json], dst_regions: list[Json]
) -> list[tuple[int, int, int]]:
    pieces = []
    while nbytes:
        step = min(nbytes, _room(src, src_regions), _room(dst, dst_regions))
        pieces.append((src, dst, step))
        src, dst, nbytes = src + step, dst + step, nbytes - step
    return pieces


def _joined(
    copies: list[tuple[int, int, int, int]], src_regions: list[Json], dst_regions: list[Json]
) -> list[list[int]]:
    """Within each group, every copy that goes on where the one before it ends is added to it, short of a seam."""
    done: list[list[int]] = []
    last_group = None
    for group, src, dst, nbytes in sorted(copies, key=lambda copy: (copy[0], copy[2])):
        if done and group == last_group:
            before = done[-1]
            follows = before[0] + before[2] == src and before[1] + before[2] == dst
            both = before[2] + nbytes
            if follows and both <= _room(before[0], src_regions) and both <= _room(before[1], dst_regions):
                before[2] = both
                continue
        done.append([src, dst, nbytes])
        last_group = group
    return done
