"""The three transports as benches of :mod:`kvferry.testing.transport_conformance`."""

from pathlib import Path

import numpy as np

from kvferry.layout import Region
from kvferry.testing.transport_peer import HOST, PeerProcess, two_regions
from kvferry.transport import CmaTransport, MemoryHub, MooncakeTransport, Transport


class ProcessBench:
    """Receivers are processes of their own."""

    def __init__(self, writer: Transport, directory: Path, *, failure_is_quiet: bool) -> None:
        self.writer = writer
        self.failure_is_quiet = failure_is_quiet
        self._directory = directory
        self.receivers: list[PeerProcess] = []

    def start_receiver(self, nbytes: int) -> PeerProcess:
        """Start one more process."""
        path = self._directory / f"receiver-{len(self.receivers)}"
        self.receivers.append(PeerProcess(self.writer.name, path, nbytes))
        return self.receivers[-1]

    def end(self) -> None:
        """Close the writer and take all receivers away."""
        self.writer.close()
        for receiver in self.receivers:
            receiver.end()


def cma_bench(directory: Path) -> ProcessBench:
    """Cross-memory copies; receivers' memory lies in files of ``directory``."""
    return ProcessBench(CmaTransport(), directory, failure_is_quiet=True)


def mooncake_bench(directory: Path, *, stall_s: float = 10.0) -> ProcessBench:
    """The Mooncake engine over TCP on the loopback interface."""
    writer = MooncakeTransport(HOST, stall_s=stall_s)
    return ProcessBench(writer, directory, failure_is_quiet=False)


class MemoryReceiver:
    """A peer in this process."""

    def __init__(self, hub: MemoryHub, nbytes: int) -> None:
        self._hub = hub
        self._transport = hub.transport()
        self.memory = np.zeros(nbytes, np.uint8)
        self.address = self._transport.address()
        self.regions: tuple[Region, ...] = two_regions(self.memory.ctypes.data, nbytes)
        self._transport.register(self.regions)

    def admit(self, address: str) -> None:
        """Nothing to permit."""
        self._transport.admit(address)

    def close(self) -> None:
        """Close its transport."""
        self._transport.close()

    def kill(self) -> None:
        """Gone."""
        self._hub.kill(self.address)


class MemoryBench:
    """Everything in this process; a submission moves when it is polled."""

    failure_is_quiet = False

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.writer = self.hub.transport(rows_per_poll=4096)

    def start_receiver(self, nbytes: int) -> MemoryReceiver:
        """One more peer in the hub."""
        return MemoryReceiver(self.hub, nbytes)
