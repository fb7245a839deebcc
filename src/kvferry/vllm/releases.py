"""Which releases of vLLM this connector is for, and all that it does differently from one to the other.

The rest of this room is written for every release in :data:`TRIED` alike: ``tests/vllm/test_contract.py`` compares what
it uses of vLLM with the source of each. What is asked of one release and not of another belongs here, so that a release
can be given up by looking through one file. So far that is little; 0.33 beside 0.32, as far as a connector sees it:

* vLLM asks the class whether it can follow sleep mode, before anything is built (:meth:`supports_sleep_mode
  <kvferry.vllm.connector.FerryConnector.supports_sleep_mode>`); 0.32 does not, so the connector asks itself.
* ``update_state_after_alloc`` of a request may come some steps later than its blocks, and never, if it is aborted
  before. Nothing is promised before it, so there is nothing to do.
* Two attention backends may order a page in another way than their name says (:func:`order_of`): ROCM_ATTN interleaves
  its values where a fused kernel writes them, ROCM_AITER_UNIFIED_ATTN shuffles keys and values on one GPU. Such a page
  moves between equal workers only. In 0.32 neither does.
* With a draft model ``wait_for_save`` comes after the draft has computed, behind the results of the step.
"""

import logging
import re
from typing import Any, Final

from kvferry.errors import ConfigError, ConfigReason

logger = logging.getLogger(__name__)

Release = tuple[int, int]

TRIED: Final[tuple[Release, ...]] = ((0, 32), (0, 33))
"""Releases that the tests know, the oldest first. Which tests ran with which: ``docs/support.md``."""


def release_of(version: str) -> Release | None:
    """Major and minor number; ``None`` for a build without a number, as of a working tree.

    >>> release_of("0.33.1rc2+cpu"), release_of("dev"), release_of("0.0.dev1")
    ((0, 33), None, None)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    return None if release == (0, 0) else release


def refuse_old(version: str) -> None:
    """Raise for a release that is too old; asked before anything is imported that such a release may lack."""
    release = release_of(version)
    if release is not None and release < TRIED[0]:
        raise ConfigError(
            ConfigReason.MISSING_DEPENDENCY,
            f"vLLM {version}: this connector needs {TRIED[0][0]}.{TRIED[0][1]} or newer",
        )


def warn_of_untried(version: str) -> None:
    """Say of a release that the tests do not know it."""
    release = release_of(version)
    if release is None:
        logger.warning("this vLLM does not say its release (%s); kvferry is tested with %s", version, _named())
    elif release > TRIED[-1]:
        logger.warning("vLLM %s is newer than what kvferry is tested with (%s)", version, _named())


ORDER_FLAGS: Final = {"_use_interleaved_v_cache": "interleaved-v", "_shuffle_kv_layout": "shuffled"}
"""By attribute of a layer's implementation: what it says of the order of a page, when it is true."""


def order_of(backend: str, layer: Any) -> str:
    """The name under which the order of a layer's page is known: its backend's, with what differs from that.

    The flags are set before caches exist: vLLM decides while it profiles the model.
    """
    implementation = getattr(layer, "impl", None)
    marks = [mark for flag, mark in ORDER_FLAGS.items() if getattr(implementation, flag, False)]
    return "+".join([backend, *marks])


def _named() -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in TRIED)
