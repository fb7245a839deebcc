"""What kvferry raises: one root, one class for each room, each with a closed list of reasons.

A message says what was wrong, where, both values, and what to do. ``reason`` is for programs; it is one of the
enum of the class and never changes its spelling (operators alert on it). Rooms raise these; foreign exceptions
and return codes are mapped into them where they enter.
"""

from enum import StrEnum


class FerryError(Exception):
    """Root of everything that kvferry raises on purpose."""

    def __init__(self, reason: StrEnum, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message


class PlanReason(StrEnum):
    """Why a layout, a request or a pair was refused (``layout-v1`` section 3)."""

    INVALID_LAYOUT = "invalid-layout"
    INVALID_REQUEST = "invalid-request"
    OVERLAPPING_MEMORY = "overlapping-memory"
    OUTSIDE_REGION = "outside-region"
    DUPLICATE_BLOCKS = "duplicate-blocks"
    INCOMPATIBLE_CONTENT = "incompatible-content"
    MISSING_LAYER = "missing-layer"
    MISSING_COORDINATES = "missing-coordinates"
    MISSING_POSITIONS = "missing-positions"
    LIMIT_EXCEEDED = "limit-exceeded"
    UNSUPPORTED = "unsupported"


class PlanError(FerryError):
    """A layout, a request or a plan that is refused; nothing was sent."""

    reason: PlanReason

    def __init__(self, reason: PlanReason, message: str) -> None:
        super().__init__(reason, message)


class TransportReason(StrEnum):
    """Why a transport refused or failed."""

    CLOSED = "closed"
    CANCELLED = "cancelled"
    INVALID_DESCRIPTORS = "invalid-descriptors"
    INVALID_REGIONS = "invalid-regions"
    OUT_OF_RANGE = "out-of-range"
    NOT_REGISTERED = "not-registered"
    PEER_UNREACHABLE = "peer-unreachable"
    WRONG_PROTOCOL = "wrong-protocol"
    ENGINE_FAULT = "engine-fault"
    TIMED_OUT = "timed-out"
    PERMISSION = "permission"
    UNAVAILABLE = "unavailable"
    LIMIT_EXCEEDED = "limit-exceeded"


class TransportError(FerryError):
    """A transport fault. Never says that memory is quiet: only a completion or a fence does."""

    reason: TransportReason

    def __init__(self, reason: TransportReason, message: str) -> None:
        super().__init__(reason, message)


class ProtocolReason(StrEnum):
    """Why a message, a peer or a request was refused, or how a transfer failed."""

    MALFORMED = "malformed-message"
    UNKNOWN_TRANSFER = "unknown-transfer"
    DUPLICATE_TRANSFER = "duplicate-transfer"
    OTHER_PROMPT = "other-prompt"
    INCOMPATIBLE_PEER = "incompatible-peer"
    STALE_INCARNATION = "stale-incarnation"
    LAYOUT_MISS = "layout-miss"
    PLAN_REFUSED = "plan-refused"
    PEER_FAILED = "peer-failed"
    PEER_LOST = "peer-lost"
    EXPIRED = "expired"
    ABORTED = "aborted"
    TRANSPORT_FAILED = "transport-failed"
    DEVICE_FAILED = "device-failed"
    VERIFY_MISMATCH = "verify-mismatch"
    LIMIT_EXCEEDED = "limit-exceeded"
    VERSION = "version-mismatch"
    UNAUTHORIZED = "unauthorized"
    TARGET_REFUSED = "write-target-refused"


class ProtocolError(FerryError):
    """Base of the two below: an error says whose fault it is."""

    reason: ProtocolReason

    def __init__(self, reason: ProtocolReason, message: str) -> None:
        super().__init__(reason, message)


class LocalProtocolError(ProtocolError):
    """This side used the protocol wrongly: a bug of ours, or of the embedding engine."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that it must not."""


class ConfigReason(StrEnum):
    """Why the options were refused."""

    UNKNOWN_OPTION = "unknown-option"
    INVALID_VALUE = "invalid-value"
    UNSUPPORTED_MODEL = "unsupported-model"
    MISSING_DEPENDENCY = "missing-dependency"


class ConfigError(FerryError):
    """An option, or a model, that is refused at start-up."""

    reason: ConfigReason

    def __init__(self, reason: ConfigReason, message: str) -> None:
        super().__init__(reason, message)
