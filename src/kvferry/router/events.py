"""Server-sent events: cut a byte stream into whole events and look at one.

Events are passed on as the bytes that came, one by one and at once. Cutting at event borders costs nothing,
because engines write whole events, and it means that a connection lost in the middle of one never shows the
client half an object.
"""

from collections.abc import Iterator

import msgspec

from kvferry.router.faults import Answer

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 64 * 1024 * 1024


class EventTooLongError(ValueError):
    """An engine sent more than ``MAX_EVENT_BYTES`` without ending an event."""


class EventCutter:
    """Feed it bytes as they come; it gives back the events that are complete."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that ``data`` completes, each with the empty line that ends it."""
        start = max(0, len(self._rest) - 3)
        self._rest += data
        while (end := _event_end(self._rest, start)) is not None:
            event = bytes(self._rest[:end])
            del self._rest[:end]
            start = 0
            yield event
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")


def _event_end(buffer: bytearray, start: int) -> int | None:
    ends = [found + len(border) for border in (b"\n\n", b"\r\n\r\n") if (found := buffer.find(border, start)) >= 0]
    return min(ends) if ends else None


def is_done(event: bytes) -> bool:
    """Whether this is the last event of an answer."""
    return _data(event) == b"[DONE]"


def parse(event: bytes) -> dict[str, object] | None:
    """The JSON object of an event; None for comments, ``[DONE]`` and anything else."""
    return object_of(_data(event))


def object_of(data: bytes) -> dict[str, object] | None:
    """The JSON object that an engine sent; None for anything else, also for what is nested too deeply to be read."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def render(value: dict[str, object]) -> bytes:
    """An event that holds this object."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def is_preamble(event: bytes) -> bool:
    """Whether the event carries no output yet: a chat answer's chunk that only says who speaks, or one of no choice.

    vLLM writes the first just before the first token, also when what follows is an error, and the other (the usage) at
    the end, also when there was no token. So the router may hold it for that moment, and ask another engine if need be.
    """
    value = parse(event)
    choices = value.get("choices") if value else None
    return isinstance(choices, list) and all(_only_names_a_role(choice) for choice in choices)


def error_of(event: bytes) -> Answer | None:
    """The answer that an error event stands for; None when the event is no error."""
    value = parse(event)
    error = value.get("error") if value else None
    if not error:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return Answer(status, msgspec.json.encode({"error": error}), (("content-type", "application/json"),))


def is_aborted(answer: dict[str, object] | None) -> bool:
    """Whether the engine ended a request by itself, in a whole answer or an event, instead of computing it.

    vLLM does that to all that it is working on when it is told to stop: status 200, as much text as there was, and this
    reason. (A stream that had no output until then ends with ``[DONE]`` alone.)
    """
    choices = answer.get("choices") if answer else None
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices
    )


def _only_names_a_role(choice: object) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
        return False
    delta = choice.get("delta")
    return isinstance(delta, dict) and "role" in delta and not any(v for k, v in delta.items() if k != "role")


def _data(event: bytes) -> bytes:
    lines = [line[5:].lstrip(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
