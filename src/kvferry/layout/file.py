"""The layout file, ``kvferry.layout/1``: JSON in, JSON out, every fault named by field.

msgspec checks types, ranges and unknown fields while it decodes and says where (``$.components[0].axes[1].count``);
what two fields contradict each other in is left to :func:`kvferry.layout.check.check_layout`.
"""

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
        layout = _DECODER.decode(data)
        _check_format(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InvalidLayoutError(_say(error)) from error
    check_consistency(layout)
    return layout


class _Head(msgspec.Struct):
    format: str


def _check_format(data: bytes) -> None:
    # `format` has a default, so that code which builds a layout need not repeat it; a file must state it.
    msgspec.json.decode(data, type=_Head)


def _say(error: Exception) -> str:
    text = str(error)
    cause = error.__cause__
    if isinstance(cause, PlanError):
        text = text.replace(f"{cause.reason.value}: ", "", 1)
    if isinstance(error, RecursionError):
        text = "nested too deeply for a layout file"
    return text


def encode_layout(layout: Layout) -> bytes:
    """The bytes of a layout file, indented for people."""
    return msgspec.json.format(msgspec.json.encode(layout), indent=2)
