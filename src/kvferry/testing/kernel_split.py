"""A real logical/kernel block split on the CPU, where vLLM by itself never makes one.

The CPU attention backend accepts every multiple of 32 as its kernel block, so vLLM's block of 128 or 768 tokens is
also the kernel's. ``install_kernel_split(32)`` replaces the backend, through vLLM's own registry of backends, by a
subclass that differs in one answer: the kernel block it supports. vLLM then does what it does on a GPU: the tensor
gets ``ratio`` rows for every logical block, block tables are expanded for the kernel, and the scheduler and the
connector go on speaking of logical blocks.

One thing is wrong on the CPU then: where layers keep a state, vLLM 0.32's CPU runner clears newly allocated blocks by
using logical ids as rows, which with a split clears parts of *other* blocks, live ones among them (its GPU runner knows
the ratio). So the clearing is replaced too.

It must be installed in the engine's process before the engine is built, and once only. The subclass keeps the
name of its parent: to a connector it is the same backend, as the fault that it provokes would have it.
"""

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class SplitCpuAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]  # vLLM's classes are Any to the checker
    """CPU attention whose kernel block is fixed, instead of any multiple of 32."""

    kernel_block = 32

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        """The one size that vLLM may cut a logical block into."""
        return [SplitCpuAttentionBackend.kernel_block]


def install_kernel_split(kernel_block: int) -> None:
    """Make every attention layer of this process use kernel blocks of ``kernel_block`` tokens."""
    if kernel_block % 32 or kernel_block <= 0:
        raise ValueError(f"the CPU kernel needs a block of a multiple of 32 tokens, got {kernel_block}")
    SplitCpuAttentionBackend.kernel_block = kernel_block
    path = f"{SplitCpuAttentionBackend.__module__}.{SplitCpuAttentionBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    CPUModelRunner._zero_block_ids = _clear_logical_blocks


def _clear_logical_blocks(runner: Any, block_ids: list[int]) -> None:
    """Clear all rows of each logical block, in every full-attention layer."""
    layers = runner.compilation_config.static_forward_context
    for group in runner.kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            for name in group.layer_names:
                cache = layers[name].kv_cache
                ratio = cache.shape[0] // runner.kv_cache_config.num_blocks
                for block in block_ids:
                    cache[block * ratio : (block + 1) * ratio].zero_()
