"""The layout file, ``kvferry.layout/1``: JSON in, JSON out, every fault named by field.

msgspec checks types, ranges and unknown fields while it decodes and says where (``$.components[0].axes[1].count``);
what two fields contradict each other in is left to :func:`kvferry.layout.check.check_layout`.
"""

import re

import msgspec

from kvferry.errors import PlanError
from kvferry.layout.check import check_consistency
from kvferry.layout.records import InvalidLayoutError, Layout

FORMAT = "kvferry.layout/1"

_DECODER = msgspec.json.Decoder(Layout, strict=True)


def parse_layout(data: bytes) -> Layout:
    """A layout from the bytes of a layout file. Raises :class:`PlanError` (``invalid-layout``) naming the field.

    The memory rule is not checked here: :func:`kvferry.layout.bind_layout` does that.
    """
    try:
        # `format` has a default, so that code which builds a layout need not repeat it; a file must state it.
        if (other := other_kind(data, FORMAT)) is not None:
            raise InvalidLayoutError(other)
        layout = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InvalidLayoutError(fault_of(error)) from error
    check_consistency(layout)
    return layout


class _Head(msgspec.Struct):
    format: str


_HEAD = msgspec.json.Decoder(_Head)
_KIND = re.compile(r"kvferry\.([a-z-]{1,32})/([0-9]{1,9})")


def other_kind(data: bytes, wanted: str) -> str | None:
    """What is said of a file that is not of the format ``wanted``; None when it is."""
    found = _HEAD.decode(data).format
    if found == wanted:
        return None
    kind = wanted.partition(".")[2].partition("/")[0]
    known = _KIND.fullmatch(found)
    if known is None:
        return f"$.format is {found[:64]!r}: this is no file of kvferry's; a {kind} file ({wanted}) is wanted here"
    if known[1] == kind:
        return f"this {kind} file is of version {known[2]} ({found}); this kvferry reads {wanted}"
    return f"this is a {known[1]} file ({found}); a {kind} file ({wanted}) is wanted here"


def fault_of(error: Exception) -> str:
    """What a decoder has against a file, without the name of our own exception in it."""
    if isinstance(error, RecursionError):
        return "nested too deeply for a file of kvferry's"
    text, cause = str(error), error.__cause__
    return text.removeprefix(f"{cause.reason.value}: ") if isinstance(cause, PlanError) else text


def encode_layout(layout: Layout) -> bytes:
    """The bytes of a layout file, indented for people."""
    return msgspec.json.format(msgspec.json.encode(layout), indent=2)
