"""Reads the connector's transfer reports and pairs their two sides.

Both engines write one line for each (transfer, producer rank, consumer rank): what moved, how it ended, and a digest
of the moved positions in their own memory. A transfer is *proven* when every pair of ranks has a line from each side,
both done, with equal digests.

A producer does not know which rank of vLLM's own connector it sends to. So there all pairs are looked at together: the
digests of what was sent are those of what has landed (:meth:`Transfer.landing_problems`). Digests of unlike coordinates
differ, so what went to the wrong rank shows too.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvferry.runtime.report import Line

_NO_DIGEST: Final = "none"


@dataclass(frozen=True, slots=True)
class Transfer:
    """All lines of one transfer id."""

    transfer_id: str
    producer: tuple[Line, ...]
    consumer: tuple[Line, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the producers wrote."""
        return sum(line.bytes or 0 for line in self.producer)

    @property
    def descriptors(self) -> int:
        """Copies that the producers' plans came to."""
        return sum(line.descriptors or 0 for line in self.producer)

    @property
    def ms(self) -> float:
        """Of the writes themselves, by the slowest producer. (A consumer's includes the prompt's computation.)"""
        return max((line.ms for line in self.producer), default=0.0)

    @property
    def tokens(self) -> int:
        """Positions that were asked for."""
        return max((line.stop - line.start for line in self.consumer), default=0)

    @property
    def complete(self) -> bool:
        """Whether both sides have reported, and alike for every pair of ranks."""
        pairs = [_by_ranks(line for line in side if not _is_idle(line)) for side in (self.producer, self.consumer)]
        return bool(self.producer) and bool(self.consumer) and pairs[0].keys() == pairs[1].keys()

    def problems(self) -> tuple[str, ...]:
        """Why the transfer is not proven; empty when it is."""
        sides = {
            side: _by_ranks(line for line in lines if not _is_idle(line))
            for side, lines in (("producer", self.producer), ("consumer", self.consumer))
        }
        found = [
            f"{side} {line.producer_rank}->{line.consumer_rank}: {line.status} ({line.reason})"
            for side, lines in sides.items()
            for line in lines.values()
            if line.status != "done"
        ]
        for ranks in sorted(sides["producer"].keys() | sides["consumer"].keys()):
            found += _differences(ranks, sides["producer"].get(ranks), consumer=sides["consumer"].get(ranks))
        return tuple(found) if sides["producer"] or sides["consumer"] else ("nothing was reported",)

    @property
    def proven(self) -> bool:
        """Whether the digests say that both ends hold the same."""
        return not self.problems()

    @property
    def sent(self) -> tuple[str, ...]:
        """Digests of what producer ranks have sent, sorted; none of a rank whose copy of it another one sends."""
        return _digests(line for line in self.producer if line.bytes and line.pages)

    @property
    def landed(self) -> tuple[str, ...]:
        """Digests of what consumer ranks have received, sorted."""
        return _digests(line for line in self.consumer if line.pages)

    def landing_problems(self) -> tuple[str, ...]:
        """Why a transfer to vLLM's own connector is not proven; empty when it is."""
        lines = (*self.producer, *self.consumer)
        found = [f"{line.side}: {line.status} ({line.reason})" for line in lines if line.status != "done"]
        if self.sent != self.landed:
            found.append(f"digests differ, {self.sent} were sent and {self.landed} have landed")
        elif _NO_DIGEST in self.sent:
            found.append("no digest")
        return tuple(found) if self.sent or self.landed or found else ("nothing was reported",)


def read_reports(paths: Iterable[Path]) -> dict[str, Transfer]:
    """All transfers in these files, by id. Files that do not exist yet are empty."""
    lines: dict[str, list[Line]] = {}
    decoder = msgspec.json.Decoder(Line)
    for path in sorted(set(paths)):
        if path.exists():
            for text in path.read_bytes().splitlines():
                line = decoder.decode(text)
                lines.setdefault(line.transfer_id, []).append(line)
    return {
        transfer_id: Transfer(
            transfer_id,
            tuple(line for line in found if line.side == "producer"),
            tuple(line for line in found if line.side == "consumer"),
        )
        for transfer_id, found in lines.items()
    }


def layouts_beside(report: Path | str) -> str:
    """Where kvferry prefill engines write their layouts (option ``layout_dump``) for whoever writes this report."""
    return str(Path(report).parent / "layouts" / "{engine}-{rank}.json")


def wait_for_report(path: Path, transfer_id: str, holds: Callable[[Transfer], object], timeout: float) -> Transfer:
    """Read until it holds of what is reported of this transfer, or ``timeout`` is over; then whatever there is."""
    deadline = time.monotonic() + timeout
    while True:
        found = read_reports([path]).get(transfer_id, Transfer(transfer_id, (), ()))
        if holds(found) or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def wait_for_reports(paths: Iterable[Path], transfer_ids: Iterable[str], timeout: float) -> dict[str, Transfer]:
    """Read until both sides of all these transfers are there, or ``timeout`` is over; then whatever there is."""
    files, wanted = tuple(paths), tuple(transfer_ids)
    deadline = time.monotonic() + timeout
    while True:
        found = read_reports(files)
        if all(t in found and found[t].complete for t in wanted) or time.monotonic() > deadline:
            return {t: found.get(t, Transfer(t, (), ())) for t in wanted}
        time.sleep(0.02)


def _digests(lines: Iterable[Line]) -> tuple[str, ...]:
    return tuple(sorted(line.digest or _NO_DIGEST for line in lines))


def _by_ranks(lines: Iterable[Line]) -> Mapping[tuple[int, int], Line]:
    return {(line.producer_rank, line.consumer_rank): line for line in lines}


def _is_idle(line: Line) -> bool:
    """A producer's rank that was asked and had nothing to send: another rank holds the same (a replica)."""
    return line.side == "producer" and line.status == "done" and line.start == line.stop and line.bytes == 0


def _differences(ranks: tuple[int, int], producer: Line | None, *, consumer: Line | None) -> list[str]:
    name = f"{ranks[0]}->{ranks[1]}"
    if producer is None or consumer is None:
        return [f"{name}: no report of the {'producer' if producer is None else 'consumer'}"]
    if producer.status != "done" or consumer.status != "done":
        return []
    if producer.digest is None or consumer.digest is None:
        return [f"{name}: no digest"]
    if producer.digest != consumer.digest:
        return [f"{name}: digests differ, {producer.digest} at the producer and {consumer.digest} at the consumer"]
    return []
