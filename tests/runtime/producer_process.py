"""A producer in a process of its own, for the tests beside this file: ``python producer_process.py SPEC``.

Commands come as JSON lines on standard input (see ``main``), answers go to standard output. The memory is filled from
a seed, so the test knows every byte of it.
"""

import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from worlds import World, local_side, options_for

from kvferry.control import ServerTls
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import Table, Ticket
from kvferry.runtime import Bootstrap, ProducerRuntime, Publication


def main() -> None:
    spec = json.loads(sys.argv[1])
    world = World.build(spec["kind"], seed=spec["seed"])
    local = local_side(world, engine="p", epoch=spec["epoch"])
    security = spec.get("security", {})
    tls = ServerTls(*security["tls"]) if "tls" in security else None
    url = f"{'https' if tls else 'http'}://127.0.0.1:{spec['port']}"
    bootstrap = Bootstrap(url=url, serve=("127.0.0.1", spec["port"]), tls=tls)
    logging.basicConfig(level=security.get("log", "WARNING"))
    runtime = ProducerRuntime(local, options_for(spec["transport"], bootstrap=bootstrap, security=security))
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "expect":
                runtime.expect(TransferId(command["transfer"]))
            case "publish":
                tables = tuple(Table(first, tuple(blocks)) for first, blocks in command["tables"])
                transfer = TransferId(command["transfer"])
                runtime.publish(
                    Publication(Ticket(command["ticket"]), RequestId("p"), transfer, command["tokens"], tables)
                )
            case "quiet":
                print(json.dumps(runtime.take_quiet()), flush=True)
            case "close":
                break
    runtime.close()


main()
