"""One rank of many, alone in its process: vLLM's parallel state without peers.

vLLM asks its process groups for ranks and sizes in order to cut a model into shards, and talks over them only when it
computes. Inside :func:`as_rank` the groups are there, numbered by vLLM's own arithmetic, and silent: torch's *fake*
process group lies beneath (it completes every collective without doing anything), and a :class:`SilentGroup` above
takes the place of vLLM's coordinator, which would look for shared memory and for neighbours.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state


class SilentGroup(parallel_state.GroupCoordinator):
    """A group of which only this rank is there."""

    def __init__(self, group_ranks: Sequence[Sequence[int]], *, name: str) -> None:
        self.rank = torch.distributed.get_rank()
        self.unique_name = name
        self.group_ranks = [list(ranks) for ranks in group_ranks]
        self.ranks = next(ranks for ranks in self.group_ranks if self.rank in ranks)
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self.local_rank = self.device_index = 0
        self.torch_distributed_backend = "fake"
        self.cpu_group = self.device_group = torch.distributed.new_group(self.ranks, backend="fake")
        self.device = torch.device("cpu")
        self.use_device_communicator = False
        self.device_communicator = None
        self.mq_broadcaster = None
        self.use_custom_op_call = False
        self.use_cpu_custom_send_recv = False

    def destroy(self) -> None:
        """The process group beneath is destroyed as a whole."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Whatever this rank would have sent: all ranks are built from one configuration."""
        return obj


@contextmanager
def as_rank(vllm_config: Any, rank: int) -> Iterator[None]:
    """Inside, vLLM takes this process for rank ``rank`` of the engine of ``vllm_config``."""
    parallel = vllm_config.parallel_config
    torch.distributed.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
    try:
        parallel_state._WORLD = SilentGroup([range(parallel.world_size)], name="world")
        parallel_state._NODE_COUNT = 1
        with _silent_groups(), set_current_vllm_config(vllm_config):
            parallel_state.initialize_model_parallel(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
                backend="fake",
            )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@contextmanager
def _silent_groups() -> Iterator[None]:
    """Inside, vLLM's arithmetic of ranks makes silent groups."""
    speaking = parallel_state.init_model_parallel_group
    parallel_state.init_model_parallel_group = _silent
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = speaking


def _silent(
    group_ranks: Sequence[Sequence[int]], local_rank: int, backend: str, *args: Any, group_name: str, **options: Any
) -> SilentGroup:
    return SilentGroup(group_ranks, name=group_name)
