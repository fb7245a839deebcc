"""Putting answers of pieces together."""

import json

from kvferry.router import events
from kvferry.router.merge import StreamMerge, UsageSum, merge_bodies
from kvferry.router.pieces import cut

PIECES = cut({"prompt": ["a", "b"], "n": 2}, limit=9)


def test_one_answer_stays_as_it_came():
    (piece,) = cut({"prompt": "a"}, limit=9)
    assert merge_bodies([piece], [b'{ "id":1}'], answer_id="x") == b'{ "id":1}'
    merge = StreamMerge([piece], answer_id="x")
    for event in (b": note\n\n", b'data: {"id": 1}\n\n', events.DONE):
        assert merge.event(piece, event) == event
    assert merge.end() == b""


def test_usage_counts_a_prompt_once_whatever_its_choices():
    usage = UsageSum()
    for piece in PIECES:
        usage.add(
            piece,
            {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "total_tokens": 12,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 1},
            },
        )
    assert usage.total == {
        "prompt_tokens": 20,
        "completion_tokens": 8,
        "total_tokens": 28,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }


def test_absent_and_null_usage_is_nothing():
    usage = UsageSum()
    usage.add(PIECES[0], None)
    usage.add(PIECES[0], {"prompt_tokens": 1, "completion_tokens": None, "prompt_tokens_details": None})
    usage.add(PIECES[2], {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}})
    assert usage.total["prompt_tokens"] == 2
    assert usage.total["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage.total["total_tokens"] == 2


def test_what_is_true_of_one_engine_request_only_is_not_said_of_all():
    bodies = [
        json.dumps({"id": "i", "choices": [{"index": 0}], "metrics": {"t": 1}, "kv_transfer_params": {"x": 1}}).encode()
        for _ in PIECES
    ]
    merged = json.loads(merge_bodies(PIECES, bodies, answer_id="cmpl-x"))
    assert merged == {
        "id": "cmpl-x",
        "choices": [{"index": index} for index in range(4)],
        "metrics": None,
        "kv_transfer_params": None,
    }


def test_a_streamed_batch_without_usage_ends_with_done_only():
    merge = StreamMerge(PIECES, answer_id="x")
    event = b'data: {"id":"i","choices":[{"index":0,"text":"t"}]}\n\n'
    assert events.parse(merge.event(PIECES[3], event)) == {"id": "x", "choices": [{"index": 3, "text": "t"}]}
    assert merge.event(PIECES[3], events.DONE) is None
    assert merge.event(PIECES[3], b": note\n\n") == b": note\n\n"
    error = b'data: {"error": {"code": 500}}\n\n'
    assert merge.event(PIECES[3], error) == error
    assert merge.end() == events.DONE
