"""What every transport is: it writes bytes from registered memory here into registered memory of a peer's process.

A writer registers its regions, opens a peer by the address and the regions which that peer has told (out of band: the
control protocol carries them), and submits descriptors. ``submit`` checks every row before a byte moves and returns at
once; the submission is then polled. Three facts about it are kept apart:

* its **state**: pending, done (every byte is in the peer's memory) or failed;
* its **error**, when failed: why, for people and metrics;
* whether it is **quiet**: proven that its sources are read no more and that nothing more leaves this process. A failed
  submission of most engines is *not* quiet: the engine may go on long after it has reported the failure;
* whether it is quiet **at the destination** too: proven that nothing of it is still on its way, in a socket or a
  network, and lands later. Memory may be used again only when it is quiet: sources when ``quiet``, destinations when
  ``destination_quiet``, or when the receiver has fenced.

Both are proven by the completion of all that was handed to the engine. Else there is the **fence**, an engine
destroyed, which is what ``close()`` does; when it cannot prove that, it raises. The writer's fence makes its
submissions quiet, and over sockets no more than that: bytes that had left (3 MiB, measured on loopback) land when the
receiver reads them. The receiver's fence, where ``close_stops_peers`` holds, keeps all late bytes of all its peers from
landing. Where it does not hold, the receiver's proof is ``peer_is_gone``. Closed sockets, unregistered memory and a
lost connection prove nothing.

One process may hold several transports over the same memory, so a consumer can fence one producer alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.errors import TransportError
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors
from kvferry.transport.ranges import RegionTable


class SubmissionState(StrEnum):
    """How far a submission is; the last two are final."""

    PENDING = "pending"
    DONE = "done"
    """Every byte of every descriptor is in the peer's memory."""
    FAILED = "failed"
    """Some bytes may have been written, some not, and some may still be: see ``quiet``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that can be written to: a value, to be used with the transport that opened it."""

    address: str
    regions: RegionTable
    """What the peer has registered; nothing else of it is ever written."""


class Submission(Protocol):
    """Descriptors on their way."""

    @property
    def descriptors(self) -> int:
        """How many rows were submitted."""

    @property
    def total_bytes(self) -> int:
        """How many bytes were submitted."""

    @property
    def error(self) -> TransportError | None:
        """Why it failed; ``None`` while pending and when done."""

    @property
    def quiet(self) -> bool:
        """Proven that its sources are read no more, and that nothing more of it leaves this process."""

    @property
    def destination_quiet(self) -> bool:
        """Proven that, besides, nothing that had left lands any more."""

    def poll(self) -> SubmissionState:
        """The state now. Never blocks."""

    def tell(self, ended: Callable[[], object]) -> None:
        """Call ``ended`` when it becomes final, from whatever thread finds that, or at once when it is.

        A hint that spares the submitter some waiting: an engine may leave it out, so whoever asks polls too.
        """

    def cancel(self) -> None:
        """Hand no further rows to the engine and fail, unless already final. What was handed over goes on."""


class Transport(Protocol):
    """One engine, or one way to reach other processes. All methods may be called from any thread.

    Used after ``close()``, or in a child made by fork, every method but ``close`` and ``retire`` raises
    ``TransportError`` (CLOSED).
    """

    @property
    def name(self) -> str:
        """Its name in options and reports: ``mooncake``, ``cma``, ``memory``."""

    @property
    def close_stops_peers(self) -> bool:
        """Whether ``close()`` also stops the writes of peers into this process."""

    def address(self) -> str:
        """What a peer passes to ``open_peer`` to write here; names this incarnation only."""

    def protocol_in_use(self) -> str:
        """How bytes really move (``tcp``, ``rdma``, ``process_vm_writev``, ...), not how they were asked to."""

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory of this process readable by submissions and writable by peers."""

    def unregister(self, regions: Sequence[Region]) -> None:
        """Take back whole regions. Not a fence: writes on their way may still land."""

    def admit(self, address: str) -> None:
        """Let the peer with this address write here, where that takes a permission; elsewhere does nothing."""

    def peer_is_gone(self, address: str) -> bool:
        """Proven that this peer can write no more; ``False`` where that cannot be known."""

    def retire(self) -> None:
        """Called before ``close()``, and before it is called again, where a peer that writes here is in doubt.

        Such a peer knows this address for ever: from now on no transport of this process takes one at which its late
        bytes could arrive.
        """

    def open_peer(self, address: str, regions: Sequence[Region]) -> Peer:
        """Name a peer that has registered ``regions``. May check that it can be reached; moves nothing."""

    def submit(self, peer: Peer, descriptors: Descriptors) -> Submission:
        """Check all rows, refuse them all with nothing written, or start to write them and return at once."""

    def close(self) -> None:
        """Stop, destroy the engine, and so fence; may be called again. Raises TIMED_OUT when that is not proven."""


def wait(
    submission: Submission,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SubmissionState:
    """Poll until the submission is final or ``timeout_s`` has passed; PENDING then says that it is not over."""
    deadline = clock() + timeout_s
    pause = 50e-6
    while (state := submission.poll()) is SubmissionState.PENDING:
        left = deadline - clock()
        if left <= 0:
            break
        sleep(min(pause, left))
        pause = min(pause * 2, 1e-3)
    return state
