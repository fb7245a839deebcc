"""An engine that is destroyed while its writes are on their way, as one over sockets is."""

from collections.abc import Sequence

from kvferry.errors import TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan import Descriptors
from kvferry.transport import MemoryHub, Peer
from kvferry.transport.progress import Progress
from kvferry.transport.ranges import RegionTable


class OverSockets:
    """An engine whose writes never end; destroyed, it leaves what it had handed over on its way."""

    close_stops_peers = True

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._inside = MemoryHub().transport()
        self._writes: list[Progress] = []

    def address(self) -> str:
        return self._inside.address()

    def protocol_in_use(self) -> str:
        return "sockets"

    def register(self, regions: Sequence[Region]) -> None:
        self._inside.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        self._inside.unregister(regions)

    def admit(self, address: str) -> None:
        self._inside.admit(address)

    def retire(self) -> None:
        self._inside.retire()

    def peer_is_gone(self, address: str) -> bool:
        return self._inside.peer_is_gone(address)

    def open_peer(self, address: str, regions: Sequence[Region]) -> Peer:
        self.address()
        return Peer(address, RegionTable.of(regions))

    def submit(self, peer: Peer, descriptors: Descriptors) -> Progress:
        self.address()
        write = Progress(descriptors.count, descriptors.total_bytes)
        write.handed(descriptors.count)
        self._writes.append(write)
        return write

    def close(self) -> None:
        gone = TransportError(TransportReason.CLOSED, "the engine was destroyed")
        for write in self._writes:
            write.fence(gone, leaves_nothing=False)
        self._inside.close()
