"""Put the answers of several pieces together as if one engine had given them.

An index becomes the piece's choice; ids become one; usage is summed, where the prompt of several choices counts once.
A request of one piece is passed through as the bytes that came.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from kvferry.router import events
from kvferry.router.pieces import Piece

JsonObject: TypeAlias = dict[str, object]


def merge_bodies(pieces: Sequence[Piece], bodies: Sequence[bytes], *, answer_id: str) -> bytes:
    """The one body of several whole answers, given in the order of the pieces."""
    if len(bodies) == 1:
        return bodies[0]
    parsed = [events.object_of(body) or {} for body in bodies]
    merged = {**parsed[0], "id": answer_id, "choices": []}
    # What an engine says of one stream, or of its own transfer, is not true of all.
    merged |= {key: None for key in ("metrics", "kv_transfer_params") if key in merged}
    choices: list[object] = []
    usage = UsageSum()
    for piece, value in zip(pieces, parsed, strict=True):
        choices += _renumbered(value, piece)
        usage.add(piece, value.get("usage"))
    merged["choices"] = choices
    if usage.total:
        merged["usage"] = usage.total
    return msgspec.json.encode(merged)


class StreamMerge:
    """Rewrites the events of several pieces into those of one answer."""

    def __init__(self, pieces: Sequence[Piece], *, answer_id: str) -> None:
        self._single = len(pieces) == 1
        self._answer_id = answer_id
        self._usage = UsageSum()
        self._last: JsonObject | None = None
        """The last usage chunk seen: the pattern of the one at the end."""

    def event(self, piece: Piece, event: bytes) -> bytes | None:
        """What the client gets for this event; None when it waits for the end."""
        if self._single:
            return event
        if events.is_done(event):
            return None
        value = events.parse(event)
        if value is None:
            return event
        if value.get("choices") == [] and value.get("usage"):
            self._usage.add(piece, value["usage"])
            self._last = value
            return None
        if "choices" not in value:
            return event
        return events.render({**value, "id": self._answer_id, "choices": _renumbered(value, piece)})

    def end(self) -> bytes:
        """What the client gets when all pieces are done."""
        if self._single:
            return b""
        if self._last is None:
            return events.DONE
        last = {**self._last, "id": self._answer_id, "usage": self._usage.total}
        last.pop("metrics", None)
        return events.render(last) + events.DONE


class UsageSum:
    """Adds usage records; nested details too."""

    def __init__(self) -> None:
        self.total: JsonObject = {}

    def add(self, piece: Piece, usage: object) -> None:
        """Count one piece's usage."""
        if not isinstance(usage, Mapping):
            return
        counted = {
            key: value
            for key, value in usage.items()
            if piece.first_of_prompt or not str(key).startswith("prompt_tokens")
        }
        self.total = _sum(self.total, counted)
        parts = [self.total.get(key, 0) for key in ("prompt_tokens", "completion_tokens")]
        self.total["total_tokens"] = sum(part for part in parts if isinstance(part, int))


def _sum(left: Mapping[str, object], right: Mapping[str, object]) -> JsonObject:
    result: JsonObject = dict(left)
    for key, value in right.items():
        before = result.get(key)
        if isinstance(value, Mapping):
            result[key] = _sum(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, int | float) and isinstance(before, int | float):
            result[key] = before + value
        elif before is None:
            result[key] = value
    return result


def _renumbered(value: JsonObject, piece: Piece) -> list[object]:
    choices = value.get("choices")
    kept: Iterable[object] = choices if isinstance(choices, list) else ()
    return [{**choice, "index": piece.choice} for choice in kept if isinstance(choice, dict)]
