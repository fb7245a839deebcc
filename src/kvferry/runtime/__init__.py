"""Where the pure rooms meet I/O: a producer and a consumer for one worker, each a thread with a loop.

Glossary: *local* is this worker, *remote* a producer as a consumer knows it; a *pump* drives a machine; the *sender*
has the one engine that writes, the *receivers* one engine for each life of each producer; a *course* is a transfer as
the consumer's driver sees it; the *journal* says what became of transfers.

Needs no vLLM: whatever owns memory with a layout can be a producer or a consumer.
"""

from kvferry.runtime.fetches import Alternative, Fetch
from kvferry.runtime.gate import Ready
from kvferry.runtime.options import Bootstrap, RuntimeOptions, Timing, TransportFactory
from kvferry.runtime.publications import Publication
from kvferry.runtime.service import ConsumerRuntime, ProducerRuntime
from kvferry.runtime.sides import Local, new_epoch
from kvferry.runtime.tally import End, Interval, Receive, Write

__all__ = [
    "Alternative",
    "Bootstrap",
    "ConsumerRuntime",
    "End",
    "Fetch",
    "Interval",
    "Local",
    "ProducerRuntime",
    "Publication",
    "Ready",
    "Receive",
    "RuntimeOptions",
    "Timing",
    "TransportFactory",
    "Write",
    "new_epoch",
]
