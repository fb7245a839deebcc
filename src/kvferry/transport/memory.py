"""The reference transport: peers are transports of one process, joined by a hub; copies are plain memory copies.

It has no threads and no clock. With ``rows_per_poll`` unset a submission is done when ``submit`` returns; else each
``poll`` of a submission copies that many rows, so a test decides what has moved when.

A hub also stages what real engines do wrong, one peer at a time:

* ``kill(address)``: the peer is gone. Writes fail, now and later.
* ``stop(address)``: the peer does not answer. Writes stay pending until ``resume``.
* ``fail_late(address)``: the next poll of a pending submission reports failure while its rows are still on their way.
  They land at ``land_late(address)``, with the bytes that the source holds *then*, unless the writer or the receiver
  was closed in between: exactly why a failed write is not quiet.
"""

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan.descriptors import Descriptors
from kvferry.transport.base import Peer, SubmissionState
from kvferry.transport.progress import Progress
from kvferry.transport.ranges import RegionTable, check_descriptors


@dataclass(slots=True)
class _Faults:
    """What is wrong with one peer."""

    dead: bool = False
    stopped: bool = False
    fails_late: bool = False
    late: list[Callable[[], None]] = field(default_factory=list)


class MemoryHub:
    """The network of one process: which transports exist, and what is wrong with each."""

    def __init__(self) -> None:
        self._faults: dict[str, _Faults] = {}
        self._numbers = itertools.count(1)

    def transport(self, *, rows_per_poll: int | None = None) -> "MemoryTransport":
        """A new transport that the others of this hub can reach."""
        address = f"memory:{next(self._numbers)}"
        self._faults[address] = _Faults()
        return MemoryTransport(self, address, rows_per_poll=rows_per_poll)

    def kill(self, address: str) -> None:
        """The peer is gone, with its memory."""
        self._at(address).dead = True

    def stop(self, address: str) -> None:
        """The peer neither reads nor answers."""
        self._at(address).stopped = True

    def resume(self, address: str) -> None:
        """The peer goes on."""
        self._at(address).stopped = False

    def fail_late(self, address: str) -> None:
        """The next poll of a pending submission to the peer fails, and its rows stay on their way."""
        self._at(address).fails_late = True

    def land_late(self, address: str) -> None:
        """Rows on their way to the peer arrive now, unless a fence stands between."""
        late, self._at(address).late = self._at(address).late, []
        for write in late:
            write()

    def reaches(self, address: str) -> bool:
        """Whether anybody lives at this address."""
        return address in self._faults and not self._faults[address].dead

    def faults(self, address: str) -> _Faults:
        """What is wrong with the peer (for the transports of this hub)."""
        return self._at(address)

    def _at(self, address: str) -> _Faults:
        if address not in self._faults:
            raise TransportError(TransportReason.PEER_UNREACHABLE, f"no memory transport at {address!r} in this hub")
        return self._faults[address]


class MemorySubmission:
    """A submission that moves when it is polled."""

    def __init__(self, hub: MemoryHub, peer: Peer, descriptors: Descriptors, *, rows_per_poll: int | None) -> None:
        self._faults = hub.faults(peer.address)
        self._address = peer.address
        self._rows = descriptors
        self._next = 0
        self._step = rows_per_poll or max(1, descriptors.count)
        self._progress = Progress(descriptors.count, descriptors.total_bytes)

    @property
    def descriptors(self) -> int:
        """How many rows were submitted."""
        return self._progress.descriptors

    @property
    def total_bytes(self) -> int:
        """How many bytes were submitted."""
        return self._progress.total_bytes

    @property
    def error(self) -> TransportError | None:
        """Why it failed, if it did."""
        return self._progress.error

    @property
    def quiet(self) -> bool:
        """Whether nothing moves any more."""
        return self._progress.quiet

    @property
    def destination_quiet(self) -> bool:
        """The same: there is nothing between two places of one process."""
        return self._progress.destination_quiet

    def tell(self, ended: Callable[[], object]) -> None:
        """Call it when this is final, which some poll finds."""
        self._progress.tell(ended)

    def cancel(self) -> None:
        """Move nothing more."""
        self._progress.cancel()

    def fence(self, error: TransportError) -> None:
        """The writer is closed."""
        self._progress.fence(error, leaves_nothing=True)

    def poll(self) -> SubmissionState:
        """Move the next rows, as the peer's condition allows."""
        if self._progress.poll() is SubmissionState.PENDING:
            self._advance()
        return self._progress.poll()

    def _advance(self) -> None:
        if self._faults.dead:
            self._progress.handed(1)
            self._progress.fail(
                TransportError(TransportReason.PEER_UNREACHABLE, f"peer {self._address} died during the write")
            )
        elif self._faults.fails_late:
            self._faults.fails_late = False
            self._fail_late()
        elif not self._faults.stopped:
            stop = min(self._next + self._step, self._rows.count)
            self._progress.handed(stop - self._next)
            _copy(self._rows, self._next, stop=stop)
            self._progress.landed(stop - self._next)
            self._next = stop

    def _fail_late(self) -> None:
        start, stop = self._next, self._rows.count
        self._progress.handed(stop - start)
        self._progress.fail(
            TransportError(TransportReason.ENGINE_FAULT, f"write to {self._address} reported as failed")
        )

        def land() -> None:
            if not self._progress.quiet and not self._faults.dead:
                _copy(self._rows, start, stop=stop)

        self._faults.late.append(land)


class MemoryTransport:
    """A transport to peers of the same hub (:class:`kvferry.transport.base.Transport`)."""

    name = "memory"
    close_stops_peers = True

    def __init__(self, hub: MemoryHub, address: str, *, rows_per_poll: int | None) -> None:
        self._hub = hub
        self._address = address
        self._rows_per_poll = rows_per_poll
        self._table = RegionTable(())
        self._submissions: list[MemorySubmission] = []
        self._closed = False
        self._pid = os.getpid()

    def address(self) -> str:
        """Its place in the hub."""
        self._check_open()
        return self._address

    def protocol_in_use(self) -> str:
        """Always a plain copy."""
        self._check_open()
        return "memmove"

    def register(self, regions: Sequence[Region]) -> None:
        """Note the regions; they must be CPU memory of this process."""
        self._check_open()
        self._table = self._table.with_regions(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Forget the regions."""
        self._check_open()
        self._table = self._table.without(regions)

    def admit(self, address: str) -> None:
        """Nothing to permit inside one process."""
        self._check_open()

    def retire(self) -> None:
        """No address of a hub is given twice."""

    def peer_is_gone(self, address: str) -> bool:
        """Whether it was killed or closed."""
        self._check_open()
        return not self._hub.reaches(address)

    def open_peer(self, address: str, regions: Sequence[Region]) -> Peer:
        """Name a transport of the hub."""
        self._check_open()
        if not self._hub.reaches(address):
            raise TransportError(TransportReason.PEER_UNREACHABLE, f"nobody lives at {address!r}")
        return Peer(address, RegionTable.of(regions))

    def submit(self, peer: Peer, descriptors: Descriptors) -> MemorySubmission:
        """Check, then copy as far as ``rows_per_poll`` says."""
        self._check_open()
        check_descriptors(descriptors, self._table, peer.regions)
        submission = MemorySubmission(self._hub, peer, descriptors, rows_per_poll=self._rows_per_poll)
        self._submissions = [known for known in self._submissions if not known.quiet]
        self._submissions.append(submission)
        if self._rows_per_poll is None:
            submission.poll()
        return submission

    def close(self) -> None:
        """Fence: what is pending fails, what is late never lands, here and there."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        error = TransportError(TransportReason.CLOSED, f"the transport {self._address} was closed")
        for submission in self._submissions:
            submission.fence(error)
        self._submissions.clear()
        faults = self._hub.faults(self._address)
        faults.dead = True
        faults.late.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(TransportReason.CLOSED, f"the transport {self._address} is closed")
        if self._pid != os.getpid():
            raise TransportError(
                TransportReason.CLOSED, f"{self._address} belongs to process {self._pid}, not to its fork {os.getpid()}"
            )


def _copy(rows: Descriptors, start: int, *, stop: int) -> None:
    # A loop on purpose: the reference does the obvious thing, and the fast transports are compared with it.
    chosen = slice(start, stop)
    columns = (rows.dst[chosen].tolist(), rows.src[chosen].tolist(), rows.nbytes[chosen].tolist())
    for dst, src, nbytes in zip(*columns, strict=True):
        ctypes.memmove(dst, src, nbytes)
