"""Requests as the oracle reads them, and what follows from one: which rows are held, required, or may be carried.

A *cell* is one row of content: (layer, component, global coordinates, first position of the row). Two bytes of two
workers are the same byte of the model exactly when their cells and their offsets in the row are equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.testing.oracle_layout import (
    Coordinates,
    File,
    Group,
    MalformedError,
    Part,
    clusters,
    fields,
    integer,
    items,
)

STATE = -1
"""Stands for the position in the cells of a state: there is one state a request."""

Cell = tuple[str, str, Coordinates, int]


@dataclass(frozen=True, slots=True)
class Table:
    first_token: int | None
    blocks: tuple[int | None, ...]

    def listed(self) -> list[int]:
        return [block for block in self.blocks if block is not None]

    def state_block(self, group: Group, stop: int) -> int | None:
        """The block that holds the state after ``stop`` tokens, if the table lists one."""
        if stop == 0:
            return None
        if self.first_token is None:
            return self.blocks[0] if self.blocks else None
        entry = (stop - 1 - self.first_token) // group.block_tokens
        return self.blocks[entry] if 0 <= entry < len(self.blocks) else None

    def entries(self, group: Group) -> Iterator[tuple[int, int]]:
        """(first position, block) of the entries that are not null, of an attention table."""
        for i, block in enumerate(self.blocks):
            if block is not None:
                yield (self.first_token or 0) + i * group.span, block


@dataclass(frozen=True, slots=True)
class Request:
    start: int
    stop: int
    producer: tuple[Table, ...]
    consumer: tuple[Table, ...]


def _table(value: object) -> Table:
    got = fields(value, {"blocks"}, {"first_token"})
    blocks = tuple(None if block is None else integer(block, 0) for block in items(got["blocks"]))
    first = integer(got["first_token"], 0) if "first_token" in got else None
    return Table(first, blocks)


def read_request(value: object) -> Request:
    got = fields(value, {"format", "tokens", "producer", "consumer"})
    if got["format"] != "kvferry.request/1":
        raise MalformedError(f"format {got['format']!r}")
    tokens = fields(got["tokens"], {"start", "stop"})
    start, stop = integer(tokens["start"], 0), integer(tokens["stop"], 0)
    if start > stop:
        raise MalformedError(f"start {start} after stop {stop}")
    producer = tuple(_table(table) for table in items(got["producer"]))
    return Request(start, stop, producer, tuple(_table(table) for table in items(got["consumer"])))


@dataclass(slots=True)
class Findings:
    """Reasons to refuse, and reasons that another sensible reading of the contract would give."""

    faults: set[str]
    unsure: set[str]


def judge_tables(files: Sequence[File], tables: Sequence[Table], found: Findings) -> None:
    """What is wrong with the tables of one side; its files have equal groups."""
    groups = files[0].groups
    if len(tables) != len(groups):
        found.faults.add("invalid-request")
        return
    for index, (group, table) in enumerate(zip(groups, tables, strict=True)):
        _judge_first_token(group, table, found)
        _judge_range(files, index, table, found)
        if len(set(table.listed())) < len(table.listed()):
            found.faults.add("duplicate-blocks")


def have_positions(groups: Sequence[Group], tables: Sequence[Table]) -> bool:
    """Whether each group has a table whose entries stand at positions at all."""
    return len(tables) == len(groups) and not any(
        table.first_token is not None and table.first_token % group.span
        for group, table in zip(groups, tables, strict=True)
    )


def _judge_first_token(group: Group, table: Table, found: Findings) -> None:
    if table.first_token is not None:
        if table.first_token % group.span:
            found.faults.add("invalid-request")
    elif group.kind == "attention":
        # An empty table says nothing, with or without a first token.
        (found.faults if table.blocks else found.unsure).add("invalid-request")
    elif len(table.blocks) > 1:
        found.faults.add("invalid-request")
    elif not table.blocks:
        # "lists one block": none may be read as "lists no block for stop - 1" or as an error.
        found.unsure.add("invalid-request")


def _judge_range(files: Sequence[File], index: int, table: Table, found: Findings) -> None:
    sizes = [part.num_blocks for file in files for part in file.parts if part.group == index]
    if not sizes or not table.listed():
        return
    if max(table.listed()) >= max(sizes):
        found.faults.add("invalid-request")
    elif max(table.listed()) >= min(sizes):
        # Out of range for some components only; ``rows`` of a moved one makes it certain (see ``judge_moves``).
        found.unsure.add("invalid-request")


def judge_overlay(
    files: Sequence[File], overlaid: set[tuple[int, int]], tables: Sequence[Table], found: Findings
) -> None:
    """A block id in two tables whose groups overlay: certain where bytes are shared, open where only ranges are."""
    near = set(overlaid)
    for file in files:
        for cluster in clusters(file):
            near |= {(a, b) for a in cluster for b in cluster if a < b}
    for a, b in near:
        if set(tables[a].listed()) & set(tables[b].listed()):
            (found.faults if (a, b) in overlaid else found.unsure).add("duplicate-blocks")


def lowest_needed(group: Group, request: Request) -> int:
    low = request.start
    if group.window is not None:
        low = max(low, request.stop - group.window)
    if group.chunk is not None and request.stop > 0:
        low = max(low, (request.stop - 1) // group.chunk * group.chunk)
    return low


def held_rows(file: File, tables: Sequence[Table], stop: int) -> Iterator[tuple[Part, Cell, int, int]]:
    """(component, cell, address, first position of its entry) of every row in the listed blocks of one worker."""
    for part in file.parts:
        group, table = file.groups[part.group], tables[part.group]
        if group.kind == "state":
            block = table.state_block(group, stop)
            if block is not None and block < part.num_blocks:
                for _, where, address in part.rows(block):
                    yield part, (*part.key, where, STATE), address, STATE
            continue
        for first, block in table.entries(group):
            if block < part.num_blocks:
                for index, where, address in part.rows(block):
                    yield part, (*part.key, where, group.position(first, index)), address, first


def is_needed(part: Part, group: Group, request: Request, cell: Cell) -> bool:
    """Whether the row holds a needed position."""
    position = cell[3]
    if position == STATE:
        return True
    low = lowest_needed(group, request)
    return any(low <= p < request.stop for p in range(position, position + part.row_tokens))


def unlisted_needed(part: Part, group: Group, table: Table, request: Request) -> bool:
    """Whether a needed row of the component would lie in a block that the component does not have."""
    if group.kind == "state":
        block = table.state_block(group, request.stop)
        return block is not None and block >= part.num_blocks
    low = lowest_needed(group, request)
    for first, block in table.entries(group):
        if block >= part.num_blocks:
            held = range(group.block_tokens)
            if any(low <= group.position(first, i) < request.stop for i in held):
                return True
    return False
