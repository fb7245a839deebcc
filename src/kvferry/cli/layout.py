"""``kvferry layout dump``: the layout files of a deployment before it is started.

Two deployments can so be held against each other (``kvferry check``) on any machine that has their vLLM. Everything
that needs vLLM is in :mod:`kvferry.vllm.dump` and is imported when the command runs.
"""

import importlib.util
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvferry.cli.refusal import refused
from kvferry.errors import ConfigError, ConfigReason

layout_app = typer.Typer(help="Layout files of vLLM's workers.", no_args_is_help=True)

NUM_BLOCKS: Final = 65_536
"""Enough for a million tokens in blocks of 16. On a CPU the blocks are address space, not memory."""

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Read by vLLM while it is imported: no network, nothing on standard output. What the user has set stands."""


@layout_app.callback()
def layout_group() -> None:
    """Layout files of vLLM's workers."""


@layout_app.command("dump")
def dump_command(
    model: Annotated[str, typer.Option(help="Folder of a model (config.json is enough), a config.json, or a name.")],
    out: Annotated[Path, typer.Option(help="Folder for rank-0.json, rank-1.json, ...")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel size.")] = 1,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a block; default: vLLM's choice.")] = None,
    num_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the pool.")] = NUM_BLOCKS,
    dtype: Annotated[str, typer.Option(help="Of the model, as vLLM spells it.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="Of the cache, as vLLM spells it.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest request; default: the model's.")] = None,
    speculative: Annotated[str | None, typer.Option(help="vLLM's --speculative-config, as JSON.")] = None,
    engine_args: Annotated[str, typer.Option(help="Further EngineArgs of vLLM, as a JSON object.")] = "{}",
    engine_id: Annotated[str, typer.Option(help="Name of the engine in the files.")] = "dump",
    kernel_block: Annotated[
        int | None, typer.Option(help="Tokens of a kernel block, on a CPU only: there the backend takes any size.")
    ] = None,
) -> None:
    """Write one layout file for each rank of a vLLM engine, without starting it or loading weights."""
    try:
        arguments = {
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "block_size": block_size,
            "num_gpu_blocks_override": num_blocks,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "max_model_len": max_model_len,
            "speculative_config": _json_object("--speculative", speculative) if speculative else None,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        given |= _json_object("--engine-args", engine_args)
        with _model_folder(model) as folder:
            paths = _dump({"model": folder, **given}, out, engine_id=engine_id, kernel_block=kernel_block)
    except ConfigError as error:
        raise refused(error) from error
    for path in paths:
        print(path)


def prepare_environment() -> None:
    """To be called before vLLM is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _dump(arguments: dict[str, Any], out: Path, *, engine_id: str, kernel_block: int | None) -> tuple[Path, ...]:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            ConfigReason.MISSING_DEPENDENCY,
            "kvferry layout dump asks vLLM, which is not installed here: run it where vLLM is. A running engine "
            "writes its layout by itself: set layout_dump in kv_connector_extra_config",
        )
    prepare_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's and torch's about each other
        from kvferry.vllm.dump import dump_layouts, is_cpu

        if kernel_block is not None:
            if not is_cpu():
                what = "--kernel-block: this platform's backends choose their own"
                raise ConfigError(ConfigReason.INVALID_VALUE, what)
            _fix_kernel_block(kernel_block)
        return dump_layouts(arguments, folder=out, engine_id=engine_id)


def _fix_kernel_block(tokens: int) -> None:
    from kvferry.testing.kernel_split import install_kernel_split

    try:
        install_kernel_split(tokens)
    except ValueError as error:
        raise ConfigError(ConfigReason.INVALID_VALUE, f"--kernel-block: {error}") from error


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(ConfigReason.INVALID_VALUE, f"{option} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(ConfigReason.INVALID_VALUE, f"{option} must be a JSON object, not {text}")
    return found


@contextmanager
def _model_folder(model: str) -> Iterator[str]:
    """vLLM takes a folder; a configuration on its own gets one for a moment."""
    path = Path(model)
    if model.startswith(("/", "./", "../", "~")) and not path.exists():
        raise ConfigError(ConfigReason.INVALID_VALUE, f"--model: there is no {model}")
    if not path.is_file():
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        shutil.copyfile(path, Path(folder) / "config.json")
        yield folder
