"""The independent check of the planner: ``expect`` and ``check_plan``, from the contract alone, byte by byte.

``expect`` (see ``oracle_expect``) reads layouts and a request and says either why they are refused, or for each
consumer which destination byte must become, or may become, which byte of the model, and who may send it.
``check_plan`` holds a printed plan to that: it carries the descriptors out in a simulated memory where every byte of
the model and every byte of padding has a mark of its own, one byte at a time, and lists every guarantee that is
broken. Nothing is shared with ``kvferry.plan``: no arrays, no boxes, only loops and dictionaries. Where the contract
can be read in two ways both answers are accepted, and a comment says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.testing.oracle_expect import Byte, Expectation, Json, Refusal, Regions, Serve, expect
from kvferry.testing.oracle_layout import MalformedError, fields, integer, items

Mark = tuple[object, ...]
"""What a byte of simulated memory holds: (what it is,) unique for each byte of the model and each byte of padding."""

__all__ = ["Expectation", "Refusal", "check_plan", "expect", "judge"]

ENOUGH = 20
"""Violations listed before the rest is left out."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One descriptor."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    producer: int
    consumer: int
    copies: tuple[Copy, ...]


@dataclass(slots=True)
class _Run:
    """The state of one simulation."""

    expected: Expectation
    strict: bool
    memories: list[dict[int, Mark]]
    """Of each consumer: what was written, by address."""
    violations: list[str] = field(default_factory=list)

    def say(self, message: str) -> None:
        self.violations.append(message)


def check_plan(
    producers: Sequence[Json],
    consumers: Sequence[Json],
    request: Json,
    plan: Mapping[str, object],
    *,
    strict: bool = False,
) -> list[str]:
    """What is wrong with a plan (or a refusal ``{"error": {"reason": ...}}``): nothing when the list is empty.

    ``strict`` asks for the preferred replica also where producers overlap only in part.
    """
    return judge(expect(producers, consumers, request), plan, strict=strict)


def judge(expected: Refusal | Expectation, plan: Mapping[str, object], *, strict: bool = False) -> list[str]:
    """Like ``check_plan``, with the expectation already made."""
    if "error" in plan:
        return _judge_refusal(expected, plan["error"])
    if isinstance(expected, Refusal):
        return [f"planned, but must be refused: {sorted(expected.reasons)}"]
    try:
        transfers = read_plan(plan)
    except MalformedError as fault:
        return [f"malformed plan: {fault}"]
    run = _Run(expected, strict, [{} for _ in expected.targets])
    _check_shape(transfers, plan, run)
    for transfer in transfers:
        if transfer.producer < len(expected.sources) and transfer.consumer < len(expected.targets):
            _carry_out(transfer, run)
            _check_joins(transfer, run)
    for index, target in enumerate(expected.targets):
        _check_memory(index, target.required, target.carriable, run)
    rest = len(run.violations) - ENOUGH
    return run.violations[:ENOUGH] + ([f"and {rest} more"] if rest > 0 else [])


def _judge_refusal(expected: Refusal | Expectation, error: object) -> list[str]:
    said: Mapping[str, object] = error if isinstance(error, dict) else {"reason": repr(error)}
    reason, message = str(said.get("reason")), said.get("message", "")
    if isinstance(expected, Refusal):
        if reason in expected.reasons:
            return []
        return [f"refused with {reason}, the contract gives {sorted(expected.reasons)}: {message}"]
    return [] if reason in expected.tolerated else [f"refused with {reason}, but can be planned: {message}"]


def read_plan(plan: Mapping[str, object]) -> list[Transfer]:
    got = fields(dict(plan), {"format", "transfers", "stats"})
    if got["format"] != "kvferry.plan/1":
        raise MalformedError(f"format {got['format']!r}")
    transfers = []
    for value in items(got["transfers"]):
        one = fields(value, {"producer", "consumer", "descriptors"})
        copies = tuple(_copy(row) for row in items(one["descriptors"]))
        transfers.append(Transfer(integer(one["producer"], 0), integer(one["consumer"], 0), copies))
    return transfers


def _copy(row: object) -> Copy:
    numbers = list(row) if isinstance(row, list | tuple) else []
    if len(numbers) != 3:
        raise MalformedError(f"descriptor {row!r}")
    return Copy(integer(numbers[0], 0), integer(numbers[1], 0), integer(numbers[2], 1))


def _check_shape(transfers: Sequence[Transfer], plan: Mapping[str, object], run: _Run) -> None:
    pairs = [(transfer.producer, transfer.consumer) for transfer in transfers]
    if len(set(pairs)) < len(pairs):
        run.say(f"two transfers of one pair: {pairs}")
    for transfer in transfers:
        if not transfer.copies:
            run.say(f"empty transfer {transfer.producer} -> {transfer.consumer}")
        if transfer.producer >= len(run.expected.sources) or transfer.consumer >= len(run.expected.targets):
            run.say(f"no such pair: {transfer.producer} -> {transfer.consumer}")
    copies = [copy for transfer in transfers for copy in transfer.copies]
    stats = {"descriptors": len(copies), "bytes": sum(copy.nbytes for copy in copies)}
    if plan["stats"] != stats:
        run.say(f"stats are {plan['stats']}, counted {stats}")


def _in_one_region(first: int, nbytes: int, regions: Regions) -> bool:
    return any(low <= first and first + nbytes <= high for low, high in regions)


def _carry_out(transfer: Transfer, run: _Run) -> None:
    target = run.expected.targets[transfer.consumer]
    source = run.expected.sources[transfer.producer]
    memory = run.memories[transfer.consumer]
    pair = f"{transfer.producer} -> {transfer.consumer}"
    for copy in transfer.copies:
        if not _in_one_region(copy.src, copy.nbytes, run.expected.producer_regions[transfer.producer]):
            run.say(f"{pair} {copy}: source outside one region")
        if not _in_one_region(copy.dst, copy.nbytes, run.expected.consumer_regions[transfer.consumer]):
            run.say(f"{pair} {copy}: destination outside one region")
        for i in range(copy.nbytes):
            src, dst = copy.src + i, copy.dst + i
            if dst in memory:
                run.say(f"{pair} {copy}: destination byte {dst} is written twice")
            held = source.get(src)
            if held is not None:
                _check_server(transfer, held, target.serves.get(held[0]), run)
            memory[dst] = ("padding", transfer.producer, src) if held is None else ("content", *held)


def _check_server(transfer: Transfer, held: Byte, serve: Serve | None, run: _Run) -> None:
    if serve is None:
        return  # The byte itself is wrong; ``_check_memory`` says so.
    allowed = {serve.preferred} if run.strict else serve.allowed
    if transfer.producer not in allowed:
        run.say(f"wrong replica: {held[0]} to {transfer.consumer} by {transfer.producer}, not {sorted(allowed)}")


def _check_memory(index: int, required: Mapping[int, Byte], carriable: Mapping[int, Byte], run: _Run) -> None:
    memory = run.memories[index]
    for address, byte in required.items():
        if address not in memory:
            run.say(f"consumer {index}: required byte {byte} at {address} is not written")
    for address, mark in memory.items():
        byte_here = required.get(address) or carriable.get(address)
        if byte_here is None:
            run.say(f"consumer {index}: {address} must not be written, got {mark}")
        elif mark != ("content", *byte_here):
            run.say(f"consumer {index}: {address} must hold {byte_here}, got {mark}")


def _check_joins(transfer: Transfer, run: _Run) -> None:
    group = run.expected.targets[transfer.consumer].group
    regions = (
        run.expected.producer_regions[transfer.producer],
        run.expected.consumer_regions[transfer.consumer],
    )
    by_start = {(copy.src, copy.dst): copy for copy in transfer.copies}
    for copy in transfer.copies:
        follower = by_start.get((copy.src + copy.nbytes, copy.dst + copy.nbytes))
        # A descriptor may span groups; what counts is the group of the two bytes that meet.
        if follower is None or group.get(follower.dst - 1) != group.get(follower.dst):
            continue
        nbytes = copy.nbytes + follower.nbytes
        if _in_one_region(copy.src, nbytes, regions[0]) and _in_one_region(copy.dst, nbytes, regions[1]):
            run.say(f"{transfer.producer} -> {transfer.consumer}: {copy} and {follower} are not joined")
