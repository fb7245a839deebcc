"""Write ``docs/protocol.md``: the rules in words, and both machines as the tables and diagrams that the code runs on.

python scripts/make_protocol_page.py           write the page
python scripts/make_protocol_page.py --check   exit 1 when the page is not what would be written
"""

import ast
import inspect
import sys
from enum import StrEnum
from pathlib import Path

from kvferry.protocol import ConsumerLimits, ProducerLimits, consumer_records, producer_records, tables

PAGE = Path(__file__).resolve().parents[1] / "docs" / "protocol.md"

HEAD = """# When memory may be used again: the protocol

This page is written by `scripts/make_protocol_page.py` from the tables that the machines run on.

A transfer has two ends, and each end is a state machine without I/O and without a clock: an event and the time go in,
actions come out. The producer owns *leases* on blocks that wait to be sent. The consumer owns *fetches*: blocks that
wait to be filled. Nothing but the tables below decides which state follows; a pair that is not in a table changes
nothing, because such an event came late, came twice, or is about something that is over.

## Rules

1. **One end.** Each transfer ends once on each side: done, failed, aborted or expired, at the latest at its deadline
   (on the producer plus the time that a write under way then needs to settle).
2. **The end and the blocks are two things.** A failure is told at once. The blocks go back later, once, when it is
   proven that no byte moves in or out of them any more: they are *quiet*.
3. **A failed write is not over.** An engine that has said "failed" may go on writing. Such a write is *in doubt* until
   each descriptor has completed, or an engine was destroyed: for the blocks that are read, the writer's; for those
   that are written, the one that it writes to, since over sockets bytes that had left land all the same. A closed
   socket, memory that was unregistered, or a lost connection prove nothing.
4. **One fence for each doubt.** A consumer has one receive engine for each life of each producer. In doubt it destroys
   that one, and nobody else's transfers notice. The ports of that engine are taken by no other on this host as long as
   this process lives: a writer that was held up connects to them anew, and would reach the memory of whatever engine
   had them, of a neighbouring rank too. Over `cma`, where
   nothing on the receiving side can stop a writer, only the end of the writer's process is proof, or its own word. A
   stopped process has neither: it is between two system calls, and goes on with the next one when it is continued, so
   its state in `/proc` proves nothing. Its blocks stay held, the proof is tried again every `fence_latest`, and fetches
   from it are refused. With `quarantined_blocks` held (the option `quarantine_max_fraction`) every new fetch is
   refused, by name, until a proof comes: the process ends, or goes on and says that it has given up. Blocks are never
   given back unproven.
5. **At most one write for each (transfer, consumer rank).** A pull that comes twice is refused the second time, and not
   before the first is quiet; a producer that has no room to keep it until then does not answer it, since the first is
   answered. A pull that was refused for want of room stays refused. No write begins for a transfer that is over.
6. **A word that frees is given late.** A producer names a request, as ok or as failed, only when its write is quiet,
   because a peer frees its blocks on either word. Until then it says "still at it", every few seconds.
   Where its engine had to be destroyed and bytes that had left may still land, a kvferry consumer is told to fence
   by itself; vLLM's own connector cannot be told that, so it hears no last word and gives up in its own time.
7. **Facts die with the life that told them.** Every remote fact belongs to one incarnation of an engine (its id and a
   random epoch). A restart drops what was learnt from that incarnation, and nothing else.
8. **Positions, never counts.** A block list comes with the position of its first token; parts are counted by the
   positions that they cover. A pull is served when its positions are covered in every group.
9. **Everything is bounded.** Leases, pulls, pulls for transfers that nobody has spoken of, fetches, remembered ends,
   blocks in quarantine. Above a bound the answer is an error, or a fence, never memory without end.

`kvferry story TRANSFER_ID` prints what one side did with one transfer, in the words of these tables
([how to turn it on](#the-story-of-one-transfer)).
"""

TAIL = """
## The story of one transfer

With the option `debug_socket_dir` set to a directory, each rank answers on a Unix socket in it (mode 0700, so only the
user that runs the engine, and root, may ask). Nothing listens when the option is unset.

```
$ kvferry story cmpl-3f6c... --dir /run/kvferry
```

prints for each side and rank when each event came, which state followed, and what was asked for. A machine keeps the
newest 1,024 transfers with the newest 64 events of each, as words: no block list and no text of a peer is kept.

## How these rules are checked

* Hypothesis drives both machines, joined over a network that loses, repeats and reorders, with timers, restarts and
  failing engines, and checks them after every event (`tests/protocol/test_joined.py`).
* Small worlds are explored without gaps, with the machines themselves: two producer ranks, one consumer rank, two
  requests, and a crash of either side, lost, repeated and late messages, lies of an engine, aborts, bytes that land
  after their writer's end (`make model-check`; states, steps and what holds in each are in
  [model-check.md](model-check.md)).
* Faults are injected into real processes (`make faults`); what each side said is in [faults.md](faults.md).
* Ten minutes of mixed load with faults, and an audit at the end (`make soak`): [soak.md](soak.md).
"""

SECTIONS: tuple[tuple[str, str, type[StrEnum]], ...] = (
    ("producer: lease", "A transfer on the producer", tables.LeaseState),
    ("producer: write", "What one request of one pull is owed", tables.WriteState),
    ("consumer: fetch", "A transfer on the consumer", tables.FetchState),
    ("consumer: pull", "One pull of a consumer rank to a producer rank", tables.PullState),
)


def texts(module: object, name: str) -> dict[str, str]:
    """The string that stands under each field or member of a class of ``module``."""
    source = inspect.getsource(getattr(module, name))
    body = ast.parse(source).body[0]
    if not isinstance(body, ast.ClassDef):
        raise TypeError(f"{name} is not a class")
    found: dict[str, str] = {}
    last = ""
    for node in body.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=last)) | ast.Assign(targets=[ast.Name(id=last)]):
                found.setdefault(last, "")
            case ast.Expr(value=ast.Constant(value=str(said))) if last:
                found[last] = " ".join(said.split()).replace("``", "`")
            case _:
                last = ""
    return found


def limits(module: object, name: str, defaults: object) -> str:
    """The limits of one machine as a table."""
    rows = [
        f"| `{key}` | {'none' if (value := getattr(defaults, key)) is None else f'{value:,}'} | {said} |"
        for key, said in texts(module, name).items()
    ]
    return "\n".join(["| limit | default | meaning |", "|---|---|---|", *rows])


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    drawn, listed = tables.render_diagrams(), tables.render_tables()
    for key, title, states in SECTIONS:
        said = texts(tables, states.__name__)
        notes = "".join(f"* `{states[name].value}`: {text}\n" for name, text in said.items() if text)
        parts.append(f"\n## {title} ({key})\n\n{listed[key]}\n\n{notes}\n```mermaid\n{drawn[key]}\n```\n")
    parts.append("\n## Limits of the producer\n\nTimes are seconds.\n\n")
    parts.append(limits(producer_records, "ProducerLimits", ProducerLimits()))
    parts.append("\n\n## Limits of the consumer\n\n")
    parts.append(limits(consumer_records, "ConsumerLimits", ConsumerLimits()))
    return "".join([*parts, "\n", TAIL])


def main() -> int:
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
