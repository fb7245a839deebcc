"""Pulls that their sender has given up and that may still come: none of them is served.

A consumer that cannot stop a writer asks a living one to give up all of its older pulls, and takes its blocks back on
the answer. A pull that was on its way meanwhile, over another connection, must then find the door shut, however late it
comes. So what was promised once is never forgotten while this producer lives: with no room for another promise none is
made, and the asker, which hears that its pulls are not quiet, keeps its blocks.
"""

import logging
from typing import Final

from kvferry.protocol import Puller

logger = logging.getLogger(__name__)

MOST: Final = 16_384
"""Consumer ranks; each life of a consumer that ever asked is one."""


class Barred:
    """The lowest number of a pull that is still served, by consumer rank."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._below: dict[Puller, int] = {}
        self._full = False

    def bar(self, puller: Puller, below: int) -> bool:
        """Serve no pull of this rank with a lower number from now on; false where that cannot be promised."""
        if puller not in self._below and len(self._below) >= self._most:
            if not self._full:
                logger.error(
                    "%d consumer ranks have given up pulls of this producer, more cannot be remembered: the blocks of "
                    "others that ask stay held until this producer is restarted. Without a shared secret anybody can "
                    "ask: see secret_file",
                    self._most,
                )
            self._full = True
            return False
        self._below[puller] = max(below, self._below.get(puller, 0))
        return True

    def bars(self, puller: Puller, number: int) -> bool:
        """Whether this pull has been given up."""
        return number < self._below.get(puller, 0)
