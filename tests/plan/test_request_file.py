"""Request files: what is written is read again, and faults are named by field."""

import pytest

from kvferry.errors import PlanError, PlanReason
from kvferry.plan import BlockTable, TransferRequest, encode_request, parse_request


def test_what_is_written_is_read_again() -> None:
    sides = (
        (BlockTable.of([7, None, 3], first_token=16), BlockTable.of([5])),
        (BlockTable.of([], first_token=0), BlockTable.of([None, 2], first_token=8)),
    )
    request = TransferRequest(3, 40, *sides)
    data = encode_request(request)
    assert data.startswith(b'{\n  "format": "kvferry.request/1",')
    again = parse_request(data)
    assert (again.start, again.stop) == (3, 40)
    for tables, read in zip(sides, (again.producer, again.consumer), strict=True):
        assert [(t.blocks.tolist(), t.held.tolist(), t.first_token) for t in read] == [
            (t.blocks.tolist(), t.held.tolist(), t.first_token) for t in tables
        ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "Expected `object`, got `array`"),
        ('{"tokens": ' + "[" * 100_000, "nested too deeply"),
        ('{"format": "kvferry.request/1", "tokens": []}', r"got `array` - at `\$.tokens`"),
        (
            '{"format": "kvferry.layout/1"}',
            r"^invalid-request: this is a layout file \(kvferry.layout/1\); a request file",
        ),
        (
            '{"format": "kvferry.request/2"}',
            r"this request file is of version 2 \(kvferry.request/2\); this kvferry reads",
        ),
        ('{"format": "request"}', r"\$.format is 'request': this is no file of kvferry's"),
        ("{", "truncated"),
        (
            '{"format": "kvferry.request/1", "tokens": {"start": 0}, "producer": [], "consumer": []}',
            r"missing required field `stop` - at `\$.tokens`",
        ),
        (
            '{"format": "kvferry.request/1", "tokens": {"start": 5, "stop": 4}, "producer": [], "consumer": []}',
            r"tokens \[5, 4\)",
        ),
    ],
)
def test_faults_are_named(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as refused:
        parse_request(text.encode())
    assert refused.value.reason is PlanReason.INVALID_REQUEST
