"""A marker page: one process writes into another through a real transport; both compare, and the writes are timed.

Writer and receiver talk in lines of JSON over a stream that has nothing to do with the transport. The writer says who
it is; the receiver registers a page, lets the writer in, and says where the page is; then, twice, the writer fills the
page with fresh random bytes, writes it, and tells the digests of its parts, and the receiver says whether it has the
same. Where it has not, it looks again a little later: a page that comes late was reported as done too early, which is
another fault than one that went elsewhere. The first write includes the connection, the second shows the speed of the
transport. Either may answer with a reason instead. Memory of this exchange only is registered, and its engine is
destroyed at the end.

Within one machine the *child* writes into its parent: that is the direction for which the kernel asks permission.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvferry.errors import FerryError, TransportError, TransportReason
from kvferry.layout import Region
from kvferry.plan import Descriptors
from kvferry.runtime.checkup.line import TIMEOUT, Line
from kvferry.transport import CmaTransport, MooncakeTransport, SubmissionState, Transport, wait

PAGE: Final = 1 << 20
PARTS: Final = 16
ROUNDS: Final = 2
VERSION: Final = 1
LATE: Final = 1.0
"""So long a receiver waits for bytes that should be there."""
TOLD: Final = 3
"""Exit status of a child that has said what went wrong."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Marker pages that arrived, equal at both ends."""

    transport: str
    protocol: str
    nbytes: int
    seconds: tuple[float, ...]
    """Of each write; the first one connects."""

    def __str__(self) -> str:
        first, *_, last = self.seconds
        speed = self.nbytes / last / 2**30
        return (
            f"{self.nbytes:,} bytes over {self.protocol} equal at both ends; first write {first * 1e3:,.1f} ms with "
            f"its connection, next {last * 1e3:,.2f} ms ({speed:,.2f} GiB/s)"
        )


def make_transport(name: str, *, host: str, protocol: str, device: str) -> Transport:
    """A fresh engine."""
    if name == "cma":
        return CmaTransport()
    if name == "mooncake":
        return MooncakeTransport(host, protocol=protocol, device=device)
    raise TransportError(TransportReason.UNAVAILABLE, f"no transport {name[:40]!r}; there are mooncake and cma")


@dataclass(frozen=True, slots=True)
class Way:
    """How a marker page is to be sent."""

    transport: str
    host: str
    protocol: str = "tcp"
    device: str = ""

    def make(self) -> Transport:
        """A fresh engine for it."""
        return make_transport(self.transport, host=self.host, protocol=self.protocol, device=self.device)


def write_marker(line: Line, way: Way) -> Delivery:
    """The writer's part."""
    return _telling(line, lambda: _write_marker(line, way))


def receive_marker(line: Line, way: Way) -> Delivery:
    """The receiver's part; ``way`` says with which host and device it receives."""
    return _telling(line, lambda: _receive_marker(line, way))


def deliver_to_peer(address: tuple[str, int], way: Way) -> Delivery:
    """Write a marker page into a process that runs ``kvferry doctor --serve``."""
    try:
        stream = socket.create_connection(address, timeout=TIMEOUT)
    except OSError as error:
        raise TransportError(
            TransportReason.PEER_UNREACHABLE,
            f"{address[0]}:{address[1]} cannot be reached ({error}); does 'kvferry doctor --serve' run there?",
        ) from error
    line = Line(stream)
    try:
        return write_marker(line, way)
    finally:
        line.close()


def deliver_to_self(way: Way) -> Delivery:
    """Have a child process write a marker page into this one."""
    ours, theirs = socket.socketpair()
    line = Line(ours)
    words = [sys.executable, "-m", "kvferry.runtime.checkup.marker_child", str(theirs.fileno()), _spelled(way)]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
        theirs.close()
        try:
            return receive_marker(line, way)
        except TransportError as error:
            raise _with_last_words(error, child, errors.fileno()) from error
        finally:
            line.close()
            if child.poll() is None:
                child.terminate()
            child.wait(TIMEOUT)


def serve_markers(address: tuple[str, int], way: Way, told: Callable[[str], None]) -> None:
    """Receive marker pages from whoever comes, one after another, until interrupted. Each has its own fresh page."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.create_server(address, family=family) as server:
        host, port = server.getsockname()[:2]
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        told(f"waiting on {shown} for 'kvferry doctor --peer {shown}'")
        while True:
            stream, peer = server.accept()
            line = Line(stream)
            try:
                told(f"from {peer[0]}: {receive_marker(line, way)}")
            except FerryError as error:
                told(f"from {peer[0]}: {error}")
            finally:
                line.close()


def _write_marker(line: Line, way: Way) -> Delivery:
    engine = way.make()
    page = np.zeros(PAGE, np.uint8)
    here = Region(address=page.ctypes.data, nbytes=PAGE)
    try:
        engine.register([here])
        protocol = engine.protocol_in_use()
        line.say(marker=VERSION, transport=way.transport, protocol=protocol, writer=engine.address(), nbytes=PAGE)
        target = line.hear()
        there = Region(address=_number(target, "page"), nbytes=PAGE)
        seconds = []
        for _ in range(ROUNDS):
            page[:] = np.frombuffer(os.urandom(PAGE), np.uint8)
            seconds.append(_write(engine, str(target.get("address", "")), here=here, there=there))
            line.say(digests=digest_parts(page), seconds=seconds[-1])
            if line.hear().get("equal") is not True:
                raise TransportError(TransportReason.ENGINE_FAULT, "the other side says that its page is another")
        return Delivery(way.transport, protocol, PAGE, tuple(seconds))
    finally:
        engine.close()


def _receive_marker(line: Line, way: Way) -> Delivery:
    asked = line.hear()
    name, protocol = str(asked.get("transport")), str(asked.get("protocol"))
    if asked.get("marker") != VERSION or asked.get("nbytes") != PAGE:
        raise TransportError(TransportReason.UNAVAILABLE, "the two sides are of different versions of kvferry")
    engine = Way(name, way.host, way.protocol, way.device).make()
    page = np.zeros(PAGE, np.uint8)
    region = Region(address=page.ctypes.data, nbytes=PAGE)
    try:
        if engine.protocol_in_use() != protocol:
            raise TransportError(
                TransportReason.WRONG_PROTOCOL, f"the writer uses {protocol}, the receiver {engine.protocol_in_use()}"
            )
        engine.register([region])
        engine.admit(str(asked.get("writer")))
        line.say(address=engine.address(), page=region.address)
        seconds = []
        for _ in range(ROUNDS):
            done = line.hear()
            if (fault := compare_page(page, done.get("digests"))) is not None:
                raise TransportError(TransportReason.ENGINE_FAULT, fault)
            line.say(equal=True)
            seconds.append(float(done.get("seconds", 0.0)))
        return Delivery(name, protocol, PAGE, tuple(seconds))
    finally:
        engine.close()


def _write(engine: Transport, address: str, *, here: Region, there: Region) -> float:
    began = time.perf_counter()
    peer = engine.open_peer(address, [there])
    submission = engine.submit(peer, Descriptors.of([here.address], [there.address], [PAGE]))
    state = wait(submission, timeout_s=TIMEOUT / 2)
    took = time.perf_counter() - began
    if state is SubmissionState.DONE:
        return took
    raise submission.error or TransportError(
        TransportReason.TIMED_OUT, f"the page has not arrived within {TIMEOUT / 2:.0f} s"
    )


def compare_page(
    page: "np.ndarray[Any, np.dtype[np.uint8]]", told: object, *, sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """What is wrong with the page that should be there; ``None`` for nothing."""
    if (found := digest_parts(page)) == told:
        return None
    if not isinstance(told, list) or len(told) != PARTS:
        return "the other side does not say what it wrote"
    differ = sum(ours != theirs for ours, theirs in zip(found, told, strict=True))
    deadline = time.monotonic() + LATE
    while time.monotonic() < deadline:
        sleep(0.01)
        if digest_parts(page) == told:
            return f"the write was reported as done when {differ} of {PARTS} parts had not arrived; they came later"
    return f"the write was reported as done, and {differ} of {PARTS} parts of the page that arrived are others"


def _telling(line: Line, part: Callable[[], Delivery]) -> Delivery:
    """Run one side's part; what goes wrong in it is told to the other side too, if that still listens."""
    try:
        return part()
    except TransportError as error:
        try:
            line.say(reason=error.reason.value, said=error.message)
        except TransportError:
            raise error from None
        raise


def _with_last_words(error: TransportError, child: "subprocess.Popen[bytes]", errors: int) -> TransportError:
    """Add what a child that died has left behind."""
    try:
        code = child.wait(5.0)
    except subprocess.TimeoutExpired:
        return error
    if code in (0, TOLD):
        return error
    size = os.fstat(errors).st_size
    words = os.pread(errors, 2000, max(0, size - 2000)).decode(errors="replace").strip().splitlines()
    return TransportError(error.reason, f"{error.message}; the child ended with {code}: {words[-1] if words else ''}")


def _number(message: dict[str, Any], key: str) -> int:
    value = message.get(key)
    if not isinstance(value, int) or value <= 0:
        raise TransportError(TransportReason.PEER_UNREACHABLE, f"the other side names no {key}")
    return value


def digest_parts(page: "np.ndarray[Any, np.dtype[np.uint8]]") -> list[str]:
    """A digest of each part of a page."""
    return [hashlib.blake2b(part.data, digest_size=8).hexdigest() for part in np.split(page, PARTS)]


def _spelled(way: Way) -> str:
    return json.dumps([way.transport, way.host, way.protocol, way.device])
