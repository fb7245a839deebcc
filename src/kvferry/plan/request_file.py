"""The request file, ``kvferry.request/1``: JSON in, :class:`TransferRequest` out, every fault named by field."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvferry.errors import PlanError
from kvferry.layout.file import fault_of, other_kind
from kvferry.layout.records import LIMIT
from kvferry.plan.request import BlockTable, InvalidRequestError, TransferRequest

REQUEST_FORMAT: Final = "kvferry.request/1"

_Number = Annotated[int, Meta(ge=0, le=LIMIT)]


class _Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start: _Number
    stop: _Number


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    blocks: list[_Number | None]
    first_token: _Number | None = None


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["kvferry.request/1"]
    tokens: _Tokens
    producer: list[_Table]
    consumer: list[_Table]


_DECODER = msgspec.json.Decoder(_Request, strict=True)


def parse_request(data: bytes) -> TransferRequest:
    """A request from the bytes of a request file. Raises :class:`PlanError` (``invalid-request``) naming the field."""
    try:
        if (other := other_kind(data, REQUEST_FORMAT)) is not None:
            raise InvalidRequestError(other)
        form = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(fault_of(error)) from error
    try:
        tables = [
            tuple(BlockTable.of(table.blocks, first_token=table.first_token) for table in side)
            for side in (form.producer, form.consumer)
        ]
        return TransferRequest(form.tokens.start, form.tokens.stop, tables[0], tables[1])
    except PlanError as error:
        raise InvalidRequestError(error.message) from error


def encode_request(request: TransferRequest) -> bytes:
    """The bytes of a request file, indented for people."""
    sides = [[_form(table) for table in side] for side in (request.producer, request.consumer)]
    form = _Request(REQUEST_FORMAT, _Tokens(request.start, request.stop), sides[0], sides[1])
    return msgspec.json.format(msgspec.json.encode(form), indent=2)


def _form(table: BlockTable) -> _Table:
    blocks = [block if held else None for block, held in zip(table.blocks.tolist(), table.held.tolist(), strict=True)]
    return _Table(blocks, table.first_token)
