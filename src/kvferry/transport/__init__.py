"""How bytes move: engines that copy from addresses here to addresses in a peer's process.

Glossary:

* **transport**: one engine; **peer**: a process it can write to, named by an address and the regions it has registered;
* **submission**: descriptors handed over together; pending, done or failed, and apart from that *quiet* or not;
* **quiet**: proven that neither source nor destination is touched any more; only then may memory be used again;
* **fence**: destroying an engine, the writer's or the receiver's; what makes a failed submission quiet;
* **lane**: all writes of one engine to one peer, under the engine's limits; **row**: what an engine takes at a time.

``mooncake`` reaches other hosts, ``cma`` other processes of one host, ``memory`` is the reference and stays in one
process. All pass ``kvferry.testing.transport_conformance``.
"""

from kvferry.transport.base import Peer, Submission, SubmissionState, Transport, wait
from kvferry.transport.cma import CmaTransport
from kvferry.transport.memory import MemoryHub, MemoryTransport
from kvferry.transport.mooncake import MooncakeTransport
from kvferry.transport.ranges import RegionTable

__all__ = [
    "CmaTransport",
    "MemoryHub",
    "MemoryTransport",
    "MooncakeTransport",
    "Peer",
    "RegionTable",
    "Submission",
    "SubmissionState",
    "Transport",
    "wait",
]
