"""What an engine guessed: the tokens that its speculative decoding proposed for each request, step by step.

Guesses are verified, so a wrong cache under the guessing layers never shows in an answer. It shows here. It must be
installed in the engine's process before the engine is built.
"""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class GuessRecord:
    """The guesses of all requests of this process, by vLLM's own request ids."""

    def __init__(self) -> None:
        self._guesses: dict[str, list[list[int]]] = {}

    def install(self) -> None:
        """Note what the model runner's drafter proposes from now on."""
        propose = GPUModelRunner.propose_draft_token_ids

        def noted(runner: Any, *arguments: Any, **named: Any) -> Any:
            guessed = propose(runner, *arguments, **named)
            rows = guessed if isinstance(guessed, list) else guessed.tolist()
            for request_id, row in zip(runner.input_batch.req_ids, rows, strict=True):
                self._guesses.setdefault(request_id, []).append([int(token) for token in row])
            return guessed

        GPUModelRunner.propose_draft_token_ids = noted

    def take(self, request_id: str) -> list[list[int]]:
        """What was guessed for a request, which has ended."""
        return self._guesses.pop(request_id, [])
