"""The layout files of an engine that has not been started: its ranks one after the other, in this process.

vLLM itself does everything: it reads the model's configuration, builds its layers, chooses backends and block sizes,
allocates the caches and registers them with the connector, which writes the file (option ``layout_dump``). Only two
things are other than in an engine that serves. The model is built on torch's *meta* device, where tensors have shapes
and no memory, so weights are neither loaded nor needed. And the ranks of a group are not processes: an
:class:`Executor` of our own lets each rank in turn believe that it is one of many (:mod:`kvferry.vllm.solitude`).

What the files say is what vLLM would do *on this machine*: another platform has other attention backends. Addresses
are made up, since the memory is gone when the file is read.
"""

import copy
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from kvferry.errors import ConfigError, ConfigReason, FerryError
from kvferry.layout import Layout, encode_layout, parse_layout
from kvferry.vllm.solitude import as_rank

SHAPES_ONLY = "kvferry-shapes-only"
"""The ``load_format`` of :class:`ShapesOnlyLoader`."""

_PLENTY = 1 << 50
"""Bytes that each rank is said to have for its caches: the number of blocks is given, not found."""

_SPACING = 1 << 42
"""Between the made-up addresses of two ranks."""


def dump_layouts(engine_args: Mapping[str, Any], *, folder: Path, engine_id: str = "dump") -> tuple[Path, ...]:
    """Write ``rank-N.json`` into ``folder`` for every rank of an engine of these ``EngineArgs``; returns the paths.

    ``num_gpu_blocks_override`` must be among the arguments. Raises :class:`ConfigError` with vLLM's own words when
    vLLM would not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config = engine_config(engine_args, kv_transfer=_connector(folder, engine_id), executor=RanksInTurn)
        EngineCore(config, RanksInTurn, log_stats=False).shutdown()
    except FerryError:
        raise
    except Exception as error:
        what = f"vLLM would not start an engine of these options: {type(error).__name__}: {error}"
        raise ConfigError(ConfigReason.INVALID_VALUE, what) from error
    size = config.parallel_config.world_size
    return tuple(_settle(folder / f"rank-{rank}.json", (rank + 1) * _SPACING) for rank in range(size))


def is_cpu() -> bool:
    """Whether vLLM has no accelerator here."""
    return bool(current_platform.is_cpu())


def engine_config(engine_args: Mapping[str, Any], *, kv_transfer: Mapping[str, Any], executor: type[Executor]) -> Any:
    """vLLM's configuration of an engine that is never to serve."""
    given = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "disable_log_stats": True,
        # Caches are as large as asked for; these two only keep vLLM from comparing them with this machine's memory.
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.01,
        **engine_args,
        "load_format": SHAPES_ONLY,
        "distributed_executor_backend": executor,
        "kv_transfer_config": dict(kv_transfer),
    }
    config = EngineArgs(**given).create_engine_config()
    if config.parallel_config.data_parallel_size > 1:
        raise ConfigError(
            ConfigReason.INVALID_VALUE,
            f"data parallel size {config.parallel_config.data_parallel_size}: replicas have equal layouts; dump one",
        )
    return config


def _connector(folder: Path, engine_id: str) -> dict[str, Any]:
    return {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {"layout_dump": str(folder.absolute() / "rank-{rank}.json")},
    }


# --------------------------------------------------------------------------------------------------- no weights


@register_model_loader(SHAPES_ONLY)
class ShapesOnlyLoader(BaseModelLoader):
    """Builds a model, of a target or a draft, without memory for its weights."""

    def download_model(self, model_config: Any) -> None:
        """There is nothing to fetch."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """There is nothing to load."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """The model on the meta device."""
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            return self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix).eval()


# --------------------------------------------------------------------------------------------------- no processes


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    worker: WorkerWrapperBase


class RanksInTurn(Executor):
    """All ranks of an engine, each called after the one before it has answered."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """As vLLM's own executors: what they would decide from it must not differ here."""
        return True

    def _init_executor(self) -> None:
        self._size = self.parallel_config.world_size
        self._ranks: list[_Rank] = []
        for number in range(self._size):
            # In an engine each worker has a copy of its own too: layers are noted in it.
            self._ranks.append(_Rank(number, self._start(number, copy.deepcopy(self.vllm_config))))

    def _start(self, number: int, config: Any) -> WorkerWrapperBase:
        worker = WorkerWrapperBase(rpc_rank=0, global_rank=number)
        arguments = {
            "vllm_config": config,
            "local_rank": 0,
            "rank": number,
            "distributed_init_method": "unused",
            "is_driver_worker": number == 0,
            "shared_worker_lock": None,
        }
        with as_rank(config, number):
            worker.init_worker(all_kwargs=[arguments])
            worker.init_device()
            worker.load_model()
            current_platform.update_block_size_for_backend(config)
        return worker

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        """Call every rank, in order."""
        answers = []
        for rank in self._ranks:
            with as_rank(rank.worker.vllm_config, rank.number):
                answers.append(run_method(rank.worker, method, args, kwargs or {}))
        return answers

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocate and register, and forget each rank's caches before the next rank's."""
        for rank in self._ranks:
            with as_rank(rank.worker.vllm_config, rank.number), UntouchedPools():
                rank.worker.initialize_from_config(kv_cache_configs)
                self.after_registration()
            _forget_caches(rank.worker)

    def after_registration(self) -> None:
        """The rank's connector has all that it will ever get."""
        ensure_kv_transfer_shutdown()

    def determine_available_memory(self) -> list[int]:
        """More than any number of blocks needs."""
        return [_PLENTY] * self._size

    def compile_or_warm_up_model(self) -> None:
        """Nothing is ever computed."""

    def check_health(self) -> None:
        """There is nothing that could die."""


def _forget_caches(worker: WorkerWrapperBase) -> None:
    worker.model_runner.kv_caches.clear()
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        layer.kv_cache = None


class UntouchedPools(TorchFunctionMode):
    """A cache's pool on the CPU is address space of which no page is ever touched, however large it is."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is not torch.zeros or str(options.get("device")) != "cpu" or options.get("dtype") is not torch.int8:
            return func(*args, **options)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return torch.frombuffer(mmap.mmap(-1, args[0], flags=flags), dtype=torch.int8)


_MAP_NORESERVE = 0x4000
"""Linux: do not count the mapping against memory. Python names it from 3.13 on."""


# ------------------------------------------------------------------------------------------------- made-up addresses


def _settle(path: Path, base: int) -> Path:
    """Rewrite a file with addresses from ``base`` on, so that equal deployments have equal files."""
    path.write_bytes(encode_layout(moved(parse_layout(path.read_bytes()), base)))
    return path


def moved(layout: Layout, base: int) -> Layout:
    """``layout`` with its regions side by side from ``base`` on, everything at its old place inside them."""
    regions, starts, at = [], [], base
    for region in layout.regions:
        regions.append(msgspec.structs.replace(region, address=at))
        starts.append((region, at - region.address))
        at += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
    components = tuple(
        msgspec.structs.replace(c, address=c.address + next(by for region, by in starts if _is_in(c.address, region)))
        for c in layout.components
    )
    return msgspec.structs.replace(layout, regions=tuple(regions), components=components)


def _is_in(address: int, region: Any) -> bool:
    return bool(region.address <= address < region.address + region.nbytes)


_ALIGNMENT = 1 << 21
