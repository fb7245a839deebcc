"""One request of an engine's process: as vLLM takes it, and what came of it as our wire has it."""

import math
from typing import Any

from kvferry.testing.engine_wire import Generate, Generation


def prompt_of(command: Generate, core: Any) -> dict[str, Any]:
    """The prompt. Embeddings are rows of the engine's own model, so they ask the same as their tokens would."""
    if not command.as_embeddings:
        return {"prompt_token_ids": command.prompt}
    import torch

    model = core.model_executor.driver_worker.worker.model_runner.model
    with torch.no_grad():
        return {"prompt_embeds": model.embed_input_ids(torch.tensor(command.prompt))}


def sampling_of(command: Generate) -> Any:
    """Greedy, with the log probability of each chosen token."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": command.kv_transfer_params} if command.kv_transfer_params is not None else None
    return SamplingParams(
        temperature=0.0,
        max_tokens=command.max_tokens,
        logprobs=0,
        prompt_logprobs=0 if command.prompt_logprobs else None,
        stop_token_ids=command.stop_tokens,
        ignore_eos=command.ignore_eos,
        extra_args=extra,
        detokenize=False,
    )


def scoring() -> Any:
    """Compute the prompt and report the log probability of each of its tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def generation_of(output: Any, seconds: float, *, guesses: list[list[int]], prompt_steps: list[int]) -> Generation:
    """Our record of a finished vLLM request."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    steps = completion.logprobs or []
    return Generation(
        request_id=output.request_id,
        tokens=tokens,
        logprobs=[_on_the_wire(step[token].logprob) for token, step in zip(tokens, steps, strict=True)],
        finish_reason=str(completion.finish_reason),
        cached_tokens=output.num_cached_tokens or 0,
        prompt_logprobs=prompt_logprobs_of(output, 1) if output.prompt_logprobs else [],
        kv_transfer_params=output.kv_transfer_params,
        guesses=guesses,
        prompt_steps=prompt_steps,
        seconds=seconds,
    )


def prompt_logprobs_of(output: Any, start: int) -> list[float]:
    """Log probabilities of the prompt's own tokens from position ``start`` on."""
    ids = output.prompt_token_ids
    return [_on_the_wire(output.prompt_logprobs[i][ids[i]].logprob) for i in range(start, len(ids))]


def _on_the_wire(logprob: float) -> float:
    """JSON has no NaN, and a NaN agrees with nothing: neither does this."""
    return float(logprob) if math.isfinite(logprob) else -1e30
