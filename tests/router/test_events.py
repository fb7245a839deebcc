"""Cutting and reading server-sent events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router import events

EVENTS = st.lists(
    st.tuples(
        st.sampled_from([b"data: ", b": ", b"data:"]),
        st.text('ab{}"\u00e9', max_size=5),
        st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    ),
    max_size=6,
).map(lambda parts: [head + text.encode() + end for head, text, end in parts])


@given(EVENTS, st.lists(st.integers(1, 7), min_size=1))
def test_events_come_out_whole_however_the_bytes_arrive(sent, sizes):
    data, cutter, got = b"".join(sent), events.EventCutter(), []
    place = turn = 0
    while place < len(data):
        size = sizes[turn % len(sizes)]
        got += cutter.feed(data[place : place + size])
        place, turn = place + size, turn + 1
    assert got == sent


def test_an_unfinished_event_is_kept_back():
    cutter = events.EventCutter()
    assert list(cutter.feed(b"data: 1\n")) == []
    assert list(cutter.feed(b"\ndata: 2")) == [b"data: 1\n\n"]


def test_an_endless_event_is_refused(monkeypatch):
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 10)
    with pytest.raises(events.EventTooLongError):
        list(events.EventCutter().feed(b"data: 12345678"))


def test_the_end_is_known():
    assert events.is_done(b"data: [DONE]\n\n")
    assert events.is_done(b"data:[DONE]\r\n\r\n")
    assert not events.is_done(b'data: {"a": "[DONE]"}\n\n')
    assert not events.is_done(b": [DONE]\n\n")


@pytest.mark.parametrize(
    ("value", "preamble"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": "a"}}]}, False),
        ({"choices": [{"delta": {"content": ""}}]}, False),
        ({"choices": [{"delta": {"role": "assistant"}, "finish_reason": "stop"}]}, False),
        ({"choices": [{"text": ""}]}, False),
        ({"choices": []}, True),
        ({"error": {}}, False),
    ],
)
def test_only_a_chunk_without_output_is_a_preamble(value, preamble):
    assert events.is_preamble(events.render(value)) is preamble


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ({"error": {"message": "m", "code": 404}}, 404),
        ({"error": {"message": "m", "code": None}}, 500),
        ({"error": {"message": "m", "code": 200}}, 500),
        ({"error": "text"}, 500),
    ],
)
def test_an_error_event_stands_for_a_status(value, status):
    answer = events.error_of(events.render(value))
    assert answer is not None
    assert answer.status == status


@pytest.mark.parametrize("event", [b"data: {}\n\n", b'data: {"error": null}\n\n', b": x\n\n", b"data: [DONE]\n\n"])
def test_other_events_are_no_errors(event):
    assert events.error_of(event) is None


@pytest.mark.parametrize("data", [b"", b"[DONE]", b"[1]", b"\xff", b'{"a":"\xff"}', b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_object_is_none_whatever_it_is(data):
    assert events.object_of(data) is None
    assert events.parse(b"data: " + data + b"\n\n") is None
    assert events.object_of(b'{"a":1}') == {"a": 1}
