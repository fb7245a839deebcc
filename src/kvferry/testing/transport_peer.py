"""A receiver in a process of its own, for tests of transports: registers a file's pages and obeys a few words.

``python -m kvferry.testing.transport_peer mooncake|cma FILE NBYTES`` maps the file shared, registers it as two adjacent
regions, and prints one line of JSON: its address, and where the memory lies. The test maps the same file, so it sees
what has landed, even after this process was killed. Words on standard input: ``admit ADDRESS``, ``close``; each is
answered by one line. It ends with its input.
"""

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

import numpy as np

from kvferry.layout import Region
from kvferry.transport import CmaTransport, MooncakeTransport, Transport

HOST = "127.0.0.1"


def two_regions(address: int, nbytes: int) -> tuple[Region, Region]:
    """One piece of memory as two regions that touch: a row must not cross the seam."""
    half = nbytes // 2
    return Region(address=address, nbytes=half), Region(address=address + half, nbytes=nbytes - half)


def map_file(path: Path, nbytes: int) -> np.ndarray:
    """The file's pages as bytes, shared with whoever maps it too."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)


def make_transport(name: str) -> Transport:
    """The transport of this name, for one host."""
    return CmaTransport() if name == "cma" else MooncakeTransport(HOST)


class PeerProcess:
    """The receiver, seen from the test."""

    def __init__(self, transport: str, path: Path, nbytes: int) -> None:
        path.touch()
        os.truncate(path, nbytes)
        self.memory = map_file(path, nbytes)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, transport, str(path), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = json.loads(self._answer())
        self.address: str = hello["address"]
        self.regions = two_regions(hello["memory"], nbytes)

    def tell(self, *words: str) -> str:
        """Say something to the receiver, and wait for its answer."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(" ".join(words) + "\n")
        stdin.flush()
        return self._answer()

    def admit(self, address: str) -> None:
        """Let that writer write here."""
        assert self.tell("admit", address) == "admitted"

    def close(self) -> None:
        """Close the receiver's transport; its process lives on."""
        assert self.tell("close") == "closed"

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Take it away, whatever state it is in."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            _close(stream)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the receiving process ended, status {self._process.poll()}"
        return line.strip()


def _close(stream: IO[str] | None) -> None:
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def serve(transport: Transport, memory: np.ndarray, words: TextIO) -> Iterator[str]:
    """Register, and answer each word; yields the lines to print."""
    address = memory.ctypes.data
    transport.register(two_regions(address, memory.nbytes))
    yield json.dumps({"address": transport.address(), "memory": address})
    for line in words:
        match line.split():
            case ["admit", writer]:
                transport.admit(writer)
                yield "admitted"
            case ["close"]:
                transport.close()
                yield "closed"
            case _:
                yield f"unknown word: {line.strip()}"


def main(name: str, path: str, nbytes: str) -> None:
    """Run one receiver."""
    memory = map_file(Path(path), int(nbytes))
    for line in serve(make_transport(name), memory, sys.stdin):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
