"""How asking an engine can fail, in the two ways that the rest of the router cares about.

An ``UpstreamError`` may be cured by asking elsewhere. What decides how, is ``reached``: a decode engine that
may have seen a transfer id may have pulled it, and a second pull of one transfer makes vLLM's own producer
free the blocks while the first is still being written. So such a transfer is spent: the prompt is prefilled
again under a new id.

A ``RefusedError`` is final: the client gets the answer that it holds.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvferry.errors import FerryError

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    body: bytes
    headers: Headers = field(default=())

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class FaultReason(StrEnum):
    """Why an engine counts as failed."""

    UNREACHABLE = "engine-unreachable"
    TIMED_OUT = "engine-timed-out"
    LOST = "engine-connection-lost"
    FAILED = "engine-failed"
    BUSY = "engine-busy"
    MALFORMED = "engine-answer-malformed"
    NOT_REGISTERED = "engine-not-registered"
    ABORTED = "engine-aborted"


class UpstreamError(FerryError):
    """One attempt at one engine failed."""

    reason: FaultReason

    def __init__(self, reason: FaultReason, message: str, *, reached: bool, answer: Answer | None = None) -> None:
        super().__init__(reason, message)
        self.reached = reached
        """Whether the engine may have seen the request."""
        self.answer = answer
        """What the engine itself said, when it said something."""

    @property
    def blames_engine(self) -> bool:
        return self.reason is not FaultReason.BUSY


class RefusedError(Exception):
    """The client gets this answer; nobody else is asked."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


def aborted() -> UpstreamError:
    """The engine has ended a request that nobody took back: it is being stopped."""
    return UpstreamError(FaultReason.ABORTED, "the engine ended the request", reached=True)


def error_body(message: str, *, status: int, kind: str, param: str | None = None) -> bytes:
    """An error in the form that OpenAI clients read."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_request(message: str, *, param: str | None = None) -> RefusedError:
    """The client's fault."""
    body = error_body(message, status=400, kind="BadRequestError", param=param)
    return RefusedError(Answer(400, body, (("content-type", "application/json"),)))


def too_long(limit: int) -> RefusedError:
    """The client sent more than is read."""
    body = error_body(f"the body is longer than {limit} bytes", status=413, kind="RequestTooLargeError")
    return RefusedError(Answer(413, body, (("content-type", "application/json"),)))


def gave_up(role: str, fault: UpstreamError | None) -> RefusedError:
    """Every engine was asked: pass on what the last one said, else say so without naming addresses."""
    if fault is not None and fault.answer is not None:
        return RefusedError(fault.answer)
    reason = "" if fault is None else f" (last: {fault.reason.value})"
    body = error_body(f"no {role} engine answered{reason}", status=503, kind="ServiceUnavailableError")
    return RefusedError(Answer(503, body, (("content-type", "application/json"),)))


def lost_midway(fault: UpstreamError) -> Answer:
    """What a client is told whose answer broke off after its first output."""
    message = f"the decode engine failed in the middle of the answer ({fault.reason.value})"
    body = error_body(message, status=502, kind="BadGatewayError")
    return Answer(502, body, (("content-type", "application/json"),))
