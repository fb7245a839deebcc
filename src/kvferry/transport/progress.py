"""The bookkeeping of one submission, shared by all transports: what was handed over, what came back, what is in doubt.

Rows are *handed* to an engine, and come back *landed* (the engine said success) or not. A row that came back with a
failure may still be on its way when the engine works that way; the transport says so by retiring rows as *in doubt* or
as *over*. From these counts follow the state and the quiet of :mod:`kvferry.transport.base`:

    done   when all rows have landed
    quiet  when final and nothing handed is without a proof; a fence makes it quiet here, and at the destination when
           the engine hands over nothing that a destroyed engine leaves behind in a socket

One thread at a time changes a ``Progress``, except for ``cancel`` and ``fence``, so a lock guards the few fields.
"""

import threading
from collections.abc import Callable

from kvferry.errors import TransportError, TransportReason
from kvferry.transport.base import SubmissionState


class Progress:
    """A submission (:class:`kvferry.transport.base.Submission`) and the transport's side of it."""

    def __init__(
        self, descriptors: int, total_bytes: int, *, rows: int | None = None, watch: Callable[[], None] | None = None
    ) -> None:
        """``rows``: how many the engine gets, when the transport splits; ``watch``: called first by each ``poll``,
        so that a transport can notice a stall even while its own thread is stuck inside the engine."""
        self._descriptors = descriptors
        self._total_bytes = total_bytes
        self._rows = descriptors if rows is None else rows
        self._watch = watch
        self._unproven = 0
        self._landed = 0
        self._error: TransportError | None = None
        self._fenced = False
        self._ended: Callable[[], object] | None = None
        self._lock = threading.Lock()

    # What the submitter sees.

    @property
    def descriptors(self) -> int:
        """How many rows were submitted."""
        return self._descriptors

    @property
    def total_bytes(self) -> int:
        """How many bytes were submitted."""
        return self._total_bytes

    @property
    def error(self) -> TransportError | None:
        """Why it failed, if it did."""
        return self._error

    @property
    def quiet(self) -> bool:
        """Fenced, or final and nothing that was handed over lacks a proof that it is over."""
        with self._lock:
            return self._fenced or self._proven()

    @property
    def destination_quiet(self) -> bool:
        """Quiet, and nothing is left between the two processes."""
        with self._lock:
            return self._proven()

    def poll(self) -> SubmissionState:
        """The state now."""
        if self._watch is not None:
            self._watch()
        with self._lock:
            return self._state()

    def tell(self, ended: Callable[[], object]) -> None:
        """Call it when this is final."""
        self._ended = ended
        self._tell_end()

    def cancel(self) -> None:
        """Fail unless final; the transport hands over nothing more."""
        self.fail(TransportError(TransportReason.CANCELLED, "cancelled by its submitter"))

    # What the transport tells.

    @property
    def wanted(self) -> bool:
        """Whether more rows should be handed over."""
        return self._error is None

    def handed(self, rows: int) -> None:
        """``rows`` more were given to the engine: from now on they may be read and written."""
        with self._lock:
            self._unproven += rows

    def landed(self, rows: int) -> None:
        """``rows`` that were handed are in the peer's memory."""
        with self._lock:
            self._unproven -= rows
            self._landed += rows
        self._tell_end()

    def over(self, rows: int) -> None:
        """``rows`` that were handed did not land, and are proven to move no more."""
        with self._lock:
            self._unproven -= rows

    def fail(self, error: TransportError) -> None:
        """Make it failed, unless final. The first error stays."""
        with self._lock:
            if self._state() is SubmissionState.PENDING:
                self._error = error
        self._tell_end()

    def fence(self, error: TransportError, *, leaves_nothing: bool) -> None:
        """The engine is gone: fail unless final, and quiet in any case; ``leaves_nothing``: at the destination too."""
        self.fail(error)
        with self._lock:
            self._fenced = True
            if leaves_nothing:
                self._unproven = 0

    def _tell_end(self) -> None:
        with self._lock:
            if self._ended is None or self._state() is SubmissionState.PENDING:
                return
            ended, self._ended = self._ended, None
        ended()

    def _proven(self) -> bool:
        return self._state() is not SubmissionState.PENDING and self._unproven == 0

    def _state(self) -> SubmissionState:
        if self._error is not None:
            return SubmissionState.FAILED
        return SubmissionState.DONE if self._landed == self._rows else SubmissionState.PENDING
