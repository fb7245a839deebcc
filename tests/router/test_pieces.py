"""Cutting a request into pieces and writing their engine requests."""

import tracemalloc

import pytest

from kvferry.ids import EngineId, TransferId
from kvferry.router.config import Prefill
from kvferry.router.faults import RefusedError
from kvferry.router.pieces import Handoff, cut, decode_body, prefill_body

TRANSFER = TransferId("t")


def only(body):
    (piece,) = cut(body, limit=10)
    return piece


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], [[]]),
        (None, [None]),
    ],
)
def test_each_prompt_of_a_list_is_a_piece(prompt, parts):
    pieces = cut({"prompt": prompt}, limit=10)
    assert [piece.body["prompt"] for piece in pieces] == parts
    assert [piece.choice for piece in pieces] == list(range(len(parts)))
    assert all(piece.first_of_prompt for piece in pieces)


def test_embedded_prompts_are_cut_too_but_not_mixed():
    pieces = cut({"prompt_embeds": ["e1", "e2"]}, limit=10)
    assert [piece.body["prompt_embeds"] for piece in pieces] == ["e1", "e2"]
    with pytest.raises(RefusedError):
        cut({"prompt": ["a"], "prompt_embeds": ["e1"]}, limit=10)


def test_choices_become_pieces_with_seeds_of_their_own():
    pieces = cut({"prompt": ["a", "b"], "n": 2, "seed": 3}, limit=10)
    assert [(p.choice, p.first_of_prompt, p.body["prompt"], p.body["seed"]) for p in pieces] == [
        (0, True, "a", 3),
        (1, False, "a", 4),
        (2, True, "b", 3),
        (3, False, "b", 4),
    ]
    assert {piece.body["n"] for piece in pieces} == {1}


def test_choices_without_a_seed_get_none():
    assert all("seed" not in piece.body for piece in cut({"prompt": "a", "n": 2}, limit=10))


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
def test_a_wrong_number_of_choices_is_refused(n):
    with pytest.raises(RefusedError) as caught:
        cut({"prompt": "a", "n": n}, limit=10)
    assert caught.value.answer.status == 400


def test_the_limit_counts_prompts_times_choices():
    assert len(cut({"prompt": ["a"] * 5, "n": 2}, limit=10)) == 10
    with pytest.raises(RefusedError):
        cut({"prompt": ["a"] * 5, "n": 3}, limit=10)


def test_a_prefill_keeps_what_shapes_the_prompt_and_drops_what_shapes_the_output():
    shaping = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "truncate_prompt_tokens": 5,
        "cache_salt": "s",
        "priority": 1,
    }
    output = {"stop": ["."], "stop_token_ids": [2], "logprobs": True, "top_logprobs": 2, "n": 1, "echo": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50, "min_tokens": 20}
    body = prefill_body(only({**shaping, **output, **stream}), TRANSFER)
    params = body.pop("kv_transfer_params")
    assert body == {**shaping, "stream": False, "max_tokens": 1, "min_tokens": 1}
    assert params == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": TRANSFER}


def test_max_completion_tokens_is_lowered_only_where_given():
    assert prefill_body(only({"max_completion_tokens": 9}), TRANSFER)["max_completion_tokens"] == 1
    assert prefill_body(only({"max_completion_tokens": None}), TRANSFER)["max_completion_tokens"] is None
    assert "max_completion_tokens" not in prefill_body(only({"max_tokens": 9}), TRANSFER)


def test_a_decode_request_is_the_clients_with_the_handoff():
    handoff = Handoff(TRANSFER, Prefill("http://p:1", "http://p:2"), EngineId("E"), True, {"more": 1})
    assert decode_body(only({"prompt": "a", "stream": True}), handoff) == {
        "prompt": "a",
        "stream": True,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": TRANSFER,
            "remote_engine_id": "E",
            "remote_bootstrap_addr": "http://p:2",
            "more": 1,
        },
    }
    assert decode_body(only({"prompt": "a"}), None) == {"prompt": "a"}


@pytest.mark.parametrize("sent", ["text", 7, ["a"], {"do_remote_prefill": True}])
def test_a_client_steers_no_transfer_by_either_field(sent):
    body = {"prompt": "a", "kv_transfer_params": sent, "vllm_xargs": {"kv_transfer_params": sent, "session_id": "s"}}
    assert decode_body(only(body), None) == {"prompt": "a", "vllm_xargs": {"session_id": "s"}}
    assert prefill_body(only(body), TRANSFER)["vllm_xargs"] == {"session_id": "s"}
    assert decode_body(only({"prompt": "a", "vllm_xargs": "odd"}), None)["vllm_xargs"] == "odd", "for vLLM to judge"


@pytest.mark.parametrize(
    ("body", "alone"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": "a", "echo": True}, False),
        ({"prompt": "a", "logprobs": 1}, False),
        ({"prompt": "a", "echo": True, "logprobs": 0}, True),
        ({"prompt": "a", "prompt_logprobs": 0}, True),
        ({"prompt": "a", "use_beam_search": True}, True),
        # vLLM truncates to another length when no output length is stated, and a prefill always states one.
        ({"prompt": "a", "truncate_prompt_tokens": -1}, False),
        ({"prompt": "a", "truncate_prompt_tokens": -1, "max_tokens": 0}, True),
        ({"prompt": "a", "truncate_prompt_tokens": -1, "max_tokens": None}, True),
        ({"messages": [], "truncate_prompt_tokens": -1}, True),
        ({"messages": [], "truncate_prompt_tokens": -1, "max_completion_tokens": 4}, False),
    ],
)
def test_who_computes_the_prompt(body, alone):
    assert only(body).decode_only is alone


def test_too_many_prompts_are_counted_before_they_are_cut():
    body = {"prompt": ["a"] * 200_000, **{f"field{number}": number for number in range(20)}}
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError):
            cut(body, limit=1024)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
