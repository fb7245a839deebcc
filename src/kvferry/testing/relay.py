"""Between a consumer and a producer's message socket: a relay that delays, drops, repeats and withholds whole messages.

A TCP relay cannot repeat a message without breaking the stream, so this one speaks ZeroMQ: a ROUTER toward the
consumers, and a DEALER for each of their connections toward the producer. Toward each side it is a live peer: libzmq's
heartbeats are answered here, so what is withheld looks like a peer that lives and says nothing.

A consumer finds the relay through :class:`Front`, a bootstrap service that repeats another one's answer with the
producer's address exchanged.
"""

import contextlib
import heapq
import itertools
import random
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import zmq


@dataclass(slots=True)
class Weather:
    """What happens to messages. May be changed while the relay runs."""

    delay: float = 0.0
    jitter: float = 0.0
    """Up to so much more, drawn for each message: later ones may overtake."""
    drop: float = 0.0
    """Part of the messages that are lost."""
    repeat: float = 0.0
    """Part of the messages that come twice."""
    black_hole: bool = False
    """Nothing goes through any more."""
    counts: dict[str, int] = field(default_factory=lambda: {"passed": 0, "dropped": 0, "repeated": 0})


class Relay:
    """A relay to one producer rank, in a thread of its own."""

    def __init__(self, target: str, weather: Weather, *, seed: int = 0) -> None:
        self.weather = weather
        self._target = target
        self._random = random.Random(seed)
        self._context = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        self._port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self._port}"
        """For the consumers."""
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._queue: list[tuple[float, int, bytes, bool, bytes]] = []
        self._serial = itertools.count()
        self._closing = threading.Event()
        self._cutting = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut all connections and end the thread; safe to call twice."""
        self._closing.set()
        self._thread.join(5)

    def cut(self) -> None:
        """Break all connections; new ones can be made at once. Returns when that is done."""
        self._cutting.set()
        while self._cutting.is_set() and self._thread.is_alive():
            time.sleep(0.005)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._closing.is_set():
            if self._cutting.is_set():
                poller = self._renewed()
                self._cutting.clear()
            ready = dict(poller.poll(5))
            if self._front in ready:
                who, frame = self._front.recv_multipart()[:2]
                if who not in self._backs:
                    back = self._backs[who] = self._socket(zmq.DEALER)
                    back.connect(self._target)
                    poller.register(back, zmq.POLLIN)
                self._take(who, frame, to_producer=True)
            for who, back in self._backs.items():
                if back in ready:
                    self._take(who, back.recv_multipart()[0], to_producer=False)
            self._send_due()
        for socket in (self._front, *self._backs.values()):
            socket.close()
        self._context.destroy(linger=0)

    def _renewed(self) -> zmq.Poller:
        """New sockets at the old address."""
        for socket in (self._front, *self._backs.values()):
            socket.close()
        self._backs.clear()
        self._queue.clear()
        self._front = self._socket(zmq.ROUTER)
        for _ in range(200):
            try:
                self._front.bind(self.address)
                break
            except zmq.ZMQError:
                time.sleep(0.01)
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        return poller

    def _take(self, who: bytes, frame: bytes, *, to_producer: bool) -> None:
        weather, draw = self.weather, self._random.random
        if weather.black_hole or draw() < weather.drop:
            weather.counts["dropped"] += 1
            return
        times = 2 if draw() < weather.repeat else 1
        weather.counts["repeated"] += times - 1
        for _ in range(times):
            due = time.monotonic() + weather.delay + weather.jitter * draw()
            heapq.heappush(self._queue, (due, next(self._serial), who, to_producer, frame))

    def _send_due(self) -> None:
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, _, who, to_producer, frame = heapq.heappop(self._queue)
            self.weather.counts["passed"] += 1
            with contextlib.suppress(zmq.ZMQError):
                if to_producer:
                    self._backs[who].send(frame, zmq.NOBLOCK)
                else:
                    self._front.send_multipart([who, frame], zmq.NOBLOCK)


class Front:
    """Repeats a bootstrap service's ``/query`` with one address exchanged for another."""

    def __init__(self, url: str, *, real: str, shown: str) -> None:
        def answer() -> bytes:
            with urllib.request.urlopen(f"{url}/query", timeout=5) as found:
                body: bytes = found.read()
            return body.replace(real.encode(), shown.encode())

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = answer()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
