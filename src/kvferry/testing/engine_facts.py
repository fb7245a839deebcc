"""What an engine's process tells of its engine: the scheduler's books, all ranks' caches, how prompts were computed."""

from typing import Any

from kvferry.testing.engine_wire import EngineFacts, GroupFacts, TensorFacts


def inspect_engine(core: Any) -> EngineFacts:
    """The scheduler's books, and the tensors of a worker in this process."""
    scheduler = core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    running, waiting = scheduler.get_request_counts()
    driver = getattr(core.model_executor, "driver_worker", None)
    return EngineFacts(
        num_blocks=pool.num_gpu_blocks,
        free_blocks=pool.get_num_free_blocks(),
        running=running,
        waiting=waiting,
        held=len(scheduler.requests),
        groups=[
            GroupFacts(
                kind=type(group.kv_cache_spec).__name__,
                block_tokens=group.kv_cache_spec.block_size,
                layers=list(group.layer_names),
            )
            for group in scheduler.kv_cache_config.kv_cache_groups
        ],
        tensors=tensors_of(driver) if driver is not None else {},
    )


def inspect_caches(core: Any) -> list[dict[str, TensorFacts]]:
    """The tensors of every rank, also of workers in other processes: each is asked."""
    return list(core.model_executor.collective_rpc(tensors_of))


def tensors_of(worker: Any) -> dict[str, TensorFacts]:
    """By layer, of one worker; runs in its process."""
    runner = worker.worker.model_runner
    found = {}
    for group in runner.kv_cache_config.kv_cache_groups:
        for layer in group.layer_names:
            cache = runner.compilation_config.static_forward_context[layer].kv_cache
            first = cache[0] if isinstance(cache, list | tuple) else cache
            found[layer] = TensorFacts(shape=list(first.shape), stride=list(first.stride()), dtype=str(first.dtype))
    return found


class PromptSteps:
    """In which steps each prompt was computed: so many of its tokens in the first, in the second and so on."""

    def __init__(self, scheduler: Any) -> None:
        """Notes what ``scheduler`` schedules from now on."""
        self._steps: dict[str, list[int]] = {}
        schedule = scheduler.schedule

        def noted(*arguments: Any, **named: Any) -> Any:
            step = schedule(*arguments, **named)
            for request_id, tokens in step.num_scheduled_tokens.items():
                request = scheduler.requests[request_id]
                # The scheduler counts what it has scheduled as computed.
                left = request.num_prompt_tokens - (request.num_computed_tokens - tokens)
                if left > 0:
                    self._steps.setdefault(request_id, []).append(min(tokens, left))
            return step

        scheduler.schedule = noted

    def take(self, request_id: str) -> list[int]:
        """The steps of a request, which has ended."""
        return self._steps.pop(request_id, [])
