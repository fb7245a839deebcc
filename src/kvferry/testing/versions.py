"""Another version of kvferry in this process: what a rolling upgrade looks like to a peer.

A newer minor version differs in what it says of itself and in fields that are unknown here, which are ignored; a newer
major one in anything. So the version that a process says and checks is exchanged, in every module that has it.
"""

import sys

from kvferry.protocol import VERSION

Version = tuple[int, int]


def speak(version: Version) -> None:
    """Say and expect this version from now on. For a process of its own: there is no way back."""
    ours = tuple(VERSION)
    for name, module in list(sys.modules.items()):
        if name.startswith("kvferry.") and getattr(module, "VERSION", None) == ours:
            module.VERSION = version  # type: ignore[attr-defined]
