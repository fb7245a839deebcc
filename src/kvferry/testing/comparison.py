"""Is the answer of a prefill and a decode engine the answer of one engine?

Greedy decoding of one engine is not always one thing: the same prompt in a batch is computed by other kernels in
another order of summation, and a near-tie may fall the other way. So the reference is taken twice, each prompt alone
and all of them together. Where the two agree (and the model computes in float32), the pair must give the same tokens.
Elsewhere the single engine is asked how likely *it* finds the pair's tokens, one by one with the pair's own beginning
(teacher forcing): those log probabilities must be the pair's own, within a tolerance. A wrong or missing page moves
them by whole units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.testing.engine_wire import Generate, Generation
from kvferry.testing.engines import CALL_TIMEOUT_S, Engine, EngineError

FLOAT32_TOLERANCE: Final = 2e-3
"""Greatest difference of a log probability in float32. Seen between prefill and decode kernels: 5e-6."""

BFLOAT16_TOLERANCE: Final = 0.5
"""The same in bfloat16. Seen in one engine, between its own prefill and decode kernels: 0.13."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to ask."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Reference:
    """What the single engine answered."""

    prompt: Prompt
    alone: Generation
    batched: Generation

    @property
    def stable(self) -> bool:
        """Whether the engine agrees with itself."""
        return self.alone.tokens == self.batched.tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of one answer with its reference."""

    equal: bool
    how: str
    """``tokens`` or ``logprobs``: by which rule."""
    detail: str
    """What differs, or how far the log probabilities are apart."""


def take_references(single: Engine, prompts: Sequence[Prompt]) -> tuple[Reference, ...]:
    """Ask the single engine each prompt alone, then all at once."""
    alone = [
        single.generate(p.tokens, max_tokens=p.max_tokens, request_id=f"alone-{i}-{p.name}")
        for i, p in enumerate(prompts)
    ]
    futures = [
        single.submit(Generate(prompt=list(p.tokens), max_tokens=p.max_tokens, request_id=f"batched-{i}-{p.name}"))
        for i, p in enumerate(prompts)
    ]
    batched = [future.result(CALL_TIMEOUT_S) for future in futures]
    return tuple(_reference(p, a, b) for p, a, b in zip(prompts, alone, batched, strict=True))


def judge(reference: Reference, answer: Generation, *, single: Engine, exact: bool) -> Verdict:
    """Compare ``answer`` with ``reference``; ``exact`` says that the model computes in float32."""
    expected = reference.alone.tokens
    if answer.finish_reason != reference.alone.finish_reason or len(answer.tokens) != len(expected):
        ending = f"{len(answer.tokens)} tokens ({answer.finish_reason})"
        return Verdict(False, "tokens", f"{ending} instead of {len(expected)} ({reference.alone.finish_reason})")
    if exact and reference.stable:
        if answer.tokens == expected:
            return Verdict(True, "tokens", "")
        at = next(i for i, (got, want) in enumerate(zip(answer.tokens, expected, strict=True)) if got != want)
        return Verdict(False, "tokens", f"token {at}: {answer.tokens[at]} instead of {expected[at]}")
    tolerance = FLOAT32_TOLERANCE if exact else BFLOAT16_TOLERANCE
    forced = single.score(reference.prompt.tokens, answer.tokens, request_id=f"forced-{answer.request_id}")
    return compare_logprobs(answer.logprobs, forced, tolerance)


def compare_logprobs(own: Sequence[float], forced: Sequence[float], tolerance: float) -> Verdict:
    """Are two series of log probabilities of the same tokens one and the same?

    >>> compare_logprobs([-0.5, -1.0], [-0.5, -1.25], tolerance=0.1)
    Verdict(equal=False, how='logprobs', detail='token 1: log probability -1.0000, teacher-forced -1.2500')
    """
    if len(own) != len(forced):
        return Verdict(False, "logprobs", f"{len(own)} log probabilities against {len(forced)}")
    if not own:
        return Verdict(True, "logprobs", "no tokens")
    distances = [abs(a - b) for a, b in zip(own, forced, strict=True)]
    worst = max(range(len(own)), key=distances.__getitem__)
    if not distances[worst] <= tolerance:  # a NaN is no agreement
        return Verdict(
            False,
            "logprobs",
            f"token {worst}: log probability {own[worst]:.4f}, teacher-forced {forced[worst]:.4f}",
        )
    return Verdict(True, "logprobs", f"within {distances[worst]:.1e}")


def _reference(prompt: Prompt, alone: Generation, batched: object) -> Reference:
    if not isinstance(batched, Generation):
        raise EngineError(f"the single engine failed on {prompt.name}: {batched}")
    return Reference(prompt, alone, batched)
