"""Bytes to records and back, with limits.

A message is refused, by ``RemoteProtocolError``, before anything is built from it that the limits do not allow: its
size is checked first; msgspec checks the length of every list against the record's own bound before it makes the
list, never trusts a length that the buffer cannot hold, and stops at the interpreter's recursion limit. A small head
is read first, so that a peer of another major version is refused by name and not by whatever field of its body
happens to differ.
"""

from typing import Final, TypeVar

import msgspec

from kvferry.errors import ProtocolReason, RemoteProtocolError
from kvferry.protocol.messages import UNPAIRED_RANK, VERSION, Hello, Inbound, Name, Note, Pull, Reply, Whole

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Default limit; a pull of a million blocks is about 5 MB."""

_PULL_KINDS: Final = frozenset({"pull", "hello"})


class _HeadBody(msgspec.Struct, frozen=True):
    kind: Name = "pull"
    version: tuple[Whole, ...] | None = None


class _Head(msgspec.Struct, frozen=True):
    """Enough of a message to know whether its body can be read."""

    kvferry: _HeadBody | None = None
    layout_id: Whole = 0
    kv_caches_base_addr: msgspec.Raw = msgspec.Raw(b"\x90")


class _NumberBody(msgspec.Struct, frozen=True):
    pull: Whole | None = None


class _Number(msgspec.Struct, frozen=True):
    """Enough of a pull to answer it."""

    kvferry: _NumberBody | None = None


_ENCODER: Final = msgspec.msgpack.Encoder()
_HEAD: Final = msgspec.msgpack.Decoder(_Head)
_NUMBER: Final = msgspec.msgpack.Decoder(_Number)
_PULL: Final = msgspec.msgpack.Decoder(Pull)
_NOTE: Final = msgspec.msgpack.Decoder(Note)
_REPLY: Final = msgspec.msgpack.Decoder(Reply)
_EMPTY_LIST: Final = b"\x90"
_T = TypeVar("_T")


def encode(message: Inbound | Reply) -> bytes:
    """The one frame of a message."""
    return _ENCODER.encode(message)


def decode_inbound(data: bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Inbound:
    """What a consumer sent to a producer; raises :class:`RemoteProtocolError`."""
    _check_size(data, max_bytes)
    head = _decode(_HEAD, data)
    _check_version(head)
    if head.layout_id and bytes(head.kv_caches_base_addr) == _EMPTY_LIST:
        raise RemoteProtocolError(
            ProtocolReason.LAYOUT_MISS, f"layout {head.layout_id} came without its regions and none is stored"
        )
    if head.kvferry is None or head.kvferry.kind in _PULL_KINDS:
        return _checked_pull(_decode(_PULL, data))
    return _decode(_NOTE, data)


def decode_reply(data: bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Reply:
    """What a producer answered; raises :class:`RemoteProtocolError`."""
    _check_size(data, max_bytes)
    _check_version(_decode(_HEAD, data))
    return _decode(_REPLY, data)


def number_of(data: bytes) -> int | None:
    """The number of a pull, also where the rest of it is refused; ``None`` where there is none to be read.

    A consumer tells the answers on one connection apart by it. One that names no pull would be lost, and its pull be
    taken for one of a producer that has fallen silent.
    """
    try:
        head = _NUMBER.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return None
    return head.kvferry.pull if head.kvferry is not None else None


def _checked_pull(pull: Pull) -> Pull:
    """The rules of one pull that its types do not state."""
    if isinstance(pull.kvferry, Hello) != (pull.remote_tp_rank == UNPAIRED_RANK):
        raise _malformed(f"rank {pull.remote_tp_rank} is for a hello only, and a hello has no other")
    if isinstance(pull.kvferry, Hello):
        return pull
    if not pull.req_blocks:
        raise _malformed("a pull names no request")
    extension = pull.kvferry
    if extension is None:
        return pull
    for request, positions in extension.requests.items():
        if request not in pull.req_blocks:
            raise _malformed(f"positions of {request!r}, which is no request of the pull")
        groups = len(pull.req_blocks[request][1])
        if len(positions.first_tokens) != groups or len(positions.nulls) not in (0, groups):
            raise _malformed(f"positions of {request!r} do not cover its {groups} groups")
        if positions.start > positions.stop:
            raise _malformed(f"request {request!r} wants [{positions.start}, {positions.stop})")
    if len(extension.requests) != len(pull.req_blocks):
        raise _malformed("a request of the pull has no positions")
    return pull


def _check_size(data: bytes, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise RemoteProtocolError(
            ProtocolReason.LIMIT_EXCEEDED, f"message of {len(data)} bytes, the limit is {max_bytes}"
        )


def _check_version(head: _Head) -> None:
    if head.kvferry and head.kvferry.version:
        check_version(head.kvferry.version, "the peer")


def check_version(version: tuple[int, ...], who: str) -> None:
    """Refuse another major version by name."""
    if version[0] != VERSION[0]:
        raise RemoteProtocolError(
            ProtocolReason.VERSION, f"{who} speaks kvferry {version[0]}.x, this side {VERSION[0]}.x"
        )


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError, OverflowError) as error:
        # The text of a ValidationError names a path of our own records and a type, no content of the message.
        raise _malformed(_shown(error)) from error


def _shown(error: Exception) -> str:
    return str(error)[:200] if isinstance(error, msgspec.MsgspecError) else type(error).__name__


def _malformed(message: str) -> RemoteProtocolError:
    return RemoteProtocolError(ProtocolReason.MALFORMED, message)
