"""Where a worker writes its layout file: the connector's option ``layout_dump``.

The option is a path in which ``{rank}`` stands for the worker's number in its engine and ``{engine}`` for the engine's
id, so that ranks and engines of one host do not overwrite each other. The file is there whole or not at all.
"""

import os
from pathlib import Path

from kvferry.errors import ConfigError, ConfigReason
from kvferry.layout import Layout, encode_layout


def write_layout(pattern: str, layout: Layout) -> Path:
    """Write ``layout`` to the path that ``pattern`` names for its worker. Raises :class:`ConfigError`."""
    parallel = layout.parallel
    if "{rank}" not in pattern and parallel.tp_size * parallel.pp_size > 1:
        raise ConfigError(
            ConfigReason.INVALID_VALUE,
            f"option layout_dump is {pattern!r}: {parallel.tp_size * parallel.pp_size} ranks would overwrite one file; "
            "put {rank} into the path",
        )
    path = Path(pattern.replace("{rank}", str(worker_number(layout))).replace("{engine}", layout.engine_id))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(encode_layout(layout))
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            ConfigReason.INVALID_VALUE,
            f"option layout_dump: {path} cannot be written: {error.strerror or type(error).__name__}",
        ) from error
    return path


def worker_number(layout: Layout) -> int:
    """The worker's place in its engine: pipeline stage by stage, tensor parallel ranks inside."""
    return layout.parallel.pp_rank * layout.parallel.tp_size + layout.parallel.tp_rank
