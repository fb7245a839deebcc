"""The connector that vLLM loads: ``"kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry.vllm"``.

Glossary: the *scheduler half* lives in the engine core and decides; the *worker halves*, one a rank, own the memory
and move it. Between them go *orders* and *quiet tickets* (:mod:`kvferry.vllm.metadata`). A *hold* is a reference of
our own on blocks that a transfer may touch. Everything that does not need vLLM is in :mod:`kvferry.runtime`.
"""

from typing import TYPE_CHECKING, Any

from kvferry.vllm.config import Config, parse_config

if TYPE_CHECKING:
    from kvferry.vllm.connector import FerryConnector

__all__ = ["Config", "FerryConnector", "parse_config"]


def __getattr__(name: str) -> Any:
    # vLLM takes the class from here by name. The options, and the geometry of layouts, need no vLLM to be imported.
    if name == "FerryConnector":
        from kvferry.vllm.releases import refuse_old
        from vllm import __version__ as vllm_release

        refuse_old(vllm_release)
        from kvferry.vllm.connector import FerryConnector

        return FerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
