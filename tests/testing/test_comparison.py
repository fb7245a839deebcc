"""The rules by which an answer is compared, on values."""

import math

import pytest

from kvferry.testing.comparison import FLOAT32_TOLERANCE, Prompt, Reference, compare_logprobs
from kvferry.testing.engine_wire import Generation


def generation(tokens: list[int]) -> Generation:
    return Generation(
        request_id="r", tokens=tokens, logprobs=[-0.5] * len(tokens), finish_reason="length", cached_tokens=0
    )


def test_an_engine_that_disagrees_with_itself_is_no_reference_for_tokens() -> None:
    prompt = Prompt("p", (1, 2))
    assert Reference(prompt, generation([3, 4]), generation([3, 4])).stable
    assert not Reference(prompt, generation([3, 4]), generation([3, 5])).stable


def test_log_probabilities_within_the_tolerance_are_equal() -> None:
    near = [-0.5, -1.0 + FLOAT32_TOLERANCE / 2]
    assert compare_logprobs(near, [-0.5, -1.0], FLOAT32_TOLERANCE).equal


@pytest.mark.parametrize(
    ("own", "forced", "told"),
    [
        ([-0.5, -1.0], [-0.5, -1.1], "token 1: log probability -1.0000, teacher-forced -1.1000"),
        ([-0.5], [-0.5, -1.0], "1 log probabilities against 2"),
        ([math.nan], [-0.5], "token 0"),
        ([-0.5], [math.nan], "token 0"),
    ],
)
def test_whatever_differs_is_told(own: list[float], forced: list[float], told: str) -> None:
    verdict = compare_logprobs(own, forced, FLOAT32_TOLERANCE)
    assert not verdict.equal
    assert told in verdict.detail
