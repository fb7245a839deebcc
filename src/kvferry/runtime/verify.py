"""End-to-end integrity: digests of the pages that move, made alike at both ends, and compared where they arrive.

Each end finds the pages by its own layout and tables (:mod:`kvferry.runtime.verify_pages`) and hashes what its own
memory holds of them (:mod:`kvferry.runtime.verify_hashing`). The producer's digests travel in its reply, and here the
consumer compares: a wrong plan is found as well as a wrong copy, and the first wrong page is named. Where one of the
two has its pages on a device, digests are of the rows' sums, which a device makes itself (:func:`sums_wanted`).
"""

import asyncio
import functools
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvferry.plan import Plan
from kvferry.protocol import FEATURES
from kvferry.runtime.page_reading import PageReader
from kvferry.runtime.report import Side
from kvferry.runtime.sides import Local
from kvferry.runtime.verify_hashing import DIGEST_BYTES, Digests, hash_pages, joined
from kvferry.runtime.verify_pages import Job, pages_of

FEATURE: Final = "verify"
"""Of a producer that makes digests when asked."""

SUMS_FEATURE: Final = "verify-sums"
"""Of one that makes them of rows' sums too."""

SAMPLE_EVERY: Final = 16
"""Of a sample, one page in so many is looked at."""

HASHERS: Final = min(4, os.cpu_count() or 1)
"""Threads of one runtime that hash; gathering and hashing run without Python's lock."""


@dataclass(frozen=True, slots=True)
class PageName:
    """One page of the consumer."""

    layer: str
    component: str
    block: int
    first: int
    last: int
    """Positions of the first and the last hashed row; of a state, the tokens that it is the state of."""

    def __str__(self) -> str:
        span = f"positions {self.first} to {self.last}" if self.first != self.last else f"position {self.first}"
        return f"layer {self.layer} component {self.component} block {self.block} ({span})"


@dataclass(frozen=True, slots=True)
class Wrong:
    """The first page that is not what the producer has, and how many there are."""

    where: PageName | None
    """``None``: the producer has pages that are none here."""
    here: str
    there: str
    """The two digests, in hexadecimal."""
    count: int
    of: int

    def __str__(self) -> str:
        return (
            f"{self.where or 'a page that is none here'} is {self.here} here and {self.there} at the producer; "
            f"{self.count} of {self.of} digests differ"
        )


def features_of(local: Local) -> tuple[str, ...]:
    """What this worker can do, as it tells its peers."""
    lacking = set() if local.pages is not None else {FEATURE, SUMS_FEATURE}
    return tuple(one for one in FEATURES if one not in lacking)


def sums_wanted(plan: Plan, features: Collection[str]) -> bool:
    """Whether digests are to be of rows' sums: pages of some rank lie on a device, and the producer knows sums.

    Of one that does not know them, the bytes are compared, and copied out of the device for it.
    """
    on_device = any(not one.on_host for one in (*plan.producers, *plan.consumers))
    return on_device and SUMS_FEATURE in features


class Hashers:
    """The threads of one runtime that make digests, apart from those that make and destroy engines.

    Each calls ``enter_thread`` first, as every thread that touches a device's memory.
    """

    def __init__(self, enter_thread: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(HASHERS, thread_name_prefix="kvferry-verify", initializer=enter_thread)

    async def digests(self, job: Job, *, side: Side, reader: PageReader) -> Digests:
        """As :func:`digests_of`, by all the threads together."""
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._pool)
        pages = await run(pages_of, job, side)
        shares = [
            pages[round(n * len(pages) / HASHERS) : round((n + 1) * len(pages) / HASHERS)] for n in range(HASHERS)
        ]
        hashed = functools.partial(hash_pages, side=side, reader=reader, sums=job.ask.sums)
        return joined(await asyncio.gather(*(run(hashed, share) for share in shares if share)))

    async def close(self) -> None:
        """Begin no more, and wait for what is under way: memory may be unmapped after this."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


def digests_of(job: Job, *, side: Side, reader: PageReader) -> Digests:
    """Hash what ``side`` holds of the pages of a pull."""
    return hash_pages(pages_of(job, side), side, reader, sums=job.ask.sums)


def compare(job: Job, here: Digests, there: bytes) -> Wrong | None:
    """The first page of the consumer whose digest is another one at the producer; ``None`` when all are equal."""
    if here.data == there:
        return None
    ours, theirs = _split(here.data), _split(there)
    least = min(len(ours), len(theirs))
    unlike = [place for place in range(least) if ours[place] != theirs[place]]
    place = unlike[0] if unlike else least
    return Wrong(
        where=_where(job, place),
        here=ours[place].hex() if place < len(ours) else "nothing",
        there=theirs[place].hex() if place < len(theirs) else "nothing",
        count=len(unlike) + abs(len(ours) - len(theirs)),
        of=len(ours),
    )


def _where(job: Job, place: int) -> PageName | None:
    """What the digest at ``place`` is of; ``None`` past the last."""
    for pages in pages_of(job, "consumer"):
        if place < pages.count:
            first, stop = int(pages.cuts[place]), int(pages.cuts[place + 1])
            position, block = pages.rows.position, int(pages.rows.block[first])
            return PageName(*pages.cell.target.component.key, block, int(position[first]), int(position[stop - 1]))
        place -= pages.count
    return None


def _split(data: bytes) -> list[bytes]:
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]
