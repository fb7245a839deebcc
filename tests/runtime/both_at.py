"""Both runtimes over one host, in a process of their own: ``python both_at.py TRANSPORT HOST REGISTER_HOST PORT``.

Of their own, since a process in which the Mooncake engine was loaded for one address family speaks no other. Prints
the outcome of one fetch, whether the pages are the producer's, and where that one takes messages.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from worlds import World, local_side, options_for

from kvferry.control import every_interface
from kvferry.ids import EngineId, RequestId, TransferId
from kvferry.protocol import Source, Span, Table, Ticket
from kvferry.runtime import Bootstrap, ConsumerRuntime, Fetch, ProducerRuntime, Publication
from kvferry.transport import CmaTransport, MooncakeTransport, Transport

SECONDS = 60.0


def main(transport: str, host: str, register_host: str, port: str) -> None:
    def make() -> Transport:
        return CmaTransport() if transport == "cma" else MooncakeTransport(host)

    serve = (every_interface(host, register_host), int(port))
    options = replace(options_for("cma"), host=host, make_transport=make)
    source, target = World.build("small", seed=5), World.build("small")
    producer = ProducerRuntime(
        local_side(source, engine="p", epoch="e1"),
        replace(options, bootstrap=Bootstrap(url=url(register_host, port), serve=serve)),
    )
    consumer = ConsumerRuntime(local_side(target, engine="d", epoch="e2"), options)
    there, here = (Table(0, (3, 4)), Table(0, (7,))), (Table(0, (8, 9)), Table(0, (1,)))
    producer.publish(Publication(Ticket(1), RequestId("p"), TransferId("t"), 32, there))
    at = Source(EngineId("p"), url(host, port))
    consumer.fetch(Fetch(Ticket(1), RequestId("d"), TransferId("t"), at, Span(0, 32), here))
    deadline = time.monotonic() + SECONDS
    ends = list(consumer.take_ended())
    while not ends and time.monotonic() < deadline:
        time.sleep(0.01)
        ends = list(consumer.take_ended())
    pages = bytes(target.page(0, 8)) == bytes(source.page(0, 3)) and bytes(target.state(1)) == bytes(source.state(7))
    outcomes = [f"{end.outcome.fate.value} {end.outcome.detail}".strip() for end in ends]
    print(json.dumps({"outcomes": outcomes, "equal": pages, "messages": producer.address}))
    consumer.close()
    producer.close()


def url(host: str, port: str) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


main(*sys.argv[1:])
