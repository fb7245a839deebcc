"""The transfer report: one JSON line for each transfer, pair of ranks and side, for tests and support cases.

A line says what moved between one producer rank and one consumer rank, how it ended, and (when it is done) a digest of
the moved positions as this side's memory holds them. Two lines with equal digests mean equal bytes at equal layer,
component, coordinate and position, whatever the two layouts are. Lines are short and written by one ``write`` on a
descriptor opened for appending, so that several processes may share a file.
"""

import logging
import os
from typing import Any, Literal

import msgspec

logger = logging.getLogger(__name__)

Side = Literal["producer", "consumer"]

FORMAT = "kvferry.transfer-report/1"


class Line(msgspec.Struct, frozen=True, omit_defaults=False):
    """One line of the report."""

    transfer_id: str
    request_id: str
    side: Side
    engine_id: str
    peer_engine_id: str
    producer_rank: int
    consumer_rank: int
    start: int
    stop: int
    status: str = ""
    bytes: int | None = None
    descriptors: int | None = None
    ms: float = 0.0
    transport: str = ""
    digest: str | None = None
    pages: int = 0
    reason: str | None = None
    format: str = FORMAT

    def with_end(self, **end: Any) -> "Line":
        """The line of a pair that has ended, with how."""
        return msgspec.structs.replace(self, **end)


class Report:
    """An open report file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._told = False

    def write(self, line: Line) -> None:
        """Append a line. Where that fails the line is lost, and no transfer suffers from it."""
        try:
            os.write(self._file, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            if not self._told:
                logger.error("the transfer report cannot be written, lines are lost (this is said once): %s", error)
            self._told = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
